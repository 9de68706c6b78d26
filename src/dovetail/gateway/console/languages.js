// What highlight.js knows of languages: words, comments and strings. A name that is not here is shown plainly.

const words = (text) => new Set(text.split(" "));
const SLASHES = { line: ["//"], block: [["/*", "*/"]] };
const HASH = { line: ["#"], block: [] };
const C_WORDS =
  "auto break case const continue default do else enum extern for goto if inline register return sizeof static struct " +
  "switch typedef union volatile while bool char double float int long short signed unsigned void true false NULL";
const JS_WORDS =
  "async await break case catch class const continue debugger default delete do else export extends finally for from " +
  "function get if import in instanceof let new of return set static super switch this throw try typeof var void while " +
  "with yield true false null undefined";
const SHELL_WORDS =
  "if then else elif fi for while until do done case esac in function select return break continue exit export local " +
  "readonly declare set unset shift source alias cd echo printf read test trap eval exec sudo";
const SQL_WORDS =
  "select from where and or not in is null like between join left right inner outer full cross on group by order having " +
  "limit offset insert into values update set delete create table view index drop alter add column primary key foreign " +
  "references unique default check constraint union all distinct as case when then else end exists with recursive asc " +
  "desc begin commit rollback grant revoke int integer bigint text varchar char boolean date timestamp true false";

const python = {
  words: words(
    "and as assert async await break case class continue def del elif else except finally for from global if import in is " +
      "lambda match nonlocal not or pass raise return try while with yield None True False self",
  ),
  comments: HASH,
  strings: ['"""', "'''", '"', "'"],
  mark: "@",
};
const javascript = { words: words(JS_WORDS), comments: SLASHES, strings: ["`", '"', "'"] };
const shell = { words: words(SHELL_WORDS), comments: HASH, strings: ['"', "'"], mark: "$", isSpaced: true };
const settings = { words: words("true false null yes no on off"), comments: HASH, strings: ['"""', "'''", '"', "'"], keys: /[\w.-]{1,100}(?=\s{0,20}(?:=|:(?:\s|$)))/y };

const like = (base, more) => ({ ...base, words: new Set([...base.words, ...words(more)]) });
const c = { words: words(C_WORDS), comments: SLASHES, strings: ['"', "'"], mark: "#" };

const KNOWN = {
  python,
  javascript,
  typescript: like(javascript, "abstract any as asserts boolean declare enum implements interface is keyof module namespace never number private protected public readonly string type unknown"),
  json: { words: words("true false null"), comments: SLASHES, strings: ['"'], keys: /"(?:[^"\\\n]|\\.){0,200}"(?=\s{0,20}:)/y },
  shell,
  c,
  cpp: like(c, "alignas alignof and catch class concept constexpr consteval const_cast co_await co_return co_yield decltype delete dynamic_cast explicit export final friend mutable namespace new noexcept nullptr operator override private protected public reinterpret_cast requires static_assert static_cast template this throw try typename using virtual"),
  csharp: like({ ...c, words: words("abstract as base bool break byte case catch char class const continue decimal default delegate do double else enum event explicit extern false finally fixed float for foreach goto if implicit in int interface internal is lock long namespace new null object operator out override params private protected public readonly record ref return sealed short static string struct switch this throw true try typeof uint ulong using var virtual void while yield async await") }, "get set init"),
  java: { ...c, mark: "@", words: words("abstract assert boolean break byte case catch char class const continue default do double else enum extends final finally float for if implements import instanceof int interface long native new package private protected public record return short static super switch synchronized this throw throws transient try var void volatile while true false null") },
  kotlin: { ...c, mark: "@", strings: ['"""', '"', "'"], words: words("as break by class companion continue data do else false for fun if import in interface internal is lateinit null object open override package private protected public return sealed super suspend this throw true try typealias val var when while") },
  swift: { ...c, mark: "@", strings: ['"""', '"'], words: words("as associatedtype async await break case catch class continue default defer do else enum extension false fileprivate for func guard if import in init inout internal is let nil open operator private protocol public repeat return self static struct subscript super switch throw throws true try typealias var where while") },
  go: { ...c, strings: ["`", '"', "'"], words: words("break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var true false nil bool byte error float32 float64 int int8 int16 int32 int64 rune string uint uint8 uint32 uint64 any make new len cap append") },
  rust: { ...c, strings: ['"'], words: words("as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while bool char f32 f64 i8 i16 i32 i64 i128 isize str u8 u16 u32 u64 u128 usize String Vec Option Result Some None Ok Err Box") },
  php: { ...javascript, comments: { line: ["//", "#"], block: [["/*", "*/"]] }, mark: "$", strings: ['"', "'"], words: words("abstract and array as break case catch class const continue declare default do echo else elseif extends final finally fn for foreach function global if implements include instanceof interface isset list match namespace new null or print private protected public readonly require return static switch throw trait try unset use var while yield true false") },
  ruby: { ...python, strings: ['"', "'"], words: words("alias and begin break case class def defined do else elsif end ensure false for if in module next nil not or redo require rescue retry return self super then true undef unless until when while yield attr_accessor attr_reader puts") },
  lua: { words: words("and break do else elseif end false for function goto if in local nil not or repeat return then true until while"), comments: { line: ["--"], block: [["--[[", "]]"]] }, strings: ['"', "'"] },
  r: { ...python, strings: ['"', "'"], mark: "", words: words("break else for function if in next repeat return while TRUE FALSE NULL NA Inf NaN library") },
  sql: { words: words(SQL_WORDS), comments: { line: ["--"], block: [["/*", "*/"]] }, strings: ["'", '"'], ignoresCase: true },
  css: { words: words("important inherit initial none auto"), comments: { line: [], block: [["/*", "*/"]] }, strings: ['"', "'"], mark: "@", keys: /[-\w]{1,100}(?=\s{0,20}:[^:])/y },
  yaml: settings,
  toml: settings,
  ini: { ...settings, comments: { line: ["#", ";"], block: [] } },
  docker: like(shell, "FROM RUN CMD LABEL EXPOSE ENV ADD COPY ENTRYPOINT VOLUME USER WORKDIR ARG ONBUILD HEALTHCHECK SHELL AS"),
  make: { ...shell, words: words("ifeq ifneq ifdef ifndef else endif include define endef export override") },
  html: { isMarkup: true },
  diff: { isDiff: true },
};

const OTHER_NAMES = {
  py: "python", python3: "python", ipython: "python", js: "javascript", jsx: "javascript", mjs: "javascript", node: "javascript",
  ts: "typescript", tsx: "typescript", jsonc: "json", json5: "json", jsonl: "json", bash: "shell", sh: "shell", zsh: "shell",
  console: "shell", "shell-session": "shell", h: "c", "c++": "cpp", cc: "cpp", hpp: "cpp", cuda: "cpp", "c#": "csharp",
  cs: "csharp", kt: "kotlin", scala: "kotlin", golang: "go", rs: "rust", rb: "ruby", mysql: "sql", postgresql: "sql",
  sqlite: "sql", scss: "css", less: "css", yml: "yaml", conf: "ini", properties: "ini", env: "ini", dockerfile: "docker",
  makefile: "make", xml: "html", svg: "html", vue: "html", xhtml: "html", patch: "diff", objc: "c", dart: "java", groovy: "java",
};

export function languageOf(name) {
  const known = name.toLowerCase();
  return KNOWN[OTHER_NAMES[known] || known] ?? null;
}
