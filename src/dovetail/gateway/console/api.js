// The API by examples: a request that can be changed and run, its answer, and the same as a program.
import { button, el } from "./dom.js";
import { asCurl, asJavaScript, asPython, offered, pretty } from "./examples.js";
import { Pages, tabs } from "./pages.js";
import { codeBlock } from "./render.js";
import { problemText, send } from "./server.js";

export const create = (section) =>
  new Pages(section, offered, draw, el("p.hint", {}, el("a", { href: "/docs" }, "Every path and field")));

function draw(example, server) {
  const { path, method = "POST", about, answer } = example;
  const body = example.body(server.model);
  const written = body ? JSON.stringify(body, null, 2) : "";
  const field = el("textarea.body", { value: written, rows: Math.min(written.split("\n").length + 1, 18), spellcheck: false, "aria-label": "Body of the request" });
  const shown = el("div.answer", {}, codeBlock(typeof answer === "string" ? answer : pretty(JSON.stringify(answer)), "json"));
  const status = el("span.hint", { role: "status" }, "An example of an answer is below.");
  const run = button("Run", () => runOrStop(example, field, { run, status, shown }), null, { className: "main", id: "run" });
  const current = () => readBody(field.value) ?? body;
  const programs = tabs({
    curl: () => codeBlock(asCurl(example, current(), server), "shell"),
    Python: () => codeBlock(asPython(example, current(), server), "python"),
    JavaScript: () => codeBlock(asJavaScript(example, current(), server), "javascript"),
  });
  field.addEventListener("input", () => readBody(field.value) && programs.renew());
  return [
    el("p.path", {}, `${method} ${path}`),
    el("p.hint", {}, about),
    ...(body ? [el("h3", {}, "Request"), field] : []),
    el("div.run", {}, run, status),
    shown,
    el("h3", {}, "As a program"),
    ...programs.nodes,
  ];
}

function readBody(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // while it is being written
  }
}

let running = null; // an AbortController

async function runOrStop({ path, method = "POST" }, field, { run, status, shown }) {
  if (running) return running.abort();
  running = new AbortController();
  run.textContent = "Stop";
  status.textContent = "…";
  const started = performance.now();
  try {
    const response = await send(method, path, method === "POST" ? field.value : undefined, running.signal);
    const text = await readAll(response, (so_far) => shown.replaceChildren(codeBlock(so_far, "", true)));
    const isJson = (response.headers.get("content-type") || "").includes("json");
    shown.replaceChildren(codeBlock(isJson ? pretty(text) : text, isJson ? "json" : ""));
    status.textContent = `${response.status} after ${((performance.now() - started) / 1000).toFixed(2)} s`;
  } catch (error) {
    status.textContent = running.signal.aborted ? "stopped" : problemText(error);
  }
  running = null;
  run.textContent = "Run";
}

// A stream is shown while it comes.
async function readAll(response, onMore) {
  const isStream = (response.headers.get("content-type") || "").includes("event-stream");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", drawn = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return text;
    text += value;
    if (!isStream || Date.now() - drawn < 100) continue;
    drawn = Date.now();
    onMore(text);
  }
}
