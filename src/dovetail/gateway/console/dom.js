// Nodes of the page. Text goes in as text: nothing here, nor anywhere on the page, reads a string as HTML.

export const $ = (id) => document.getElementById(id);

// el("a.link", {href}, "text", node, …): a tag with its classes, properties (or attributes with a dash), and children.
export function el(name, properties = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key.includes("-") || key === "role") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 4v7h-7",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M14 4.5v5M8 14.5v5",
  key: "M4 16a4 4 0 1 0 8 0a4 4 0 1 0-8 0M11 13l8-8M15 9l3 3",
};

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", "icon");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function button(label, onclick, iconName, properties = {}) {
  const shown = iconName ? [icon(iconName)] : [label];
  const named = iconName ? { "aria-label": label, title: label } : {};
  return el(iconName ? "button.bare" : "button", { type: "button", onclick, ...named, ...properties }, ...shown);
}

// `text` is asked when the button is pressed.
export function copyButton(text, label = "Copy") {
  const node = el("button.copy", { type: "button" }, label);
  node.addEventListener("click", async () => {
    const done = await copy(text());
    node.textContent = done ? "Copied" : "Not copied";
    setTimeout(() => (node.textContent = label), 1500);
  });
  return node;
}

// Browsers have no clipboard for pages from another machine without TLS; there a selection is copied.
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // not allowed here; the other way may be
    }
  }
  const field = el("textarea.offscreen", { value: text, readOnly: true });
  (document.querySelector("dialog[open]") || document.body).append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

export const bytes = (count) => {
  if (!count) return "–";
  return count < 1e9 ? `${(count / 1e6).toFixed(count < 1e7 ? 1 : 0)} MB` : `${(count / 1e9).toFixed(1)} GB`;
};

// What is there already is not made again: most of what a page costs is laying it out and drawing it. Says whether
// anything is new.
export function replaceIfNew(node, records, make) {
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
