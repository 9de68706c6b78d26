// Requests that the API tab shows and runs, and the same as programs. Knows no DOM.

const QUESTION = "Please name the capital of Germany.";

// `call`: of the SDK, {sdk: "openai" | "anthropic", name, js?}.
export const EXAMPLES = [
  {
    id: "chat", title: "Chat", path: "/v1/chat/completions", call: { name: "chat.completions.create" },
    about: "Answers a conversation. OpenAI's chat API, with vLLM's extensions.",
    body: (model) => ({ model, messages: [{ role: "system", content: "Answer in one sentence." }, { role: "user", content: QUESTION }], max_tokens: 64, temperature: 0 }),
    answer: { id: "chatcmpl-…", object: "chat.completion", choices: [{ index: 0, message: { role: "assistant", content: "The capital of Germany is Berlin." }, finish_reason: "stop" }], usage: { prompt_tokens: 31, completion_tokens: 8, total_tokens: 39 } },
  },
  {
    id: "stream", title: "Chat, streamed", path: "/v1/chat/completions", call: { name: "chat.completions.create" },
    about: "The same, a token at a time, as server-sent events. While a model is loaded, comments say how far that is.",
    body: (model) => ({ model, messages: [{ role: "user", content: QUESTION }], max_tokens: 64, stream: true }),
    answer: 'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"The"}}], …}\n\ndata: [DONE]',
  },
  {
    id: "schema", title: "Chat, as JSON", path: "/v1/chat/completions", call: { name: "chat.completions.create" },
    about: "The answer follows the schema by construction, whatever the model would say.",
    body: (model) => ({
      model,
      messages: [{ role: "user", content: QUESTION }],
      max_tokens: 128,
      response_format: {
        type: "json_schema",
        json_schema: { name: "capital", schema: { type: "object", properties: { country: { type: "string" }, capital: { type: "string" } }, required: ["country", "capital"], additionalProperties: false } },
      },
    }),
    answer: { choices: [{ message: { role: "assistant", content: '{"country": "Germany", "capital": "Berlin"}' }, finish_reason: "stop" }] },
  },
  {
    id: "responses", title: "Responses", path: "/v1/responses", call: { name: "responses.create" },
    about: "OpenAI's Responses API. An answer is kept for `previous_response_id` unless `store` is false.",
    body: (model) => ({ model, instructions: "Answer in one sentence.", input: QUESTION, max_output_tokens: 64 }),
    answer: { id: "resp_…", object: "response", status: "completed", output: [{ type: "message", role: "assistant", content: [{ type: "output_text", text: "The capital of Germany is Berlin." }] }] },
  },
  {
    id: "messages", title: "Messages", path: "/v1/messages", call: { sdk: "anthropic", name: "messages.create" },
    about: "Anthropic's Messages API.",
    body: (model) => ({ model, system: "Answer in one sentence.", messages: [{ role: "user", content: QUESTION }], max_tokens: 64 }),
    answer: { id: "msg_…", type: "message", role: "assistant", content: [{ type: "text", text: "The capital of Germany is Berlin." }], stop_reason: "end_turn" },
  },
  {
    id: "completions", title: "Completions", path: "/v1/completions", call: { name: "completions.create" },
    about: "Goes on with a text, without a chat template.",
    body: (model) => ({ model, prompt: "The capital of Germany is", max_tokens: 16, temperature: 0 }),
    answer: { id: "cmpl-…", object: "text_completion", choices: [{ index: 0, text: " Berlin.", finish_reason: "stop" }] },
  },
  {
    id: "embeddings", title: "Embeddings", path: "/v1/embeddings", call: { name: "embeddings.create" },
    about: "Texts as vectors. Encoders are made for it; of other models it is the mean of the last hidden states.",
    body: (model) => ({ model, input: ["A joint of two boards.", "A capital of a country."], encoding_format: "float" }),
    answer: { object: "list", data: [{ object: "embedding", index: 0, embedding: [0.0123, -0.0456] }], usage: { prompt_tokens: 12, total_tokens: 12 } },
  },
  {
    id: "tokenize", title: "Tokenize", path: "/tokenize", call: null,
    about: "The tokens of a text, or of a conversation with `messages`.",
    body: (model) => ({ model, prompt: "Two boards, one joint.", return_token_strs: true }),
    answer: { tokens: [10463, 6776], count: 2, max_model_len: 2048 },
  },
  {
    id: "models", title: "Models", path: "/v1/models", method: "GET", call: { name: "models.list" },
    about: "What is on offer here, loaded or not.",
    body: () => null,
    answer: { object: "list", data: [{ id: "smollm2-135m-instruct", object: "model", max_model_len: 2048 }] },
  },
];

// Those whose path the server has, of its OpenAPI document.
export const offered = (paths) => EXAMPLES.filter(({ path, method = "POST" }) => paths[path]?.[method.toLowerCase()]);

export const KEY_VARIABLE = "DOVETAIL_API_KEY";

export const quoteShell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function asCurl({ path, method = "POST" }, body, { url, hasKeys }) {
  const lines = [`curl ${body?.stream ? "-N " : ""}${url}${path}`];
  if (hasKeys) lines.push(`-H "Authorization: Bearer $${KEY_VARIABLE}"`);
  if (method === "POST") lines.push("-H 'Content-Type: application/json'", `-d ${quoteShell(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n  ");
}

// As an SDK is called; without an SDK for the path, with httpx.
export function asPython({ path, call }, body, { url, hasKeys }) {
  const key = hasKeys ? `os.environ["${KEY_VARIABLE}"]` : '"none"';
  const head = hasKeys ? "import os\n\n" : "";
  if (!call) {
    const headers = hasKeys ? `, headers={"Authorization": "Bearer " + ${key}}` : "";
    return `${head}import httpx\n\nanswer = httpx.post("${url}${path}", json=${pythonValue(body)}${headers}, timeout=60)\nprint(answer.json())`;
  }
  const isAnthropic = call.sdk === "anthropic";
  const name = isAnthropic ? "Anthropic" : "OpenAI";
  const made = `${head}from ${name.toLowerCase()} import ${name}\n\nclient = ${name}(base_url="${url}${isAnthropic ? "" : "/v1"}", api_key=${key})`;
  const options = Object.entries(body || {}).map(([option, value]) => `    ${option}=${pythonValue(value, 1)},\n`);
  const called = `client.${call.name}(${options.length ? `\n${options.join("")}` : ""})`;
  if (body?.stream) return `${made}\nfor event in ${called}:\n    print(event)`;
  return `${made}\nanswer = ${called}\nprint(answer)`;
}

export function asJavaScript({ path, call }, body, { url, hasKeys }) {
  const key = hasKeys ? `process.env.${KEY_VARIABLE}` : '"none"';
  const written = body ? JSON.stringify(body, null, 2).replace(/^(\s*)"(\w+)":/gm, "$1$2:") : "";
  if (!call) {
    const headers = hasKeys ? `, authorization: \`Bearer \${${key}}\`` : "";
    return `const answer = await fetch("${url}${path}", {\n  method: "POST",\n  headers: { "content-type": "application/json"${headers} },\n  body: JSON.stringify(${written.replaceAll("\n", "\n  ")}),\n});\nconsole.log(await answer.json());`;
  }
  const isAnthropic = call.sdk === "anthropic";
  const [name, module] = isAnthropic ? ["Anthropic", "@anthropic-ai/sdk"] : ["OpenAI", "openai"];
  const made = `import ${name} from "${module}";\n\nconst client = new ${name}({ baseURL: "${url}${isAnthropic ? "" : "/v1"}", apiKey: ${key} });`;
  const called = `await client.${call.name}(${written})`;
  if (body?.stream) return `${made}\nfor await (const event of ${called}) console.log(event);`;
  return `${made}\nconst answer = ${called};\nconsole.log(answer);`;
}

export function pythonValue(value, depth = 0) {
  const inner = "    ".repeat(depth + 1), outer = "    ".repeat(depth);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const parts = isList
    ? value.map((each) => pythonValue(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${pythonValue(each, depth + 1)}`);
  const [begin, end] = isList ? "[]" : "{}";
  const line = `${begin}${parts.join(", ")}${end}`;
  if (line.length + outer.length <= 88 && !line.includes("\n")) return line;
  return `${begin}\n${parts.map((part) => `${inner}${part},\n`).join("")}${outer}${end}`;
}

const MANY = 12; // numbers of a list that are shown

// An answer for reading: of long lists of numbers the first ones.
export function pretty(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return text; // a stream, or something else that is no JSON
  }
  const lists = [];
  const marked = JSON.stringify(value, (_, each) => {
    if (!Array.isArray(each) || !each.length || !each.every((one) => typeof one === "number")) return each;
    const more = each.length > MANY ? `, … ${each.length - MANY} more` : "";
    lists.push(`[${each.slice(0, MANY).join(", ")}${more}]`);
    return `\u0000${lists.length - 1}`;
  }, 2);
  return marked.replace(/"\\u0000(\d+)"/g, (_, place) => lists[place]);
}
