// qwen-code: mends a file and runs its test, over /v1/chat/completions.
import { MODEL, TASK, URL_ROOT, mend } from "./agents.mjs";
import { run } from "./common.mjs";

const environment = () => ({ OPENAI_API_KEY: "none", OPENAI_BASE_URL: `${URL_ROOT}/v1`, OPENAI_MODEL: MODEL });
const args = ["--auth-type", "openai", "--yolo", "-p", TASK];

await run("@qwen-code/qwen-code", [
  ["tools", "edits a file and runs its test", () => mend("qwen", args, environment)],
]);
