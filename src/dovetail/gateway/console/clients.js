// Settings of clients for this server, ready to copy. Knows no DOM.
import { KEY_VARIABLE, quoteShell } from "./examples.js";

// Of `server`: {url, model, context, hasKeys}. Each client is {id, title, needs?, about, parts: server → [{file?, language, text}]}.
export const CLIENTS = [
  {
    id: "any", title: "Any OpenAI client", about: "What is asked for nearly everywhere.",
    parts: (server) => [
      { language: "shell", text: `${keyLines(server, "OPENAI_API_KEY")}export OPENAI_BASE_URL=${server.url}/v1` },
      { file: "main.py", language: "python", text: `${server.hasKeys ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url="${server.url}/v1", api_key=${pythonKey(server)})\nanswer = client.chat.completions.create(\n    model=${quoted(server.model)},\n    messages=[{"role": "user", "content": "Hello!"}],\n)\nprint(answer.choices[0].message.content)` },
    ],
  },
  {
    id: "codex", title: "Codex", needs: "/v1/responses", about: "Speaks the Responses API. Models that call tools well are of use here.",
    parts: (server) => [
      {
        file: "~/.codex/config.toml", language: "toml",
        text: [
          `model = ${quoted(server.model)}`, 'model_provider = "dovetail"', ...(server.context ? [`model_context_window = ${server.context}`] : []), "",
          "[model_providers.dovetail]", 'name = "Dovetail"', `base_url = "${server.url}/v1"`, 'wire_api = "responses"',
          ...(server.hasKeys ? [`env_key = "${KEY_VARIABLE}"`] : []),
        ].join("\n"),
      },
      { language: "shell", text: `${ownKey(server)}codex` },
    ],
  },
  {
    id: "claude", title: "Claude Code", needs: "/v1/messages", about: "Speaks Anthropic's Messages API. All of its models are this one; the address has no /v1.",
    parts: (server) => [
      {
        language: "shell",
        text: [
          `export ANTHROPIC_BASE_URL=${server.url}`,
          server.hasKeys ? `export ANTHROPIC_AUTH_TOKEN=YOUR_KEY` : "export ANTHROPIC_AUTH_TOKEN=none",
          ...["ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"].map((name) => `export ${name}=${shellWord(server.model)}`),
          "unset ANTHROPIC_API_KEY", "claude",
        ].join("\n"),
      },
    ],
  },
  {
    id: "opencode", title: "opencode", about: "In the project's folder, or in ~/.config/opencode.",
    parts: (server) => [
      {
        file: "opencode.json", language: "json",
        text: json({
          provider: {
            dovetail: {
              npm: "@ai-sdk/openai-compatible", name: "Dovetail",
              options: { baseURL: `${server.url}/v1`, apiKey: server.hasKeys ? `{env:${KEY_VARIABLE}}` : "none" },
              models: { [server.model]: { name: server.model, ...(server.context ? { limit: { context: server.context, output: Math.ceil(server.context / 4) } } : {}) } },
            },
          },
          model: `dovetail/${server.model}`,
        }),
      },
      { language: "shell", text: `${ownKey(server)}opencode` },
    ],
  },
  {
    id: "aider", title: "aider", about: "It does not know the model, and says so once.",
    parts: (server) => [
      { language: "shell", text: `export OPENAI_API_BASE=${server.url}/v1\n${keyLines(server, "OPENAI_API_KEY")}aider --model ${shellWord(`openai/${server.model}`)}` },
    ],
  },
  {
    id: "webui", title: "Open WebUI", about: "In a container the server's address is that of the host, and the server has to listen beyond loopback: with keys, and --host.",
    parts: (server) => [
      { language: "shell", text: `export OPENAI_API_BASE_URL=${server.url}/v1\n${keyLines(server, "OPENAI_API_KEY")}export ENABLE_OLLAMA_API=false\nopen-webui serve --port 8080` },
    ],
  },
  {
    id: "litellm", title: "LiteLLM", about: "As a proxy; in Python the same model is openai/NAME with api_base.",
    parts: (server) => [
      {
        file: "litellm.yaml", language: "yaml",
        text: [
          "model_list:", `  - model_name: ${quoted(server.model)}`, "    litellm_params:", `      model: ${quoted(`openai/${server.model}`)}`,
          `      api_base: ${quoted(`${server.url}/v1`)}`, `      api_key: ${server.hasKeys ? `os.environ/${KEY_VARIABLE}` : '"none"'}`,
        ].join("\n"),
      },
      { language: "shell", text: `${ownKey(server)}litellm --config litellm.yaml --port 4000` },
    ],
  },
  {
    id: "langchain", title: "LangChain", about: "With the package langchain-openai.",
    parts: (server) => [
      {
        file: "main.py", language: "python",
        text: `${server.hasKeys ? "import os\n\n" : ""}from langchain_openai import ChatOpenAI\n\nllm = ChatOpenAI(model=${quoted(server.model)}, base_url="${server.url}/v1", api_key=${pythonKey(server)})\nprint(llm.invoke("Hello!").content)`,
      },
    ],
  },
  {
    id: "lmeval", title: "lm-eval", about: "Tasks with choices read the prompt's log-probabilities; the server's own tokenizer is asked. Tasks with answers take the chat.",
    parts: (server) => [
      {
        language: "shell",
        text: `${keyLines(server, "OPENAI_API_KEY")}lm_eval --model local-completions --tasks hellaswag --limit 20 \\\n  --model_args ${shellWord(`model=${server.model},base_url=${server.url}/v1/completions,tokenizer_backend=remote,num_concurrent=4`)}`,
      },
      {
        language: "shell",
        text: `${keyLines(server, "OPENAI_API_KEY")}lm_eval --model local-chat-completions --tasks gsm8k --limit 20 --apply_chat_template \\\n  --model_args ${shellWord(`model=${server.model},base_url=${server.url}/v1/chat/completions,num_concurrent=4`)}`,
      },
    ],
  },
];

export const usable = (paths) => CLIENTS.filter(({ needs }) => !needs || paths[needs]);

export const partsFor = (id, server) => CLIENTS.find((client) => client.id === id).parts(server);

const quoted = (text) => JSON.stringify(text);
const json = (value) => JSON.stringify(value, null, 2);
const shellWord = (text) => (/^[\w./:@=,+-]+$/.test(text) ? text : quoteShell(text));
const pythonKey = ({ hasKeys }) => (hasKeys ? `os.environ["${KEY_VARIABLE}"]` : '"none"');
const ownKey = ({ hasKeys }) => (hasKeys ? `export ${KEY_VARIABLE}=YOUR_KEY\n` : "");
const keyLines = ({ hasKeys }, name) => `export ${name}=${hasKeys ? "YOUR_KEY" : "none"}\n`;
