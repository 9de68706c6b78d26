// The conversations that this browser keeps: open one, begin another, delete.
import { allChats, isChatKey, removeAllChats, removeChat } from "./chats.js";
import { button, el, icon, replaceIfNew } from "./dom.js";

export class Sidebar {
  // `actions`: open(id), begin(), drop(id) when it is deleted, current() → id
  constructor(actions) {
    this.actions = actions;
    this.list = el("div.chats");
    this.wipe = button("Delete all", () => this.removeAll(), null, { className: "quiet", hidden: true });
    const begin = el("button.new", { type: "button", onclick: () => this.close(actions.begin()) }, icon("plus"), "New chat");
    this.node = el("aside.sidebar", { "aria-label": "Conversations" }, begin, this.list, el("div.below", {}, this.wipe));
    this.shade = el("div.shade", { onclick: () => this.close() });
    addEventListener("storage", (event) => isChatKey(event.key) && this.refresh());
    addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  // On a phone it lies over the conversation while it is open.
  toggle() {
    this.node.classList.toggle("open");
  }

  close() {
    this.node.classList.remove("open");
  }

  refresh() {
    const current = this.actions.current();
    const chats = allChats().map(({ id, title }) => ({ id, title, here: id === current }));
    this.wipe.hidden = !chats.length;
    replaceIfNew(this.list, chats, (chat) => this.entry(chat));
  }

  entry({ id, title, here }) {
    const open = el("button.open", { type: "button", title }, title);
    open.addEventListener("click", () => this.close(this.actions.open(id)));
    if (here) open.setAttribute("aria-current", "true");
    const remove = button(`Delete ${title}`, () => this.remove(id), "remove");
    return el(here ? "div.chat.here" : "div.chat", {}, open, remove);
  }

  remove(id) {
    this.actions.drop(id);
    removeChat(id);
    this.refresh();
  }

  removeAll() {
    if (!confirm("Delete all conversations from this browser?")) return;
    allChats().forEach(({ id }) => this.actions.drop(id));
    removeAllChats();
    this.refresh();
  }
}
