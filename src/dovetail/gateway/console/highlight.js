// Code as pieces of [class, text]; class "" is plain. Their texts together are the code. Knows no DOM.
import { languageOf } from "./languages.js";

const MAX_LENGTH = 50_000; // longer code is shown plainly
const WORD = /[\p{L}_$][\p{L}\p{N}_$]*/uy;
const NUMBER = /(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)[a-zA-Z%]{0,4}/y;
const SPACE = /\s+/y;
const VARIABLE = /\$(?:\w+|\{[^}\n]{0,200}\}|[?@#*!$-])/y;
const MARKED = /[@#$][A-Za-z_]\w*/y;
const TAG = /<\/?[A-Za-z][\w:-]*|\/?>/y;
const ATTRIBUTE = /[\w:@.-]{1,100}(?==)/y;

export function highlight(code, name) {
  const language = languageOf(name);
  if (!language || code.length > MAX_LENGTH) return [["", code]];
  if (language.isDiff) return highlightDiff(code);
  return new Lexer(code, language).read();
}

function highlightDiff(code) {
  return code.split(/(?<=\n)/).map((line) => {
    if (line.startsWith("@@") || /^(?:diff|index|---|\+\+\+) /.test(line)) return ["meta", line];
    return [line[0] === "+" ? "added" : line[0] === "-" ? "removed" : "", line];
  });
}

class Lexer {
  constructor(code, language) {
    this.code = code;
    this.language = language;
    this.at = 0;
    this.pieces = [];
    this.isInTag = false;
  }

  read() {
    while (this.at < this.code.length) {
      const [kind, length] = this.language.isMarkup ? this.markup() : this.next();
      this.add(kind, this.code.slice(this.at, this.at + length));
      this.at += length;
    }
    return this.pieces;
  }

  add(kind, text) {
    const last = this.pieces.at(-1);
    if (last && last[0] === kind) last[1] += text;
    else this.pieces.push([kind, text]);
  }

  length(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.code)?.[0].length ?? 0;
  }

  next() {
    const { code, at, language } = this;
    const space = this.length(SPACE);
    if (space) return ["", space];
    const comment = this.comment();
    if (comment) return ["comment", comment];
    const key = language.keys ? this.length(language.keys) : 0;
    if (key) return ["key", key];
    const string = language.strings.find((quote) => code.startsWith(quote, at));
    if (string) return ["string", this.string(string)];
    if (language.mark === "$" && code[at] === "$") return ["name", this.length(VARIABLE) || 1];
    if (language.mark && code[at] === language.mark) return ["meta", this.length(MARKED) || 1];
    const word = this.length(WORD);
    if (word) return [this.word(code.slice(at, at + word), at + word), word];
    const number = this.length(NUMBER);
    return number ? ["number", number] : ["", 1];
  }

  word(text, end) {
    const { words, ignoresCase } = this.language;
    if (words.has(ignoresCase ? text.toLowerCase() : text)) return "keyword";
    if (this.code[end] === "(") return "function";
    return /^[A-Z][a-z]/.test(text) ? "type" : "";
  }

  comment() {
    const { code, at, language } = this;
    for (const [begin, end] of language.comments.block)
      if (code.startsWith(begin, at)) return this.until(end, begin.length);
    const mark = language.comments.line.find((each) => code.startsWith(each, at));
    if (!mark || (language.isSpaced && at && !/\s/.test(code[at - 1]))) return 0;
    const end = code.indexOf("\n", at);
    return (end < 0 ? code.length : end) - at;
  }

  until(end, from) {
    const found = this.code.indexOf(end, this.at + from);
    return (found < 0 ? this.code.length : found + end.length) - this.at;
  }

  // Up to its quote; a short one ends with its line at the latest.
  string(quote) {
    const isLong = quote.length === 3 || quote === "`" || this.language.isSpaced;
    let end = this.at + quote.length;
    while (end < this.code.length && !this.code.startsWith(quote, end)) {
      if (!isLong && this.code[end] === "\n") return end - this.at;
      end += this.code[end] === "\\" ? 2 : 1;
    }
    return Math.min(end + quote.length, this.code.length) - this.at;
  }

  markup() {
    const { code, at } = this;
    if (code.startsWith("<!--", at)) return ["comment", this.until("-->", 4)];
    const tag = this.length(TAG);
    if (tag) {
      this.isInTag = code[at] === "<";
      return ["keyword", tag];
    }
    if (this.isInTag) {
      const attribute = this.length(ATTRIBUTE);
      if (attribute) return ["key", attribute];
      if (code[at] === '"' || code[at] === "'") return ["string", this.until(code[at], 1)];
    }
    return ["", 1];
  }
}
