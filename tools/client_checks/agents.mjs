// What the checks of agents share: a folder with a file to mend, the agent's command in it, and what must have come of it.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

export const URL_ROOT = process.env.DOVETAIL_SCRIPTED_URL;
export const MODEL = "scripted";
export const TASK = "Mend calc.py and run its test.";

export function mend(name, args, environment, files = {}) {
  assert.ok(URL_ROOT, "no server with a scripted model");
  const home = mkdtempSync(join(tmpdir(), "agent-"));
  const folder = join(home, "work");
  mkdirSync(folder);
  writeFileSync(join(folder, "calc.py"), "def add(a, b):\n    return a - b\n");
  writeFileSync(join(folder, "test_calc.py"), "from calc import add\nassert add(2, 3) == 5\nprint('passed')\n");
  for (const [file, text] of Object.entries(files)) writeFileSync(join(home, file), text);
  const env = { PATH: process.env.PATH, HOME: home, CI: "1", ...environment(home) };
  const options = { cwd: folder, env, encoding: "utf8", timeout: 240_000, stdio: ["ignore", "pipe", "pipe"] };
  const done = spawnSync(resolve("node_modules/.bin", name), args, options);
  assert.match(readFileSync(join(folder, "calc.py"), "utf8"), /a \+ b/, (done.stderr + done.stdout).slice(-300));
  assert.match(done.stdout, /Mended: the test passes/);
  assert.equal(done.status, 0);
}
