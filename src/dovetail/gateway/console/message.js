// One message of a conversation: what was said, what it waits for, what went wrong with it, and what can be done with it.
import { bytes, button, copy, el } from "./dom.js";
import { renderMarkdown } from "./render.js";
import { waitInWords } from "./request.js";

const DRAW_MS = 50; // at most so often while an answer comes, and never more than a quarter of the time

export class Message {
  // `actions`: retry(), edit(text)
  constructor(record, actions) {
    this.record = record;
    this.actions = actions;
    this.timer = null;
    this.cost = 0;
    this.body = el("div.body");
    this.foot = el("div.foot");
    this.node = el(`article.said.${record.role}`, {}, this.body, this.foot);
    this.draw();
    this.drawFoot();
  }

  // Soon, and once for all that comes until then.
  changed(onDrawn) {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.draw();
      onDrawn();
    }, Math.max(DRAW_MS, 4 * this.cost));
  }

  draw() {
    const began = performance.now();
    if (this.record.role === "user") this.body.textContent = this.record.content;
    else {
      this.drawThought();
      this.drawCalls();
      this.text ??= this.body.appendChild(el("div.text"));
      renderMarkdown(this.text, this.record.content);
    }
    this.cost = performance.now() - began;
  }

  drawThought() {
    const { thought, content } = this.record;
    if (!thought) return;
    if (!this.thought) {
      this.thought = el("details.thought", {}, el("summary"), el("div.text"));
      this.body.prepend(this.thought);
    }
    this.thought.firstChild.textContent = this.isLive && !content ? "Thoughts so far" : "Thoughts";
    renderMarkdown(this.thought.lastChild, thought);
  }

  // Tools that were called for it, each with what it came to.
  drawCalls() {
    const { calls } = this.record;
    if (!calls?.length) return;
    if (!this.called) {
      this.called = el("div.calls");
      this.text ? this.text.before(this.called) : this.body.append(this.called);
    }
    const shown = JSON.stringify(calls);
    if (this.shownCalls === shown) return; // what is open stays open
    this.shownCalls = shown;
    this.called.replaceChildren(...calls.map(callNode));
  }

  calls({ server, name, isOver }) {
    if (!this.wait) return;
    this.standing = isOver ? "Going on" : `Calling ${server}: ${name}`;
    this.bar.hidden = true;
    this.tick();
  }

  // While it is on its way: what it waits for, how far that is, and for how long.
  begin() {
    this.isLive = true;
    this.node.setAttribute("aria-busy", "true");
    this.words = el("span", {});
    this.bar = el("progress", { hidden: true });
    this.wait = el("div.wait", { role: "status" }, el("span.dots", {}, el("i"), el("i"), el("i")), this.words, this.bar);
    this.body.append(this.wait);
    this.foot.replaceChildren();
    this.began = Date.now();
    this.clock = setInterval(() => this.tick(), 1000);
  }

  waitsFor(standing) {
    if (standing.state === "speaking") return;
    this.standing = waitInWords(standing, bytes);
    this.bar.hidden = standing.state !== "loading";
    if (standing.done_bytes) Object.assign(this.bar, { max: standing.total_bytes, value: standing.done_bytes });
    else this.bar.removeAttribute("value");
    this.tick();
  }

  tick() {
    const seconds = Math.round((Date.now() - this.began) / 1000);
    this.words.textContent = `${this.standing || "Waiting"}${seconds > 1 ? `, ${seconds} s` : ""}`;
  }

  thinks() {
    if (!this.wait) return;
    this.standing = "Thinking";
    this.bar.hidden = true;
  }

  speaks() {
    if (!this.wait) return;
    clearInterval(this.clock);
    this.wait.remove();
    this.wait = null;
  }

  end() {
    this.speaks();
    clearTimeout(this.timer);
    this.timer = null;
    this.isLive = false;
    this.node.removeAttribute("aria-busy");
    this.draw();
    this.drawFoot();
  }

  drawFoot() {
    const { role, content, error, note, model } = this.record;
    const tools = [];
    if (content) tools.push(button("Copy", (event) => this.copied(event.currentTarget), "copy"));
    if (role === "user") tools.push(button("Edit", () => this.edit(), "edit"));
    else if (!error) tools.push(button("Retry", () => this.actions.retry(), "retry", { className: "bare retry" }));
    const failed = error
      ? el("p.error", { role: "alert" }, error, " ", button("Retry", () => this.actions.retry(), null, { className: "retry" }))
      : null;
    const about = [model, note].filter(Boolean).join(" · ");
    const row = tools.length || about ? el("div.tools", {}, ...tools, el("span.note", {}, about)) : null;
    this.foot.replaceChildren(...[failed, row].filter(Boolean));
  }

  async copied(pressed) {
    pressed.classList.toggle("done", await copy(this.record.content));
    setTimeout(() => pressed.classList.remove("done"), 1500);
  }

  edit() {
    const field = el("textarea", { value: this.record.content, "aria-label": "Edit the message" });
    const close = () => {
      this.node.classList.remove("editing");
      this.draw();
      this.drawFoot();
    };
    const send = () => {
      const text = field.value.trim();
      close();
      if (text) this.actions.edit(text);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
    });
    this.node.classList.add("editing");
    this.body.replaceChildren(field);
    this.foot.replaceChildren(el("div.tools", {}, button("Send", send, null, { className: "main" }), button("Cancel", close)));
    field.focus();
  }
}

function callNode({ server, name, args, output, error, isOver }) {
  const state = !isOver ? "is being called" : error === null ? "was called" : "failed";
  return el(
    "details.thought.call",
    {},
    el("summary", {}, `${server}: ${name} ${state}`),
    el("pre", {}, args || "{}"),
    el(error === null ? "pre" : "pre.error", {}, error ?? output ?? ""),
  );
}
