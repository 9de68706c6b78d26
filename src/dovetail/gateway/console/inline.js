// Markdown within a paragraph, as a tree of plain records: strings, and {kind, children} or {kind, text}. Knows no DOM.
// Each character is looked at a bounded number of times, whatever a model writes.

const MAX_DEPTH = 16; // of emphasis within emphasis; deeper marks stay text
const MAX_BACK = 8; // openers that a closing mark looks at
const MAX_DESTINATION = 2048;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const BLANK = /^\s?$/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const ENTITY = /&(?:amp|lt|gt|quot|apos|nbsp|#\d{1,7}|#[xX][\da-fA-F]{1,6});/y;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const ADDRESS = /https?:\/\/[^\s<>"'`\u0000-\u001f]+/y;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2048})>/y;
const LINE_BREAK = /<br\s?\/?>/iy;
const TARGET = /\(\s{0,4}(?:<([^<>\n]*)>|((?:[^\s()<>\\]|\\.)*(?:\([^\s()<>]*\)[^\s()<>]*)*))(?:\s{1,4}(?:"[^"]*"|'[^']*'))?\s{0,4}\)/y;

export const isSafe = (address) => /^(?:https?:\/\/|mailto:)/i.test(address);

export function parseInline(text) {
  return new Inline(text).parse();
}

// What is read of a run of nodes, without marks.
export function plainText(nodes) {
  return nodes.map((node) => (typeof node === "string" ? node : node.text ?? plainText(node.children || []))).join("");
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.out = []; // what has been read; marks that may still open something lie in it as {mark}
    this.openers = { "*": [], _: [], "~": [] }; // by mark: {place in out, count, closes}
    this.brackets = []; // {place, image}
    this.missing = new Set(); // ends of formulas that do not come any more
    this.ticks = null; // by length of a run of backticks: where such runs begin
  }

  parse() {
    const { text } = this;
    while (this.at < text.length) {
      const next = this.nextSpecial();
      if (next > this.at) this.out.push(text.slice(this.at, next));
      this.at = next;
      if (next < text.length && !this.special(text[next])) this.out.push(text[this.at++]);
    }
    return settle(this.out);
  }

  nextSpecial() {
    const pattern = /[\\`*_~[\]!<&\n$]|https?:\/\//g;
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    return found ? found.index : this.text.length;
  }

  // Reads one construct; false = the character is text.
  special(character) {
    switch (character) {
      case "\\": return this.escape();
      case "`": return this.code();
      case "*": case "_": case "~": return this.emphasis(character);
      case "[": return this.open(false);
      case "!": return this.text[this.at + 1] === "[" && this.open(true);
      case "]": return this.close();
      case "<": return this.angled();
      case "&": return this.entity();
      case "\n": return this.newline();
      case "$": return this.text.startsWith("$$", this.at) && this.math("$$", "$$");
      default: return this.address();
    }
  }

  take(node, length) {
    this.out.push(node);
    this.at += length;
    return true;
  }

  escape() {
    const next = this.text[this.at + 1] || "";
    if (next === "(" && this.math("\\(", "\\)")) return true;
    if (next === "[" && this.math("\\[", "\\]")) return true;
    if (next === "\n") return this.take({ kind: "break" }, 2);
    return ESCAPABLE.test(next) && this.take(next, 2);
  }

  // Formulas are shown as they were written.
  math(begin, end) {
    if (this.missing.has(end)) return false;
    const stop = this.text.indexOf(end, this.at + 2);
    if (stop < 0) this.missing.add(end);
    if (stop <= this.at + 2) return false;
    return this.take({ kind: "math", text: this.text.slice(this.at + 2, stop).trim() }, stop + 2 - this.at);
  }

  code() {
    if (!this.ticks) {
      this.ticks = new Map();
      for (const { 0: run, index } of this.text.matchAll(/`+/g)) {
        if (!this.ticks.has(run.length)) this.ticks.set(run.length, { places: [], next: 0 });
        this.ticks.get(run.length).places.push(index);
      }
    }
    let length = 1;
    while (this.text[this.at + length] === "`") length++;
    const runs = this.ticks.get(length);
    while (runs && runs.places[runs.next] <= this.at) runs.next++;
    const stop = runs?.places[runs.next];
    if (stop === undefined) return this.take("`".repeat(length), length);
    let text = this.text.slice(this.at + length, stop).replaceAll("\n", " ");
    if (text.startsWith(" ") && text.endsWith(" ") && text.trim()) text = text.slice(1, -1);
    return this.take({ kind: "code", text }, stop + length - this.at);
  }

  emphasis(mark) {
    const { text, at } = this;
    let count = 1;
    while (text[at + count] === mark) count++;
    const before = text[at - 1] || "", after = text[at + count] || "";
    const opensLeft = !BLANK.test(after) && (!PUNCTUATION.test(after) || BLANK.test(before) || PUNCTUATION.test(before));
    const closesRight = !BLANK.test(before) && (!PUNCTUATION.test(before) || BLANK.test(after) || PUNCTUATION.test(after));
    let opens = opensLeft, closes = closesRight;
    if (mark === "_") {
      opens = opensLeft && (!closesRight || PUNCTUATION.test(before));
      closes = closesRight && (!opensLeft || PUNCTUATION.test(after));
    }
    const isProduct = mark === "*" && count === 1 && /\d/.test(before) && /\d/.test(after); // 2*3*4
    if (isProduct || (mark === "~" && count !== 2)) return this.take(mark.repeat(count), count);
    this.at += count;
    const left = closes ? this.wrap(mark, count, opens) : count;
    if (!left) return true;
    this.out.push({ mark: mark.repeat(left) });
    if (opens) this.openers[mark].push({ place: this.out.length - 1, count: left, closes, length: count });
    return true;
  }

  // Closes what is open with as many of these marks as can be used; says how many are left.
  wrap(mark, count, opens) {
    let left = count;
    while (left) {
      const opener = this.findOpener(mark, count, opens);
      if (!opener) return left;
      const used = mark === "~" || (left >= 2 && opener.count >= 2) ? 2 : 1;
      const children = settle(this.out.slice(opener.place + 1));
      const depth = 1 + Math.max(0, ...children.map((child) => child.depth || 0));
      if (depth > MAX_DEPTH) return this.forgetFrom(0), left; // around this, everything would be too deep
      this.out.length = opener.place + 1;
      const kind = mark === "~" ? "strike" : used === 2 ? "strong" : "emphasis";
      this.shorten(opener, mark, used);
      this.out.push({ kind, children, depth });
      left -= used;
    }
    return 0;
  }

  // Of marks that could both open and close, those do not go together whose lengths add up to a multiple of three.
  findOpener(mark, count, opens) {
    const stack = this.openers[mark];
    for (let back = 1; back <= Math.min(stack.length, MAX_BACK); back++) {
      const opener = stack[stack.length - back];
      const isOdd = (opener.closes || opens) && (opener.length + count) % 3 === 0 && (opener.length % 3 || count % 3);
      if (isOdd && mark !== "~") continue;
      this.forgetFrom(opener.place + 1);
      return opener;
    }
    return null;
  }

  shorten(opener, mark, used) {
    opener.count -= used;
    if (opener.count) {
      this.out[opener.place] = { mark: mark.repeat(opener.count) };
      return;
    }
    this.out.length = opener.place;
    this.openers[mark].pop();
  }

  // What lies in a node that was closed opens nothing outside of it.
  forgetFrom(place) {
    for (const stack of [...Object.values(this.openers), this.brackets])
      while (stack.length && stack.at(-1).place >= place) stack.pop();
  }

  open(image) {
    const length = image ? 2 : 1;
    this.out.push({ mark: image ? "![" : "[" });
    this.brackets.push({ place: this.out.length - 1, image });
    this.at += length;
    return true;
  }

  // Images are links: nothing is fetched because a model names it.
  close() {
    const bracket = this.brackets.pop();
    if (!bracket || this.text[this.at + 1] !== "(") return false;
    const found = matchAt(TARGET, this.text.slice(this.at + 1, this.at + 1 + MAX_DESTINATION), 0);
    const href = (found?.[1] ?? found?.[2] ?? "").replace(/\\([!-/:-@[-`{-~])/g, "$1");
    if (!found || !isSafe(href)) return false;
    this.forgetFrom(bracket.place + 1);
    const inner = settle(this.out.slice(bracket.place + 1));
    this.out.length = bracket.place;
    const children = inner.length ? inner : [href];
    const depth = 1 + Math.max(0, ...children.map((child) => child.depth || 0));
    this.out.push({ kind: "link", href, children, depth });
    this.brackets.length = 0;
    this.at += 1 + found[0].length;
    return true;
  }

  angled() {
    const address = matchAt(ANGLED, this.text, this.at);
    if (address) return this.take({ kind: "link", href: address[1], children: [address[1]] }, address[0].length);
    const end = matchAt(LINE_BREAK, this.text, this.at);
    return !!end && this.take({ kind: "break" }, end[0].length);
  }

  entity() {
    const found = matchAt(ENTITY, this.text, this.at)?.[0];
    if (!found) return false;
    const name = found.slice(1, -1);
    if (name in NAMED) return this.take(NAMED[name], found.length);
    const code = /^#x/i.test(name) ? parseInt(name.slice(2), 16) : parseInt(name.slice(1), 10);
    const known = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
    return this.take(known ? String.fromCodePoint(code) : "\ufffd", found.length);
  }

  // A line's end is shown as one: models write verses and addresses so.
  newline() {
    const last = this.out.length - 1;
    if (typeof this.out[last] === "string") this.out[last] = this.out[last].replace(/ {1,8}$/, "");
    return this.take({ kind: "break" }, 1);
  }

  address() {
    if (/[\p{L}\p{N}]/u.test(this.text[this.at - 1] || "") || this.brackets.length) return false;
    const found = matchAt(ADDRESS, this.text, this.at)?.[0];
    if (!found) return false;
    const href = trimAddress(found);
    return href.length > 8 && this.take({ kind: "link", href, children: [href] }, href.length);
  }
}

// Without what ends a sentence, or emphasis, around an address.
function trimAddress(address) {
  let end = address.length;
  let open = 0;
  for (const character of address) open += character === "(" ? 1 : character === ")" ? -1 : 0;
  for (; end > 0; end--) {
    const last = address[end - 1];
    if (last === ")" && open < 0) open++;
    else if (!/[*_~.,:;!?\]}|]/.test(last)) break;
  }
  return address.slice(0, end);
}

// Marks that opened nothing are text; neighbouring texts are one.
function settle(nodes) {
  const settled = [];
  let text = [];
  const flush = () => {
    if (text.length) settled.push(text.join(""));
    text = [];
  };
  for (const node of nodes) {
    const piece = typeof node === "string" ? node : node.mark;
    if (piece !== undefined) text.push(piece);
    else flush(), settled.push(node);
  }
  flush();
  return settled;
}
