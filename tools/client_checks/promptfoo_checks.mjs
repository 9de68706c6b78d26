// promptfoo: an evaluation of one question.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { MODEL, QUESTION, URL_ROOT, WANTED, run } from "./common.mjs";

function evaluate() {
  const config = { apiBaseUrl: `${URL_ROOT}/v1`, apiKey: "none", temperature: 0, max_tokens: 40 };
  const suite = {
    prompts: [QUESTION],
    providers: [{ id: `openai:chat:${MODEL}`, config }],
    tests: [{ assert: [{ type: "contains", value: WANTED }] }],
  };
  writeFileSync("promptfooconfig.json", JSON.stringify(suite));
  const env = { ...process.env, PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_CONFIG_DIR: "." };
  const args = ["eval", "-c", "promptfooconfig.json", "--no-cache", "-o", "out.json"];
  const done = spawnSync("node_modules/.bin/promptfoo", args, { env, encoding: "utf8", timeout: 240_000 });
  assert.equal(done.status, 0, (done.stderr + done.stdout).slice(-400));
  assert.equal(JSON.parse(readFileSync("out.json", "utf8")).results.stats.successes, 1);
}

await run("promptfoo", [["chat", "evaluates an answer", evaluate]]);
