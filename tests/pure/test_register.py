"""The register of figures: every table names what made it, and what README and guides quote stands in it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from test_docs import check

from dovetail.errors import ConfigError
from dovetail_bench import register

ROOT = Path(__file__).parents[2]
TABLES = [path for path in sorted((ROOT / "docs" / "measurements").glob("*.md")) if path.name != "index.md"]
QUOTING = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
TABLE = re.compile(r"(?:^|\n\n)([^\n|][^\n]*)\n\n(\|[^\n]*\|\n\| ?[-:| ]+\|)")
LINK = re.compile(r"\]\(([^)\s]*?)(?:#[^)]*)?\)")
NUMBER = re.compile(r"(?<![\w.,/-])\d+(?:[.,]\d+)*(?![\w-])")
SPEED = re.compile(r"\d ?(?:ms|GB/s|MB/s|tokens/s|times as)\b|\d\.\d+ ?(?:s|times)\b")


@pytest.mark.parametrize("page", TABLES, ids=lambda path: path.stem)
def test_every_table_says_what_made_it_where_and_when(page: Path) -> None:
    text = page.read_text()
    count = len(re.findall(r"^\| ?:?-+[-:| ]*\|$", text, re.MULTILINE))
    lines = [line for line, _ in TABLE.findall(text)]
    assert len(lines) == count, "a table has one line of its own above it"
    for line in lines:
        assert register.LINE.match(line) or line == "Assumed, not measured:", line


@pytest.mark.parametrize("page", TABLES, ids=lambda path: path.stem)
def test_commands_of_the_register_can_be_given(page: Path) -> None:
    for made_by, *_ in register.LINE.findall(page.read_text()):
        if not made_by.startswith("`"):
            continue  # in words, where the tool is no part of the repository
        words = shlex.split(made_by.strip("`"))
        if words[0] == "dovetail":
            check(words[1:])
        elif words[0] in ("python", "pytest"):
            assert (ROOT / words[1]).exists(), words[1]
        else:
            assert words[0] == "make"
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words[1]


def test_commits_of_the_register_are_in_the_history_and_what_they_measure_is_there() -> None:
    named = [(commit, paths) for page in TABLES for *_, commit, paths in register.LINE.findall(page.read_text())]
    assert len(named) > 60
    for _, paths in named:
        for path in re.findall(r"`([^`]+)`", paths):
            assert (ROOT / path).exists(), path
    inside = subprocess.run(["git", "-C", ROOT, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if inside.stdout.strip() != "false":
        pytest.skip("no whole history here")
    asked = "".join(f"{commit}^{{commit}}\n" for commit, _ in named)
    words = ["git", "-C", ROOT, "cat-file", "--batch-check"]
    found = subprocess.run(words, input=asked, capture_output=True, text=True)
    assert "missing" not in found.stdout


def test_tables_are_what_the_recorded_runs_give() -> None:
    for page, text in register.pages().items():
        assert text == page.read_text(), f"{page.name}: run dovetail bench report"


def test_a_table_without_a_recorded_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "a.md"
    page.write_text("<!-- table bucket -->\nold\n<!-- /table -->\n")
    monkeypatch.setattr(register, "PAGES", tmp_path)
    monkeypatch.setattr(register, "RESULTS", tmp_path)
    with pytest.raises(ConfigError, match="bucket has no entry or no recorded run"):
        register.pages()
    times = dict.fromkeys(("listening_s", "offered_s", "in_memory_s", "first_token_s", "on_disk_s"), 1.5)
    run = {"command": "dovetail bench bucket", "commit": "1234567", "date": "2026-01-02", "machine": "none"}
    run |= {"result": {"weight_bytes": 2e9, "limit_mb_per_s": 50, "same_text": True, **times}}
    (tmp_path / "bucket.json").write_text(json.dumps(run))
    written = register.pages()[page]
    assert "Measured: `dovetail bench bucket`; none; 2026-01-02, `1234567`; measures `src/dovetail/store`" in written
    assert "| first token after | 1.5 s |" in written
    assert "| weights | 2.00 GB |" in written


@pytest.mark.parametrize("page", QUOTING, ids=lambda path: path.stem)
def test_figures_that_are_quoted_stand_in_the_register(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in prose.splitlines():
        plain = re.sub(r"`[^`]*`", "", line)
        linked = [page.parent / target for target in LINK.findall(line) if "measurements/" in target]
        if not linked:
            assert not SPEED.search(plain), f"quotes a figure without a link to docs/measurements: {line}"
            continue
        known = set(NUMBER.findall(" ".join(path.read_text() for path in linked)))
        for number in NUMBER.findall(LINK.sub("", plain)):
            assert number in known, f"{number} is not on {', '.join(path.name for path in linked)}: {line}"
