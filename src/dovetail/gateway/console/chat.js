// The chat: a conversation with a model, its answers as they come, and the conversations before it.
import { findChat, newChat, rememberSettings, saveChat } from "./chats.js";
import { $, button, el, icon } from "./dom.js";
import { Message } from "./message.js";
import { Picker } from "./picker.js";
import { chatRequest, noteOf } from "./request.js";
import { ask, events, problem, problemText, ServerError } from "./server.js";
import { openSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { newsOf, toolRequest, withCall } from "./tools.js";

const OPEN = "chat"; // in sessionStorage: the conversation of this tab
const NEAR = 60; // pixels from the end, within which the view follows an answer
const TALLEST = 240; // pixels of the input

// On a phone Enter is the only way to break a line, and focus brings up half a screen of keys.
const hasKeyboard = () => !matchMedia("(pointer: coarse)").matches;

export const create = (section) => new ChatView(section);

class ChatView {
  constructor(section) {
    this.servers = []; // of MCP
    this.running = new Map(); // by conversation: {chat, message, controller}
    this.picker = new Picker((model) => this.keep({ model }));
    this.picker.select.id = "model";
    this.sidebar = new Sidebar({
      open: (id) => this.open(findChat(id)),
      begin: () => this.open(newChat()),
      drop: (id) => this.drop(id),
      current: () => this.chat.id,
    });
    this.list = el("div.messages", { id: "messages" });
    this.scroller = el("div.scroller", {}, this.list);
    this.prompt = el("textarea", { id: "prompt", rows: 1, "aria-label": "Message", enterKeyHint: "send" });
    this.send = el("button.main.round", { id: "send" });
    this.ask = el("form.ask", { id: "ask" }, el("div.box", {}, this.prompt, this.send));
    section.append(this.sidebar.node, this.sidebar.shade, el("div.talk", {}, this.bar(), this.scroller, this.ask));
    this.listen();
    this.open(findChat(sessionStorage.getItem(OPEN)));
  }

  bar() {
    return el(
      "div.chatbar",
      {},
      button("Conversations", () => this.sidebar.toggle(), "menu", { className: "bare only-narrow" }),
      this.picker.node,
      button("Settings", () => this.settings(), "settings", { id: "settings" }),
      button("New chat", () => this.open(newChat()), "plus", { id: "clear", className: "bare only-narrow" }),
    );
  }

  listen() {
    this.ask.addEventListener("submit", (event) => {
      event.preventDefault();
      this.running.has(this.chat.id) ? this.stop() : this.say();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
      const breaksLine = event.shiftKey || event.isComposing || !hasKeyboard();
      if (event.key !== "Enter" || breaksLine) return;
      event.preventDefault();
      if (!this.running.has(this.chat.id)) this.say();
    });
    this.prompt.addEventListener("input", () => this.fit());
    const { scroller } = this;
    const look = () => (this.isNear = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR);
    scroller.addEventListener("scroll", look, { passive: true });
    addEventListener("pagehide", () => this.running.forEach(({ chat, message }) => keepPartial(chat, message.record)));
  }

  async show() {
    if (hasKeyboard()) this.prompt.focus();
    try {
      await Promise.all([this.picker.refresh(), this.refreshServers()]);
    } finally {
      this.picker.choose(this.chat.model);
      this.drawEmpty();
    }
  }

  // Of tools that may be called. Without them the chat is as good.
  async refreshServers() {
    const { data } = await ask("GET", "/v1/mcp/servers").catch(() => ({ data: [] }));
    this.servers = data.map(({ name }) => name);
  }

  // A conversation on the screen; one whose answer is still coming goes on.
  open(chat) {
    this.chat = this.running.get(chat?.id)?.chat || chat || newChat();
    sessionStorage.setItem(OPEN, this.chat.id);
    this.list.replaceChildren();
    this.chat.messages.forEach((record) => this.add(record));
    this.picker.choose(this.chat.model || this.picker.value);
    this.drawEmpty();
    this.drawButton();
    this.sidebar.refresh();
    this.toEnd();
  }

  // One that is deleted does not come back when its answer ends.
  drop(id) {
    const running = this.running.get(id);
    if (running) running.chat.messages = [];
    running?.controller.abort();
    if (id === this.chat.id) this.open(newChat());
  }

  add(record) {
    const running = this.running.get(this.chat.id)?.message;
    const message = running?.record === record ? running : new Message(record, this.actionsOf(record));
    this.list.append(message.node);
    return message;
  }

  actionsOf(record) {
    const chat = this.chat;
    const cut = (length) => {
      this.stop();
      chat.messages.length = length;
      while (this.list.children.length > length) this.list.lastChild.remove();
    };
    return {
      retry: () => {
        cut(chat.messages.indexOf(record));
        this.answer();
      },
      edit: (text) => {
        cut(chat.messages.indexOf(record));
        this.say(text);
      },
    };
  }

  say(edited) {
    const text = edited ?? this.prompt.value.trim();
    if (!text) return;
    if (edited === undefined) this.prompt.value = "";
    this.fit();
    const record = { role: "user", content: text };
    this.chat.messages.push(record);
    this.add(record);
    this.answer();
  }

  async answer() {
    const { chat } = this;
    const model = this.picker.value;
    const record = { role: "assistant", content: "", model };
    const make = chat.tools?.length ? toolRequest : chatRequest;
    const request = make(chat, chat.messages.length, model, this.picker.recommended(model));
    chat.messages.push(record);
    const message = new Message(record, this.actionsOf(record));
    const running = { chat, message, controller: new AbortController() };
    this.running.set(chat.id, running);
    this.keep({ model, updated: Date.now() });
    this.list.append(message.node);
    message.begin();
    this.drawEmpty();
    this.drawButton();
    this.toEnd();
    await this.follow(running, request);
    if (this.running.get(chat.id) === running) this.running.delete(chat.id);
    if (chat.messages.includes(record)) this.save(chat);
    this.follows(() => message.end());
    this.drawButton();
    this.picker.refresh().catch(() => {}); // a model may have been loaded for this, and another have made place
  }

  async follow({ message, controller }, request) {
    const { record } = message;
    const times = { started: performance.now(), finish: null, tokens: null, first: null };
    try {
      if (!request.model) throw new Error("No model is chosen: add one under Models.");
      const onWait = (standing) => this.follows(() => message.waitsFor(standing));
      const path = request.input ? "/v1/responses" : "/v1/chat/completions";
      for await (const event of events(path, request, controller.signal, onWait)) {
        const { text, thought, call, finish, tokens, error } = newsOf(event);
        if (error) throw new ServerError(error.message, 200, error.code);
        times.tokens = tokens ?? times.tokens;
        times.finish = finish || times.finish;
        if (thought) record.thought = (record.thought || "") + thought;
        if (call) record.calls = withCall(record.calls, call);
        if (text) record.content += text;
        if (!text && !thought && !call) continue;
        times.first ??= performance.now();
        text ? message.speaks() : call ? message.calls(call) : message.thinks();
        message.changed(() => this.follows());
      }
    } catch (error) {
      if (controller.signal.aborted) times.finish = "stopped";
      else record.error = problemText(error);
    }
    record.note = noteOf({ ...times, ended: performance.now() });
  }

  // Does something that changes the height, and stays at the end if the view was there.
  follows(change = () => {}) {
    change();
    if (this.isNear) this.toEnd();
  }

  toEnd() {
    this.isNear = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  stop() {
    this.running.get(this.chat.id)?.controller.abort();
  }

  settings() {
    const recommended = this.picker.recommended(this.picker.value);
    openSettings(this.chat, recommended, this.servers, (chosen) => this.keep(chosen));
  }

  keep(changes) {
    Object.assign(this.chat, changes);
    rememberSettings(this.chat);
    this.save(this.chat);
  }

  save(chat) {
    try {
      saveChat(chat);
    } catch (error) {
      problem(error);
    }
    this.sidebar.refresh();
  }

  // The input grows with its text.
  fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight, TALLEST)}px`;
  }

  drawButton() {
    const isRunning = this.running.has(this.chat.id);
    this.send.replaceChildren(icon(isRunning ? "stop" : "send"));
    this.send.title = isRunning ? "Stop" : "Send";
    this.send.setAttribute("aria-label", this.send.title);
  }

  drawEmpty() {
    $("empty")?.remove();
    this.prompt.placeholder = this.picker.value ? `Message ${this.picker.value}` : "Message";
    if (this.chat.messages.length) return;
    const has_models = this.picker.models.length > 0;
    const hint = has_models || !this.picker.asked
      ? `Conversations stay in this browser.${hasKeyboard() ? " Enter sends, Shift+Enter breaks the line." : ""}`
      : el("span", {}, "There is no model here yet. ", el("a", { href: "#models" }, "Add one"));
    this.list.before(el("div.empty", { id: "empty" }, el("h2", {}, "What would you like to know?"), el("p.hint", {}, hint)));
  }
}

// What had come when the page was closed.
function keepPartial(chat, record) {
  record.note = "interrupted";
  if (!record.content) record.error = "The page was closed before the answer came.";
  saveChat(chat);
}
