// The page: views over the server's own API, each a module that is fetched when it is first shown.
import { $, icon } from "./dom.js";
import { key, problem, redeem, setKey } from "./server.js";

const VIEWS = {
  chat: () => import("./chat.js"),
  models: () => import("./models.js"),
  batches: () => import("./batches.js"),
  turns: () => import("./timeline.js"),
  api: () => import("./api.js"),
  connect: () => import("./connect.js"),
};
const POLL_MS = 3000;
const IDLE_MS = 6000; // after an answer that told nothing new
const views = {}; // by name: {show(), poll?()}
const making = {}; // those whose modules were asked for
let timer = null;
let is_failing = false; // the last thing that was asked for a view

const wanted = () => {
  const [name] = location.hash.slice(1).split("?");
  return name in VIEWS ? name : "chat";
};

async function show() {
  const name = wanted();
  clearTimeout(timer);
  for (const other of Object.keys(VIEWS)) $(other).hidden = other !== name;
  for (const link of document.querySelectorAll("nav a")) {
    link.classList.toggle("here", link.hash === `#${name}`);
    link.hash === `#${name}` ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  document.body.dataset.view = name;
  await attempt(async () => {
    views[name] ??= await made(name);
    if (wanted() === name) await views[name].show();
  });
  if (views[name]?.poll && wanted() === name) poll(name);
}

// Once, however often it is asked for while its module is on its way.
async function made(name) {
  making[name] ??= VIEWS[name]().then(({ create }) => create($(name)));
  try {
    return await making[name];
  } catch (error) {
    delete making[name];
    throw error;
  }
}

// What went wrong stays in sight until it goes well again.
async function attempt(work) {
  try {
    const found = await work();
    if (is_failing) problem(null);
    is_failing = false;
    return found;
  } catch (error) {
    is_failing = true;
    problem(error);
    return false;
  }
}

// Only the view that is seen asks, and not while the tab is hidden.
async function poll(name) {
  const is_new = await attempt(() => views[name].poll());
  if (wanted() !== name || document.hidden) return; // the timer is another view's
  clearTimeout(timer);
  timer = setTimeout(poll, is_new ? POLL_MS : IDLE_MS, name);
}

// What `dovetail open` wrote into the address leaves it at once, and with it the browser's history.
async function takeCode() {
  const code = new URLSearchParams(location.hash.split("?")[1] || "").get("code");
  if (!code) return;
  history.replaceState(null, "", `#${wanted()}`);
  try {
    await redeem(code);
  } catch (error) {
    if (!key()) problem(error); // a reload of the address that was opened has the key already
  }
}

$("keybox").querySelector("summary").append(icon("key"));
$("keybox").addEventListener("submit", (event) => {
  event.preventDefault();
  $("keybox").open = false;
});
document.addEventListener("click", (event) => {
  if (!$("keybox").contains(event.target)) $("keybox").open = false;
});
$("key").addEventListener("change", () => {
  setKey($("key").value.trim());
  problem(null);
  showKey();
  show();
});
addEventListener("hashchange", () => {
  problem(null);
  begin();
});
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : show()));

function showKey() {
  $("key").value = key();
  $("keybox").classList.toggle("set", !!key());
  $("keybox").querySelector("summary").title = key() ? "This tab has a key" : "Key";
}

async function begin() {
  await takeCode();
  showKey();
  await show();
}

begin();
