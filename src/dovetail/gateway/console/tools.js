// Tools of MCP servers in a chat: what is sent for a conversation that uses them, and what the events of the answer
// come to. Knows no DOM.
import { CALM } from "./request.js";

// As `chatRequest`, for /v1/responses, where the server itself calls the tools.
export function toolRequest({ system, sampling, messages, tools }, count, model, recommended = {}) {
  const input = [];
  for (const { role, content, calls = [] } of messages.slice(0, count)) {
    for (const { id, server, name, args, output, error } of calls)
      input.push({ type: "mcp_call", id, server_label: server, name, arguments: args, output, error: error && failed(error) });
    if (!content) continue;
    const last = input.at(-1);
    if (last?.role === role && role === "user") last.content += `\n\n${content}`;
    else input.push({ role, content });
  }
  const { thinks, max_tokens, frequency_penalty: _, ...numbers } = sampling;
  return {
    model,
    input,
    ...(system?.trim() ? { instructions: system } : {}),
    tools: tools.map((name) => ({ type: "mcp", server_label: name, require_approval: "never" })),
    store: false,
    stream: true,
    ...("temperature" in recommended ? {} : { temperature: CALM }),
    ...numbers,
    ...(max_tokens ? { max_output_tokens: max_tokens } : {}),
    ...(thinks === false ? { chat_template_kwargs: { enable_thinking: false } } : {}),
  };
}

// What is new, whichever API it came by: {text, thought, call, finish, tokens, error}, each where there is some.
export function newsOf(event) {
  if (!event.type) {
    const { delta = {}, finish_reason } = event.choices?.[0] || {};
    return { text: delta.content, thought: delta.reasoning_content, finish: finish_reason, tokens: event.usage?.completion_tokens };
  }
  const { response, item } = event;
  switch (event.type) {
    case "response.output_text.delta": return { text: event.delta };
    case "response.reasoning_text.delta": return { thought: event.delta };
    case "response.output_item.added": return item.type === "mcp_call" ? { call: callOf(item) } : {};
    case "response.output_item.done": return item.type === "mcp_call" ? { call: callOf(item) } : {};
    case "response.completed": return { finish: "stop", tokens: response.usage?.output_tokens };
    case "response.incomplete": return { finish: "length", tokens: response.usage?.output_tokens };
    case "response.failed": return { error: response.error };
    default: return {};
  }
}

const failed = (text) => ({ type: "mcp_tool_execution_error", content: [{ type: "text", text }] });

function callOf({ id, server_label, name, arguments: args, output, error, status }) {
  const problem = error ? (error.content || []).map(({ text }) => text).join("\n") : null;
  return { id, server: server_label, name, args, output: output ?? null, error: problem, isOver: status !== "in_progress" };
}

// A call that is known is brought up to date.
export function withCall(calls = [], call) {
  const at = calls.findIndex(({ id }) => id === call.id);
  return at < 0 ? [...calls, call] : calls.with(at, call);
}
