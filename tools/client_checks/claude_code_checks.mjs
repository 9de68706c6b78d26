// Claude Code: mends a file and runs its test, over /v1/messages.
import { spawnSync } from "node:child_process";
import { MODEL, TASK, URL_ROOT, mend } from "./agents.mjs";
import { run } from "./common.mjs";

spawnSync("node", ["install.cjs"], { cwd: "node_modules/@anthropic-ai/claude-code" }); // what npm may not run by itself
const environment = () => ({
  ANTHROPIC_BASE_URL: URL_ROOT,
  ANTHROPIC_API_KEY: "none",
  ANTHROPIC_MODEL: MODEL,
  ANTHROPIC_SMALL_FAST_MODEL: MODEL,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  IS_SANDBOX: "1",
});

await run("@anthropic-ai/claude-code", [
  ["tools", "edits a file and runs its test", () => mend("claude", ["-p", TASK, "--dangerously-skip-permissions"], environment)],
]);
