// The page: three views over the server's own API. No state but the visitor's key, which stays in this tab.
import { ask, events, problem } from "/ui/server.js";
import { drawTurns, forgetTurns, numCells } from "/ui/turns.js";

const $ = (id) => document.getElementById(id);
const VIEWS = ["chat", "models", "turns"];
const POLL_MS = 3000;
const IDLE_MS = 6000; // after an answer that told nothing new
let conversation = [];
let answering = null; // an AbortController while an answer comes
let timer = null;
const CALM = 0.7; // where a model's authors recommend no temperature: at 1 small models ramble
let recommended = {}; // by model: options that its authors recommend, which the server takes by itself

function show() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : "chat";
  for (const name of VIEWS) $(name).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) link.classList.toggle("here", link.hash === `#${view}`);
  clearTimeout(timer);
  if (view !== "chat") poll(view);
}

// Only the view that is seen asks, and not while the tab is hidden.
async function poll(view) {
  let is_new = false;
  try {
    is_new = await (view === "models" ? showModels() : showTurns());
  } catch (error) {
    problem(error);
  }
  if ($(view).hidden || document.hidden) return; // the timer is another view's
  clearTimeout(timer);
  timer = setTimeout(poll, is_new ? POLL_MS : IDLE_MS, view);
}

// Chat

async function fillModels() {
  const { data } = await ask("GET", "/v1/models");
  const chosen = $("model").value;
  recommended = Object.fromEntries(data.map((one) => [one.id, one.default_sampling_params || {}]));
  $("model").replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
}

function bubble(role, text) {
  const node = document.createElement("div");
  node.className = `said ${role}`;
  node.textContent = text;
  $("messages").append(node);
  node.scrollIntoView({ block: "nearest" });
  return node;
}

function part(node, name) {
  const found = node.querySelector(`.${name}`);
  if (found) return found;
  const made = document.createElement("span");
  made.className = name;
  name === "thought" ? node.prepend(made) : node.append(made);
  return made;
}

function waitInWords({ state, position, done_bytes, total_bytes }) {
  if (state === "queued") return `queued, number ${position}`;
  if (state === "loading") return `loading ${done_bytes ? `${bytes(done_bytes)} of ` : ""}${bytes(total_bytes)}`;
  return { starting: "starting a worker", computing: "reading the prompt" }[state] || "";
}

async function send(text) {
  conversation.push({ role: "user", content: text });
  bubble("user", text);
  const node = bubble("assistant", "");
  const body = part(node, "text");
  const started = performance.now();
  answering = new AbortController();
  $("send").textContent = "Stop";
  let answer = "", first = null, usage = null;
  const showWait = (standing) => (part(node, "note").textContent = waitInWords(standing));
  try {
    const model = $("model").value;
    const calm = "temperature" in (recommended[model] || {}) ? {} : { temperature: CALM };
    const request = { model, messages: conversation, stream: true, stream_options: { include_usage: true }, ...calm };
    for await (const event of events("/v1/chat/completions", request, answering.signal, showWait)) {
      usage = event.usage || usage;
      const delta = event.choices[0]?.delta || {};
      if (delta.reasoning_content) part(node, "thought").textContent += delta.reasoning_content;
      if (delta.content) {
        first ??= performance.now();
        answer += delta.content;
        body.textContent = answer;
      }
    }
    conversation.push({ role: "assistant", content: answer });
  } catch (error) {
    conversation.pop();
    if (error.name !== "AbortError") problem(error);
  } finally {
    answering = null;
    $("send").textContent = "Send";
  }
  const seconds = (performance.now() - started) / 1000;
  const rate = usage && usage.completion_tokens > 1 && first ? usage.completion_tokens / ((performance.now() - first) / 1000) : 0;
  const wait = first ? `first token ${((first - started) / 1000).toFixed(2)} s, ` : "";
  part(node, "note").textContent = `${wait}${seconds.toFixed(1)} s${rate ? `, ${rate.toFixed(0)} tokens/s` : ""}`;
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) return answering.abort();
  const text = $("prompt").value.trim();
  if (!text || !$("model").value) return;
  $("prompt").value = "";
  problem(null);
  send(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!answering) $("ask").requestSubmit();
  }
});
$("clear").addEventListener("click", () => {
  conversation = [];
  $("messages").replaceChildren();
});

// Models

const bytes = (count) => (count ? `${(count / 1e6).toFixed(count < 1e7 ? 1 : 0)} MB` : "–");
const percent = (share) => (share == null ? "–" : `${(share * 100).toFixed(0)} %`);

// Says whether anything is new.
async function showModels() {
  const [{ data }, pulls] = await Promise.all([ask("GET", "/api/models"), ask("GET", "/api/pulls")]);
  const is_new = replaceIfNew($("table"), data, row);
  return replaceIfNew($("pulls"), pulls.data.filter(({ state }) => state !== "done"), pullBar) || is_new;
}

// What is there already is not made again: most of what a page costs is laying it out and drawing it.
function replaceIfNew(node, records, make) {
  let is_new = node.children.length > records.length;
  while (node.children.length > records.length) node.lastChild.remove();
  records.forEach((record, place) => {
    const shown = JSON.stringify(record), old = node.children[place];
    if (old?.shown === shown) return;
    const made = Object.assign(make(record), { shown });
    old ? old.replaceWith(made) : node.append(made);
    is_new = true;
  });
  return is_new;
}

function row(model) {
  const line = document.createElement("tr");
  line.dataset.model = model.name;
  const wait = model.ttft_p50_s == null ? "–" : `${model.ttft_p50_s.toFixed(2)} s`;
  const cells = [model.name, model.state, model.tier, bytes(model.weight_bytes), bytes(model.kv_bytes), percent(model.attainment), wait];
  for (const text of cells) line.insertCell().textContent = text;
  const path = `/api/models/${encodeURIComponent(model.name)}`;
  const loaded = ["ready", "serving", "idle"].includes(model.state);
  const actions = line.insertCell();
  actions.append(loaded ? action("Unload", "POST", `${path}/unload`) : action("Load", "POST", `${path}/load`));
  actions.append(action("Remove", "DELETE", path, `Offer ${model.name} no longer? Its files stay.`));
  return line;
}

function action(label, method, path, question) {
  const button = document.createElement("button");
  button.textContent = label;
  button.addEventListener("click", async () => {
    if (question && !confirm(question)) return;
    button.disabled = true;
    await change(() => ask(method, path));
  });
  return button;
}

// Do it, and show what has become of it.
async function change(work) {
  problem(null);
  try {
    await work();
  } catch (error) {
    problem(error);
  }
  for (const line of $("table").children) line.shown = null; // its buttons are to be used again
  await poll("models");
  await fillModels().catch(problem);
}

function pullBar(pull) {
  const node = document.createElement("div");
  node.className = "pull";
  const share = pull.total_bytes ? ` ${((100 * pull.done_bytes) / pull.total_bytes).toFixed(0)} %` : "";
  node.textContent = `${pull.name} from ${pull.source}: ${pull.error || `${pull.state}, ${pull.stage}${share}`}`;
  if (!pull.error) {
    const bar = document.createElement("progress");
    if (pull.total_bytes) [bar.max, bar.value] = [pull.total_bytes, pull.done_bytes];
    node.append(bar);
  }
  return node;
}

$("add").addEventListener("submit", (event) => {
  event.preventDefault();
  const body = { name: $("add-name").value.trim(), source: $("add-source").value.trim() };
  change(() => ask("POST", "/api/models", body)).then(() => event.target.reset());
});

let told_s = 0; // of turns, by the server's clock
let num_cells = 0; // of the picture
let asking = null; // one at a time, or the same news would come twice

function showTurns() {
  return (asking ??= takeNews().finally(() => (asking = null)));
}

async function takeNews() {
  const cells = numCells($("devices"));
  if (cells !== num_cells) forgetTurns(), ([told_s, num_cells] = [0, cells]);
  let news = await ask("GET", `/api/turns/shares?cells=${cells}&after=${told_s}`);
  if (news.now_s < told_s) {
    forgetTurns();
    news = await ask("GET", `/api/turns/shares?cells=${cells}`);
  }
  told_s = news.now_s;
  return drawTurns($("devices"), $("legend"), news);
}

$("key").value = sessionStorage.getItem("key") || "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  problem(null);
  fillModels().catch(problem);
});
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : show()));
show();
fillModels().catch(problem);
