// A list of pages to the left and one of them to the right, for the models and the key that this server has.
import { button, el } from "./dom.js";
import { Picker } from "./picker.js";
import { isOpen, paths } from "./server.js";

export class Pages {
  // `entries`: paths → [{id, title}]; `draw`: (entry, server) → nodes
  constructor(section, entries, draw, below) {
    [this.entries, this.draw] = [entries, draw];
    this.picker = new Picker(() => this.open(this.current));
    this.index = el("div.index", { role: "tablist" });
    this.page = el("div.page", { role: "tabpanel" });
    section.append(el("div.bar", {}, this.picker.node), el("div.pages", {}, el("div", {}, this.index, below), this.page));
  }

  async show() {
    const [known, open] = await Promise.all([paths(), isOpen(), this.picker.refresh()]);
    this.hasKeys = !open;
    this.shown = this.entries(known);
    this.index.replaceChildren(
      ...this.shown.map((entry) => {
        const node = button(entry.title, () => this.open(entry), null, { role: "tab" });
        node.dataset.entry = entry.id;
        return node;
      }),
    );
    this.open(this.shown.find(({ id }) => id === this.current?.id) || this.shown[0]);
  }

  get server() {
    const model = this.picker.models.find(({ id }) => id === this.picker.value);
    return { url: location.origin, model: model?.id || "MODEL", context: model?.max_model_len, hasKeys: this.hasKeys };
  }

  open(entry) {
    this.current = entry;
    for (const node of this.index.children) node.setAttribute("aria-selected", String(node.dataset.entry === entry.id));
    this.page.replaceChildren(el("h2", {}, entry.title), ...this.draw(entry, this.server));
  }
}

// Tabs over texts that are made when they are shown: {label: () => node}.
export function tabs(choices) {
  const shown = el("div");
  const bar = el("div.tabs", { role: "tablist" });
  const show = (label) => {
    for (const node of bar.children) node.setAttribute("aria-selected", String(node.textContent === label));
    shown.replaceChildren(choices[label]());
    bar.dataset.shown = label;
  };
  bar.append(...Object.keys(choices).map((label) => button(label, () => show(label), null, { role: "tab" })));
  show(Object.keys(choices)[0]);
  return { nodes: [bar, shown], renew: () => show(bar.dataset.shown) };
}
