// opencode: mends a file and runs its test, over /v1/chat/completions.
import { spawnSync } from "node:child_process";
import { MODEL, TASK, URL_ROOT, mend } from "./agents.mjs";
import { run } from "./common.mjs";

spawnSync("node", ["postinstall.mjs"], { cwd: "node_modules/opencode-ai" }); // what npm may not run by itself
const config = {
  provider: {
    dovetail: {
      npm: "@ai-sdk/openai-compatible",
      options: { baseURL: `${URL_ROOT}/v1`, apiKey: "none" },
      models: { [MODEL]: { limit: { context: 400_000, output: 32_000 } } },
    },
  },
  model: `dovetail/${MODEL}`,
  small_model: `dovetail/${MODEL}`,
  autoupdate: false,
  share: "disabled",
};
const files = { "work/opencode.json": JSON.stringify(config) };

await run("opencode-ai", [
  ["tools", "edits a file and runs its test", () => mend("opencode", ["run", TASK], () => ({}), files)],
]);
