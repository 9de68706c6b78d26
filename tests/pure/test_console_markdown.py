"""What the page makes of Markdown: against markdown-it, and of what nobody writes on purpose."""

from __future__ import annotations

import random
import re
from html import escape
from typing import Any

import pytest
from markdown_it import MarkdownIt
from page_modules import call, call_many, needs_node

pytestmark = needs_node

TAGS = {"paragraph": "p", "strong": "strong", "emphasis": "em", "strike": "s", "quote": "blockquote", "code": "code"}
KINDS = {*TAGS, "heading", "codeblock", "rule", "break", "link", "list", "item", "table", "math", "formula"}


def html(node: Any, tight: bool = False) -> str:
    """As markdown-it would write it."""
    if isinstance(node, str):
        return escape(node)
    if isinstance(node, list):
        return "".join(html(child, tight) for child in node)
    kind = node["kind"]
    if kind == "heading":
        return f"<h{node['level']}>{html(node['children'])}</h{node['level']}>"
    if kind == "codeblock":
        language = f' class="language-{escape(node["language"])}"' if node["language"] else ""
        text = escape(node["text"])
        return f"<pre><code{language}>{text}</code></pre>"
    if kind in ("rule", "break"):
        return {"rule": "<hr>", "break": "<br>"}[kind]
    if kind == "code":
        return f"<code>{escape(node['text'])}</code>"
    if kind == "link":
        return f'<a href="{escape(node["href"])}">{html(node["children"])}</a>'
    if kind == "list":
        start = f' start="{node["start"]}"' if node["isOrdered"] and node["start"] != 1 else ""
        tag = "ol" if node["isOrdered"] else "ul"
        items = "".join(f"<li>{html(item['children'], not node['isLoose'])}</li>" for item in node["children"])
        return f"<{tag}{start}>{items}</{tag}>"
    if kind == "table":
        return table(node)
    if kind == "paragraph" and tight:
        return html(node["children"])
    return f"<{TAGS[kind]}>{html(node['children'])}</{TAGS[kind]}>"


def table(node: Any) -> str:
    def cells(tag: str, row: Any) -> str:
        aligned = zip(node["align"], row, strict=True)
        style = {"left": "", "right": ' style="text-align:right"', "center": ' style="text-align:center"'}
        return "<tr>" + "".join(f"<{tag}{style[align]}>{html(cell)}</{tag}>" for align, cell in aligned) + "</tr>"

    body = "".join(cells("td", row) for row in node["rows"])
    return (
        f"<table><thead>{cells('th', node['head'])}</thead>" + (f"<tbody>{body}</tbody>" if body else "") + "</table>"
    )


def reference(text: str) -> str:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable(["table", "strikethrough"])
    found = parser.render(text).replace("&quot;", '"').replace("<br />", "<br>").replace("<hr />", "<hr>")
    return normal(re.sub(' title="[^"]*"', "", found))  # a link's title on the page is its address


def normal(found: str) -> str:
    """Without the line breaks between tags, which mean nothing."""
    found = found.replace("&quot;", '"').replace("&#x27;", "'").replace("\n</code></pre>", "</code></pre>")
    kept = re.split(r"(<pre>.*?</pre>)", found, flags=re.DOTALL)
    return "".join(piece if piece.startswith("<pre>") else re.sub(r"\s*\n\s*", "", piece) for piece in kept)


AS_COMMONMARK = [
    "Hello **bold** and *it* and `code` and ***both*** and ~~no~~, snake_case_name and __init__.",
    "# One\n\n## Two ##\n\nText\n===\n\nMore\n---\n\n***\n",
    "A paragraph\nof two lines\nand  \na break\\\nhere.",
    "- a\n- b\n  - c\n  - d\n    more of d\n- e",
    "1. a\n2. b\n   - c\n3. d\n\ntext\n\n7) seven\n8) eight",
    "- a\n\n- b\n\n  second paragraph of b\n- c",
    "* a\n\n  ```python\n  def f():\n      return 1\n  ```\n* b",
    "> a quotation\nthat goes on\n>\n> - with a list\n>\n> > and another\n\nafter",
    "```js\nlet a = `b`;\n\n  // two\n```\n\n~~~\nplain ``` inside\n~~~",
    "    indented\n      code\n\nnot code",
    "```\nnever closed\n\n- of code",
    "| a | b | c |\n|---|--:|:-:|\n| 1 | `x` | **y** |\n| 2 \\| 3 | |\n\nafter",
    "a | b\n--|--\n1 | 2",
    "[text](https://example.org/a_(b)) and [*em* link](http://x.y 'title') and <https://z.org>",
    "`` a ` b `` and ` x ` and `unclosed",
    "*foo**bar* **a *b* c** *a**b*c* **unclosed *and",
    "\\*not\\* \\# \\` \\[ &amp; &lt;b&gt; &#65; &copy",
    "text\n- list after text\n\ntext\n1. numbered after text\n\ntext\n2. not a list",
    "1. one\n\n   ```sh\n   echo $HOME\n   ```\n\n2. two",
    "- [x](https://x.y)\n- **b**: text\n- `c`",
    "Ends with spaces   \n\n\n\n   # Indented heading",
    "a*b*c 1 * 2 * 3 _a_b_ __a__b",
    "-\n- a\n-\n",
    "Heading\n# at once\ntext\n```\ncode at once\n```\ntext\n> quote at once",
]


@pytest.mark.parametrize("text", AS_COMMONMARK)
def test_is_read_as_markdown_it_reads_it(text: str) -> None:
    assert normal(html(call("markdown.js", "parse", text))) == reference(text)


def test_html_is_text() -> None:
    text = "<script>alert(1)</script> <img src=x onerror=alert(1)> <b>bold</b> <!-- no -->"
    assert html(call("markdown.js", "parse", text)) == f"<p>{escape(text)}</p>"
    block = "<div onclick='x()'>\n<p>hi</p>\n</div>"
    assert "<div" not in html(call("markdown.js", "parse", block))


@pytest.mark.parametrize(
    "address",
    ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "vbscript:x", "file:///etc/passwd",
     "//evil.example", "/ui/key", "#models", "java&#115;cript:alert(1)", "\\javascript:alert(1)",
     " javascript:alert(1)", "blob:x"],
)  # fmt: skip
def test_only_web_addresses_become_links(address: str) -> None:
    for text in (f"[text]({address})", f"![text]({address})", f"[text](<{address}>)", f"<{address}>"):
        assert "<a" not in html(call("markdown.js", "parse", text)), text


def test_an_image_is_a_link_and_nothing_is_fetched_for_it() -> None:
    (block,) = call("markdown.js", "parse", "![a chart](https://example.org/x.png)")
    assert html(block) == '<p><a href="https://example.org/x.png">a chart</a></p>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see https://a.b/c_d, or (https://e.f/g).", "<p>see <a href='https://a.b/c_d'>https://a.b/c_d</a>, or "
         "(<a href='https://e.f/g'>https://e.f/g</a>).</p>"),
        ("**https://a.b**", "<p><strong><a href='https://a.b'>https://a.b</a></strong></p>"),
        ("one<br>two<br/>three", "<p>one<br>two<br>three</p>"),
        ("2*3*4 = 24 and ~5 to ~6", "<p>2*3*4 = 24 and ~5 to ~6</p>"),
        ("1. a\n  - nested by two\n2. b", "<ol><li>a<ul><li>nested by two</li></ul></li><li>b</li></ol>"),
    ],
)  # fmt: skip
def test_what_models_write_beyond_commonmark(text: str, expected: str) -> None:
    assert html(call("markdown.js", "parse", text)) == expected.replace("'", '"')


def test_formulas_stay_as_they_were_written() -> None:
    inline, block = call("markdown.js", "parse", "with \\(a_1 * b_2 * c\\) in it\n\n\\[\nx_1 = *y*\n\\]")
    assert inline["children"][1] == {"kind": "math", "text": "a_1 * b_2 * c"}
    assert (block["kind"], block["text"]) == ("formula", "x_1 = *y*")


def test_tabs_of_code_stay() -> None:
    (block,) = call("markdown.js", "parse", "```make\nall:\n\tcc -o x x.c\n```")
    assert block["text"] == "all:\n\tcc -o x x.c"


def test_tasks_of_a_list_are_marked() -> None:
    (found,) = call("markdown.js", "parse", "- [ ] open\n- [x] done\n- plain")
    assert [item["checked"] for item in found["children"]] == [False, True, None]


def test_blocks_say_what_they_were_read_from() -> None:
    """A text that grows makes the same blocks before its last one: these are not drawn again."""
    text = "# A\n\nsome *text*\n\n- a\n- b\n\n```py\nx = 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nend of it"
    cuts = [text[:length] for length in range(len(text) + 1)]
    whole = {block["source"]: block for block in call("markdown.js", "parse", text)}
    for blocks in call_many("markdown.js", "parse", [[cut] for cut in cuts]):
        for block in blocks[:-2]:
            assert whole[block["source"]] == block


def kinds(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(kinds, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    assert node["kind"] != "link" or re.match("https?://|mailto:", node["href"], re.IGNORECASE)
    children = [node.get(part, []) for part in ("children", "head", "rows")]
    return {node["kind"]}.union(*map(kinds, children))


PIECES = [
    *[
        "*",
        "**",
        "_",
        "`",
        "```\n",
        "\n",
        "\n\n",
        "> ",
        "- ",
        "1. ",
        "| ",
        "|---|",
        "[a](",
        "](",
        "https://x.y/",
        ")",
        "![",
    ],
    *[
        "<",
        ">",
        "&amp;",
        "\\",
        "\\(",
        "\\)",
        "$$",
        "~~",
        "# ",
        "    ",
        "\t",
        "text",
        " ",
        "javascript:",
        "é",
        "\U0001f600",
    ],
    *["\x00", "---", "==="],
]


def test_any_text_is_read_into_known_kinds() -> None:
    draw = random.Random(41)
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(1, 60))) for _ in range(4000)]
    for blocks in call_many("markdown.js", "parse", [[text] for text in texts]):
        assert kinds(blocks) <= KINDS


HOSTILE = [
    *[
        "*",
        "**a",
        "*a ",
        "*a_",
        "**_",
        "[",
        "](",
        "[](",
        "[a](b",
        "![",
        "`",
        "`` ` ",
        "~~",
        "<",
        "&#",
        "$$",
        "\\[",
        "\\(",
    ],
    *[
        "https://a(",
        '[a](https://b "',
        "(",
        "> ",
        "- ",
        "\n- ",
        "\n> > ",
        "```\n",
        "\n1)\n",
        "|a\n|-\n",
        "$$\n",
        "a\n===\n",
    ],
    *[" ", "*a **b c** ", "[a](  "],
]


def test_no_text_takes_long() -> None:
    """What takes time by the square of these lengths would not end before the limit."""
    texts = [piece * (300_000 // len(piece)) for piece in HOSTILE]
    texts += ["*a " * 50_000 + "b* " * 50_000, "[" * 100_000 + "a" + "](https://b)" * 10_000]
    texts += [
        "\n".join("> " * (row % 60) + "a" for row in range(5000)),
        "\n".join("  " * (row % 60) + "- a" for row in range(5000)),
    ]
    assert call_many("markdown.js", "parse", [[text] for text in texts], keep=False) == len(texts)


SAMPLES = {
    "python": 'def f(x):  # twice\n    """Doc."""\n    return f"{x}" + \'a\\\'b\' + 0x1F * 1.5e3\n',
    "javascript": "const a = `x ${b}\n`; // c\nif (a === null) g(/* d */ 'e');",
    "json": '{"a": [1, -2.5e3, true, null], "b": "c\\"d"}',
    "bash": 'echo "$HOME/${x:-y}" # c\nfor i in *; do cat \'$i\'; done',
    "html": '<!-- c --><a href="x" data-y=\'z\'>text &amp; more</a>',
    "css": "@media (x) { a:hover { color: #fff; } } /* c */",
    "sql": "SELECT a, 'it''s' FROM t -- c\nWHERE b = 1;",
    "yaml": "a: 1 # c\nb-c: 'd'\n- https://x.y",
    "rust": 'fn f<\'a>(x: &\'a str) -> String { format!("{}", x) } // c',
    "diff": "@@ -1 +1 @@\n-a\n+b\n c\n",
    "c++": '#include <x>\nint main() { return sizeof(int); } /* open',
    "nobody knows": "a <b> & 'c'",
}  # fmt: skip


@pytest.mark.parametrize("language", SAMPLES)
def test_coloured_code_is_the_code(language: str) -> None:
    code = SAMPLES[language]
    pieces = call("highlight.js", "highlight", code, language)
    assert "".join(text for _, text in pieces) == code
    assert (len(pieces) > 1) == (language != "nobody knows")


def test_code_is_coloured_by_what_it_is() -> None:
    pieces = [tuple(piece) for piece in call("highlight.js", "highlight", SAMPLES["python"], "py")]
    for piece in [("keyword", "def"), ("function", "f"), ("comment", "# twice"), ("string", '"""Doc."""'),
                  ("string", "'a\\'b'"), ("number", "0x1F"), ("number", "1.5e3")]:  # fmt: skip
        assert piece in pieces


def test_any_code_is_kept_whole_and_none_takes_long() -> None:
    draw = random.Random(7)
    letters = [*"ab1 \"'`#/*-<>=:$@{}()[]\\\n\té", "'''", '"""', "/*", "*/", "<!--", "-->", "//"]
    hard = [
        piece * (20_000 // len(piece)) for piece in ("a.", "a-", "<a ", '"', "/*", "$", '"a', "'''", " ", "9", "a:")
    ]
    codes = [["".join(draw.choices(letters, k=60)), language] for language in SAMPLES for _ in range(100)]
    codes += [[code, language] for language in SAMPLES for code in hard]
    for (code, _), pieces in zip(codes, call_many("highlight.js", "highlight", codes), strict=True):
        assert "".join(text for _, text in pieces) == code
