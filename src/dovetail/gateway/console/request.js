// What is sent for a conversation. Knows no DOM.

export const CALM = 0.7; // where a model's authors recommend no temperature: at 1 small models ramble

// What may be set: name in the API, label, limits, and whether it is a whole number.
export const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, hint: "0 = always the likeliest token" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, hint: "the likeliest tokens that add up to this" },
  { name: "top_k", label: "Top k", min: 0, max: 1000, step: 1, hint: "so many of the likeliest tokens; 0 = all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: "no token less likely than this share of the first" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, hint: "against repetition" },
  { name: "max_tokens", label: "Longest answer", min: 1, max: 1_000_000, step: 1, hint: "tokens" },
  { name: "seed", label: "Seed", min: 0, max: 2 ** 31, step: 1, hint: "the same seed gives the same answer" },
];

// Why a setting cannot be sent, or null.
export function samplingProblem({ label, min, max, step }, text) {
  if (!text.trim()) return null;
  const value = Number(text);
  if (!Number.isFinite(value) || value < min || value > max) return `${label} is a number from ${min} to ${max}.`;
  return step === 1 && !Number.isInteger(value) ? `${label} is a whole number.` : null;
}

// The body for the answer that comes after the first `count` messages. What failed before a word was said is left out,
// and questions that follow each other for that reason are one: many templates take no two in a row.
export function chatRequest({ system, sampling, messages }, count, model, recommended = {}) {
  const sent = system?.trim() ? [{ role: "system", content: system }] : [];
  for (const { role, content } of messages.slice(0, count)) {
    if (!content) continue;
    const last = sent.at(-1);
    if (last?.role === role && role === "user") last.content += `\n\n${content}`;
    else sent.push({ role, content });
  }
  const { thinks, ...numbers } = sampling;
  const calm = "temperature" in recommended ? {} : { temperature: CALM };
  const thinking = thinks === false ? { chat_template_kwargs: { enable_thinking: false } } : {};
  return { model, messages: sent, stream: true, stream_options: { include_usage: true }, ...calm, ...numbers, ...thinking };
}

// What an answer waits for, in words.
export function waitInWords({ state, position, done_bytes, total_bytes }, bytes) {
  switch (state) {
    case "starting": return "Starting a worker";
    case "queued": return position > 1 ? `Waiting for a place: number ${position}` : "Waiting for a place";
    case "loading": return done_bytes ? `Loading the model: ${bytes(done_bytes)} of ${bytes(total_bytes)}` : "Loading the model";
    case "computing": return "Reading the prompt";
    default: return "";
  }
}

export function noteOf({ tokens, started, first, ended, finish }) {
  const parts = [];
  if (finish === "stopped") parts.push("stopped");
  if (finish === "length") parts.push(`cut off at its limit of ${tokens ?? "so many"} tokens`);
  else if (tokens) parts.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
  if (tokens > 1 && ended > first) parts.push(`${((1000 * (tokens - 1)) / (ended - first)).toFixed(0)} tokens/s`);
  if (first) parts.push(`first token after ${((first - started) / 1000).toFixed(2)} s`);
  parts.push(`${((ended - started) / 1000).toFixed(1)} s`);
  return parts.join(" · ");
}
