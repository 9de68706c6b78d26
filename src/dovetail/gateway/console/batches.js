// Batches of the visitor's key: sending a file of requests, how each gets on, cancelling, and fetching what came of it.
import { button, el, replaceIfNew } from "./dom.js";
import { ask, key, problemText, send } from "./server.js";

const SHOWN = 50, PROBLEMS = 5;
const RUNNING = ["validating", "in_progress"];
const STATES = { completed: "loaded", failed: "failed", expired: "failed", cancelled: "" }; // colours; others are under way

export const create = (section) => new BatchesView(section);

class BatchesView {
  constructor(section) {
    this.failures = new Map(); // by batch: what went wrong with its last action
    this.file = el("input", { id: "batch-file", type: "file", accept: ".jsonl,.ndjson,application/jsonl", required: true });
    this.submit = el("button.main", {}, "Submit");
    this.told = el("p.error", { id: "batch-problem", role: "alert", hidden: true });
    const form = el(
      "form.bar",
      { id: "submit-batch", onsubmit: (event) => this.add(event) },
      el("label.wide", {}, "File of requests, one a line", this.file),
      this.submit,
    );
    const hint = "Files of requests that are answered when there is time, with the key of this tab. A line: ";
    const example = '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}';
    this.none = el("p.hint", { hidden: true }, "No batches yet.");
    this.table = el("tbody", { id: "batch-table" });
    const heads = ["Batch", "State", "Lines", "Progress", ""];
    const head = el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", {}, text))));
    section.append(
      el("p.hint", {}, hint, el("code", {}, example)),
      form,
      this.told,
      el("div.scroll", {}, el("table.models", {}, head, this.table)),
      this.none,
    );
  }

  show() {}

  // Says whether anything is new.
  async poll() {
    const { data } = await ask("GET", `/v1/batches?limit=${SHOWN}`);
    this.none.hidden = data.length > 0;
    const records = data.map((batch) => ({ ...batch, failure: this.failures.get(batch.id) }));
    return replaceIfNew(this.table, records, (batch) => this.row(batch));
  }

  row(batch) {
    const { total, completed, failed } = batch.request_counts;
    const state = el("span.state", {}, batch.status.replace("_", " "));
    state.dataset.state = STATES[batch.status] ?? "loading";
    const bar = el("progress", { "aria-label": "Lines that have ended" });
    if (total) [bar.max, bar.value] = [total, completed + failed];
    const isOver = batch.status in STATES;
    const cells = [
      ["State", state],
      ["Lines", `${completed} of ${total}${failed ? `, ${failed} failed` : ""}`],
      ["Progress", el("div", {}, isOver ? null : bar, el("small", {}, isOver ? ended(batch) : inWords(batch.progress || {})))],
    ];
    const about = [batch.endpoint, batch.model, new Date(batch.created_at * 1000).toLocaleString()].filter(Boolean);
    const name = el("td.name", {}, batch.id, el("small", {}, about.join(" · ")), ...problems(batch));
    const figures = cells.map(([label, content]) => el("td", { "data-label": label }, content));
    const line = el("tr", {}, name, ...figures, el("td.actions", {}, ...this.actions(batch)));
    [line.dataset.batch, line.dataset.status] = [batch.id, batch.status];
    return line;
  }

  actions(batch) {
    const path = `/v1/batches/${encodeURIComponent(batch.id)}/cancel`;
    const cancel = () => this.act(batch.id, () => ask("POST", path));
    const found = RUNNING.includes(batch.status) ? [button("Cancel", cancel)] : [];
    for (const [label, file] of [["Answers", batch.output_file_id], ["Errors", batch.error_file_id]])
      if (file) found.push(button(label, () => this.act(batch.id, () => download(file, `${batch.id}-${label.toLowerCase()}.jsonl`))));
    return found;
  }

  async act(id, work) {
    this.failures.delete(id);
    try {
      await work();
    } catch (error) {
      this.failures.set(id, problemText(error));
    }
    await this.poll().catch(() => {}); // told when it is asked next
  }

  async add(event) {
    event.preventDefault();
    const [file] = this.file.files;
    this.submit.disabled = true;
    this.told.hidden = true;
    try {
      const input_file_id = await upload(file);
      await ask("POST", "/v1/batches", { input_file_id, endpoint: await endpointIn(file), completion_window: "24h" });
      event.target.reset();
    } catch (error) {
      this.told.textContent = problemText(error);
      this.told.hidden = false;
    }
    this.submit.disabled = false;
    await this.poll().catch(() => {});
  }
}

const ended = ({ usage }) => (usage?.total_tokens ? `${usage.total_tokens.toLocaleString()} tokens` : "");

// As the command line says it.
function inWords({ lines_running, tokens_per_second, eta_seconds, held_by }) {
  const parts = [];
  if (lines_running) parts.push(`${lines_running} running`);
  if (tokens_per_second) parts.push(`${tokens_per_second.toFixed(0)} tokens/s`);
  if (eta_seconds) parts.push(`about ${eta_seconds < 90 ? `${Math.round(eta_seconds)} s` : `${Math.round(eta_seconds / 60)} min`} left`);
  if (held_by) parts.push(held_by);
  return parts.join(", ") || "waiting";
}

function problems({ failure, errors }) {
  const found = errors?.data ?? [];
  const told = found.slice(0, PROBLEMS).map(({ line, message }) => (line ? `Line ${line}: ${message}` : message));
  if (found.length > PROBLEMS) told.push(`and ${found.length - PROBLEMS} more`);
  return [...(failure ? [failure] : []), ...told].map((text) => el("p.error", { role: "alert" }, text));
}

async function endpointIn(file) {
  const [first] = (await file.slice(0, 1 << 20).text()).trimStart().split("\n");
  try {
    return String(JSON.parse(first).url);
  } catch {
    throw new Error("Line 1 is no request with custom_id, method, url and body.");
  }
}

// A form, of which the browser itself writes the head; the file is not read into the page.
async function upload(file) {
  const body = new FormData();
  body.append("purpose", "batch");
  body.append("file", file);
  const own = key();
  const response = await fetch("/v1/files", { method: "POST", body, headers: own ? { authorization: `Bearer ${own}` } : {} });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error?.message || `the server answers ${response.status}`);
  return answer.id;
}

async function download(file, name) {
  const response = await send("GET", `/v1/files/${encodeURIComponent(file)}/content`);
  if (!response.ok) throw new Error(`the server answers ${response.status}`);
  const address = URL.createObjectURL(await response.blob());
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
