// What the checks of the clients from npm share, as common.py does for the others.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

export const URL_ROOT = process.env.DOVETAIL_URL ?? "http://127.0.0.1:8000";
export const MODEL = process.env.DOVETAIL_MODEL ?? "smollm2-135m-instruct";
export const QUESTION = "Please name the capital of Germany.";
export const WANTED = "Berlin"; // in the answer
export const TEXTS = ["a cat on a mat", "a dog in the fog", "a cat on a mat"];
export const CITY_SCHEMA = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};

export function checkCall(name, given) {
  assert.equal(name, "get_forecast");
  const { city, days } = typeof given === "string" ? JSON.parse(given) : given;
  assert.equal(typeof city, "string");
  assert.ok(Number.isInteger(days) && days >= 1 && days <= 9);
}

export function checkVectors([first, second, again]) {
  assert.ok(first.length > 100);
  assert.ok(Math.max(...first.map((value, at) => Math.abs(value - again[at]))) < 1e-5);
  assert.ok(first.reduce((sum, value, at) => sum + value * second[at], 0) < 0.9999);
}

// checks: [area, name, function] each; one JSON line per check.
export async function run(packageName, checks) {
  const about = JSON.parse(readFileSync(`node_modules/${packageName}/package.json`, "utf8"));
  console.log(JSON.stringify({ version: about.version }));
  for (const [area, check, work] of checks) {
    let error = "";
    try {
      await work();
    } catch (failure) {
      error = `${failure.name}: ${failure.message}`.replace(/\s+/g, " ").slice(0, 400);
    }
    console.log(JSON.stringify({ area, check, error }));
  }
}
