// Markdown as models write it, as a tree of plain records. HTML in it is text. Knows no DOM: render.js makes nodes.
import { parseInline } from "./inline.js";

const MAX_DEPTH = 8; // of lists and quotations within each other; deeper ones are paragraphs
const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?=[ \t]|$)/;
const NESTED_ITEM = /^ {2,}(?:[-*+]|\d{1,9}[.)])[ \t]/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;
const TASK = /^\[([ xX])\][ \t]+/;
const MATH_ENDS = { "$$": "$$", "\\[": "\\]" };

// The blocks of a text, each with the source that it was read from: the same source makes the same block.
export function parse(text) {
  return new Blocks(expandTabs(text.replaceAll("\r\n", "\n").split("\n")), 0).read();
}

// Tabs before a line's text are four columns; those of code stay, beyond the indent of its fence.
function expandTabs(lines) {
  let fence = null;
  return lines.map((line) => {
    if (fence) {
      const inner = expandUpTo(line, fence.indent);
      if (closes(inner.slice(Math.min(fence.indent, indentOf(inner))), fence.marks)) fence = null;
      return inner;
    }
    const expanded = expandUpTo(line, Infinity);
    const opened = FENCE.exec(expanded.trimStart());
    if (opened) fence = { marks: opened[2], indent: indentOf(expanded) };
    return expanded;
  });
}

function expandUpTo(line, columns) {
  let at = 0, spaces = 0;
  for (; at < line.length && spaces < columns && (line[at] === " " || line[at] === "\t"); at++)
    spaces += line[at] === "\t" ? 4 : 1;
  return " ".repeat(spaces) + line.slice(at);
}

const isBlank = (line) => !line.trim();
const indentOf = (line) => line.length - line.trimStart().length;

class Blocks {
  constructor(lines, depth) {
    this.lines = lines;
    this.depth = depth;
    this.at = 0;
  }

  read() {
    const blocks = [];
    while (this.at < this.lines.length) {
      if (isBlank(this.lines[this.at])) {
        this.at++;
        continue;
      }
      const from = this.at;
      const block = this.block(this.lines[from]);
      if (!this.depth) block.source = this.lines.slice(from, this.at).join("\n");
      blocks.push(block);
    }
    return blocks;
  }

  block(line) {
    if (indentOf(line) >= 4) return this.indented();
    const fence = FENCE.exec(line);
    if (fence) return this.fenced(fence);
    const heading = HEADING.exec(line);
    if (heading) return this.heading(line, heading);
    if (RULE.test(line)) return this.at++, { kind: "rule" };
    if (this.depth < MAX_DEPTH) {
      if (QUOTE.test(line)) return this.quote();
      const item = ITEM.exec(line);
      if (item) return this.list(item);
    }
    return this.table(line) || this.formula(line) || this.paragraph();
  }

  fenced([, indent, marks, language]) {
    const text = [];
    let isOpen = true;
    for (this.at++; this.at < this.lines.length; this.at++) {
      const line = this.lines[this.at];
      if (isOpen && closes(line, marks)) {
        isOpen = false;
        this.at++;
        break;
      }
      text.push(line.slice(Math.min(indent.length, indentOf(line))));
    }
    return { kind: "codeblock", language, text: text.join("\n"), isOpen };
  }

  indented() {
    const text = [];
    for (; this.at < this.lines.length; this.at++) {
      const line = this.lines[this.at];
      if (!isBlank(line) && indentOf(line) < 4) break;
      text.push(line.slice(4));
    }
    while (text.length && isBlank(text.at(-1))) text.pop();
    return { kind: "codeblock", language: "", text: text.join("\n"), isOpen: false };
  }

  heading(line, [start, marks]) {
    this.at++;
    let text = line.slice(start.length).trim();
    const bare = text.replace(/#{1,100}$/, "");
    if (bare !== text && (!bare || bare.endsWith(" "))) text = bare.trimEnd();
    return { kind: "heading", level: marks.length, children: parseInline(text) };
  }

  quote() {
    const lines = [];
    for (; this.at < this.lines.length; this.at++) {
      const line = this.lines[this.at];
      if (QUOTE.test(line)) lines.push(line.replace(QUOTE, ""));
      else if (isBlank(line) || !lines.length || isBlank(lines.at(-1)) || this.interrupts(line)) break;
      else lines.push(line); // a paragraph that goes on without its mark
    }
    return { kind: "quote", children: new Blocks(lines, this.depth + 1).read() };
  }

  list([, , marker]) {
    const type = marker.at(-1);
    const isOrdered = marker.length > 1;
    const items = [];
    let isLoose = false;
    while (this.at < this.lines.length) {
      const found = ITEM.exec(this.lines[this.at]);
      if (!found || found[2].at(-1) !== type || RULE.test(this.lines[this.at])) break;
      const lines = this.itemLines(found);
      const blanks = lines.findIndex((line, place) => isBlank(line) && place < lines.length - 1);
      let hasBlankAfter = false;
      while (lines.length > 1 && isBlank(lines.at(-1))) lines.pop(), (hasBlankAfter = true);
      items.push(this.item(lines));
      const goesOn = ITEM.exec(this.lines[this.at] || "")?.[2].at(-1) === type;
      if ((blanks >= 0 && blanks < lines.length && isLooseAt(lines, blanks)) || (hasBlankAfter && goesOn)) isLoose = true;
    }
    return { kind: "list", isOrdered, start: isOrdered ? parseInt(marker, 10) : 1, isLoose, children: items };
  }

  item(lines) {
    const task = TASK.exec(lines[0] || "");
    if (task) lines[0] = lines[0].slice(task[0].length);
    const children = new Blocks(lines, this.depth + 1).read();
    return { kind: "item", checked: task ? task[1] !== " " : null, children };
  }

  // The lines of one item, without its mark and indent. What is indented further belongs to it, and so does a list that
  // is indented by two, as many models write it below a number.
  itemLines([, indent, marker]) {
    const first = this.lines[this.at].slice(indent.length + marker.length);
    const spaces = isBlank(first) ? 1 : indentOf(first) <= 4 ? indentOf(first) : 1;
    const width = indent.length + marker.length + spaces;
    const lines = [first.slice(spaces)];
    let fence = FENCE.exec(lines[0])?.[2] ?? null;
    for (this.at++; this.at < this.lines.length; this.at++) {
      const line = this.lines[this.at], inner = indentOf(line);
      if (isBlank(line)) {
        if (lines.length === 1 && isBlank(lines[0])) break;
        lines.push("");
        continue;
      }
      const isNested = !fence && inner > indent.length && NESTED_ITEM.test(line);
      if (inner >= width) lines.push(line.slice(width));
      else if (isNested) lines.push(line.slice(Math.min(inner, width)));
      else if (!fence && !isBlank(lines.at(-1)) && !this.interrupts(line) && !ITEM.test(line)) lines.push(line.trimStart());
      else break;
      const mark = FENCE.exec(lines.at(-1));
      if (fence ? closes(lines.at(-1), fence) : mark) fence = fence ? null : mark[2];
    }
    return lines;
  }

  table(line) {
    const below = this.lines[this.at + 1];
    if (!line.includes("|") || below === undefined || !below.includes("-")) return null;
    const head = cells(line), marks = cells(below);
    if (head.length !== marks.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
    const align = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
    const rows = [];
    for (this.at += 2; this.at < this.lines.length; this.at++) {
      const row = this.lines[this.at];
      if (isBlank(row) || !row.includes("|")) break;
      const found = cells(row);
      rows.push(head.map((_, place) => parseInline(found[place] || "")));
    }
    return { kind: "table", align, head: head.map(parseInline), rows };
  }

  // A formula on lines of its own, as it was written.
  formula(line) {
    const begin = line.trimStart().slice(0, 2), end = MATH_ENDS[begin];
    if (!end) return null;
    const text = [line.trimStart().slice(2)];
    let last = this.at;
    while (!text.at(-1).includes(end)) {
      if (++last >= this.lines.length || isBlank(this.lines[last])) return null;
      text.push(this.lines[last]);
    }
    const whole = text.join("\n").trim();
    if (!whole.endsWith(end)) return null;
    this.at = last + 1;
    return { kind: "formula", text: whole.slice(0, -2).trim() };
  }

  paragraph() {
    const lines = [this.lines[this.at++].trim()];
    for (; this.at < this.lines.length; this.at++) {
      const line = this.lines[this.at];
      if (isBlank(line)) break;
      const under = UNDERLINE.exec(line);
      if (under && (under[1][0] === "=" || under[1].length > 1)) {
        this.at++;
        return { kind: "heading", level: under[1][0] === "=" ? 1 : 2, children: parseInline(lines.join("\n")) };
      }
      if (this.interrupts(line)) break;
      lines.push(line.trimStart());
    }
    return { kind: "paragraph", children: parseInline(lines.join("\n").trimEnd()) };
  }

  // Whether a line begins something else than more of a paragraph.
  interrupts(line) {
    if (indentOf(line) >= 4) return false;
    if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
    const item = ITEM.exec(line);
    return !!item && !isBlank(line.slice(item[0].length)) && (item[2].length === 1 || parseInt(item[2], 10) === 1);
  }
}

function closes(line, marks) {
  const mark = line.trim();
  return indentOf(line) < 4 && mark.length >= marks.length && mark === marks[0].repeat(mark.length);
}

// A blank line sets items apart where a paragraph follows it, not where a list within the item does.
function isLooseAt(lines, blank) {
  return !ITEM.test(lines.slice(blank).find((line) => !isBlank(line)) || "");
}

// Of a row of a table. A pipe after a backslash is text.
function cells(line) {
  const row = line.trim();
  const found = [];
  let cell = "";
  for (let at = row.startsWith("|") ? 1 : 0; at < row.length; at++) {
    if (row[at] === "\\" && row[at + 1] === "|") cell += row[++at];
    else if (row[at] === "|") found.push(cell.trim()), (cell = "");
    else cell += row[at];
  }
  if (cell.trim()) found.push(cell.trim());
  return found;
}
