// The trees of markdown.js and the pieces of highlight.js as nodes. A record becomes one of the elements named here or,
// where its kind is not known, nothing; what a model wrote is only ever text in them, and the address of a link.
import { copyButton, el } from "./dom.js";
import { highlight } from "./highlight.js";
import { isSafe } from "./inline.js";
import { parse } from "./markdown.js";

const TAGS = { paragraph: "p", strong: "strong", emphasis: "em", strike: "s", quote: "blockquote" };
const LONG = 20_000; // characters of code that are not coloured while more of it comes

// Shows a text that may have grown: a block whose source is as before stays as it is.
export function renderMarkdown(container, text) {
  const blocks = parse(text);
  while (container.children.length > blocks.length) container.lastChild.remove();
  blocks.forEach((block, place) => {
    const old = container.children[place];
    if (old?.kind === block.kind && old.source === block.source) return;
    if (block.kind === "codeblock" && old?.kind === "codeblock" && grow(old, block)) return;
    const made = Object.assign(nodeOf(block), { kind: block.kind, source: block.source });
    old ? old.replaceWith(made) : container.append(made);
  });
}

// A code block keeps its node, with its button and its place in the scroll, while it is written.
function grow(node, block) {
  if (node.dataset.language !== block.language) return false;
  node.source = block.source;
  fillCode(node.querySelector("code"), block);
  return true;
}

function nodeOf(record) {
  if (typeof record === "string") return document.createTextNode(record);
  const children = () => record.children.map(nodeOf);
  switch (record.kind) {
    case "heading": return el(`h${Math.min(record.level + 1, 6)}`, {}, ...children());
    case "codeblock": return codeBlock(record.text, record.language, record.isOpen);
    case "code": return el("code", {}, record.text);
    case "math": return el("code.math", {}, record.text);
    case "formula": return el("pre.math", {}, record.text);
    case "rule": return el("hr");
    case "break": return el("br");
    case "link": return link(record, children());
    case "list": return list(record);
    case "table": return table(record);
    default: return record.kind in TAGS ? el(TAGS[record.kind], {}, ...children()) : el("span");
  }
}

function link({ href }, children) {
  if (!isSafe(href)) return el("span", {}, ...children);
  return el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, ...children);
}

function list(record) {
  const items = record.children.map((item) => {
    const node = el("li", {}, ...item.children.flatMap((child) => bare(child, record.isLoose)));
    if (item.checked !== null) {
      node.className = "task";
      node.prepend(el("input", { type: "checkbox", checked: item.checked, disabled: true }));
    }
    return node;
  });
  return el(record.isOrdered ? "ol" : "ul", record.isOrdered ? { start: record.start } : {}, ...items);
}

// A paragraph of a list without blank lines is not set apart.
function bare(child, isLoose) {
  return child.kind === "paragraph" && !isLoose ? child.children.map(nodeOf) : [nodeOf(child)];
}

function table({ align, head, rows }) {
  const cell = (tag) => (content, place) => el(`${tag}.${align[place]}`, {}, ...content.map(nodeOf));
  const body = rows.map((row) => el("tr", {}, ...row.map(cell("td"))));
  return el("div.scroll", {}, el("table", {}, el("thead", {}, el("tr", {}, ...head.map(cell("th")))), el("tbody", {}, ...body)));
}

export function codeBlock(text, language, isOpen = false) {
  const code = el("code");
  fillCode(code, { text, language, isOpen });
  const bar = el("div.codebar", {}, el("span", {}, language), copyButton(() => code.textContent));
  const node = el("div.codeblock", {}, bar, el("pre", {}, code));
  node.dataset.language = language;
  return node;
}

function fillCode(node, { text, language, isOpen }) {
  const pieces = isOpen && text.length > LONG ? [["", text]] : highlight(text, language);
  node.replaceChildren(...pieces.map(([kind, piece]) => (kind ? el(`span.hl-${kind}`, {}, piece) : piece)));
}
