// Codex: mends a file and runs its test, over /v1/responses.
import { MODEL, TASK, URL_ROOT, mend } from "./agents.mjs";
import { run } from "./common.mjs";

const CONFIG = `
model = "${MODEL}"
model_provider = "dovetail"
model_context_window = 400000
[model_providers.dovetail]
name = "Dovetail"
base_url = "${URL_ROOT}/v1"
wire_api = "responses"
[analytics]
enabled = false
`;
const args = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK];

await run("@openai/codex", [
  ["tools", "edits a file and runs its test", () => mend("codex", args, (home) => ({ CODEX_HOME: home }), { "config.toml": CONFIG })],
]);
