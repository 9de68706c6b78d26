// Requests to this server, with the visitor's key, and its streams as events.

const KEY = "key"; // in sessionStorage: it stays in this tab

export class ServerError extends Error {
  constructor(message, status, code) {
    super(message);
    this.name = "ServerError";
    this.status = status;
    this.code = code;
  }
}

export const key = () => sessionStorage.getItem(KEY) || "";

export function setKey(value) {
  value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY);
}

// `dovetail open` puts a code into the address, which is good for one key, once.
export async function redeem(code) {
  const { key: handed } = await ask("POST", "/ui/key", { code });
  setKey(handed);
}

// With what can be done about it, where the page knows.
export function problemText(error) {
  const text = error.message || String(error);
  if (error.code === "admin_required" && !key())
    return `This page may not change the server yet. Run "dovetail open --url ${location.origin}" on the server's machine, or enter a key above.`;
  if (error.code === "missing_api_key") return "This server asks for a key: enter one at the top right.";
  if (error instanceof TypeError) return `The server cannot be reached (${text}).`;
  return text;
}

// Of the whole view, above it; what went wrong with one thing is told beside that.
export function problem(error) {
  const node = document.getElementById("problem");
  node.hidden = !error;
  node.textContent = error ? problemText(error) : "";
}

function headers() {
  const own = key();
  return { "content-type": "application/json", ...(own ? { authorization: `Bearer ${own}` } : {}) };
}

async function checked(response) {
  if (response.ok) return response;
  const { error = {} } = await response.json().catch(() => ({}));
  const told = typeof error === "string" ? error : error.message;
  throw new ServerError(told || `the server answers ${response.status}`, response.status, error.code);
}

// No answer of these is worth a place in the browser's cache.
export async function ask(method, path, body) {
  return (await send(method, path, body && JSON.stringify(body)).then(checked)).json();
}

// The answer as it is, whatever its status.
export function send(method, path, text, signal) {
  return fetch(path, { method, headers: headers(), body: text, cache: "no-store", signal });
}

// Whether this server takes requests without a key.
export async function isOpen() {
  const response = await fetch("/v1/models", { cache: "no-store" });
  return response.status !== 401;
}

let document_ = null; // the paths of this server, asked for once

export async function paths() {
  document_ ??= fetch("/openapi.json").then((response) => response.json());
  return (await document_).paths;
}

const MARK = ": dovetail "; // a comment that says what the answer waits for

export async function* events(path, body, signal, onWait) {
  const response = await send("POST", path, JSON.stringify(body), signal).then(checked);
  for await (const lines of blocks(response)) {
    if (lines.startsWith(MARK)) onWait(JSON.parse(lines.slice(MARK.length)));
    const data = lines.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
    if (!data || data === "[DONE]") continue;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(event.error.message, 200, event.error.code);
    yield event;
  }
}

async function* blocks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const found = (rest + value).split("\n\n");
    rest = found.pop();
    yield* found;
  }
}
