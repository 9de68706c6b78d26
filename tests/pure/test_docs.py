"""What the documentation says can be followed: its links lead somewhere, its commands and options exist."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import typer
import yaml
from typer.core import TyperGroup

from dovetail.cli.main import COMMANDS, build_app
from dovetail.config import FROM_FILE
from dovetail.errors import OVERLOAD_CODES
from dovetail.policy.headroom import Refusal
from dovetail.policy.reasons import REASONS

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))
import reference  # noqa: E402

PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#([^)\s]+))?\)")
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        file = page.parent / target
        assert file.exists(), f"{target} is not there"
        if anchor:
            assert anchor in anchors(file), f"{target} has no heading {anchor}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


LONGEST_LINE = 900


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_paragraph_is_longer_than_a_screen(page: Path) -> None:
    for number, line in enumerate(page.read_text().splitlines(), 1):
        assert len(line) <= LONGEST_LINE, f"{page.name}:{number}: {len(line)} characters"


@pytest.mark.parametrize("name", reference.MAKERS)
def test_reference_pages_are_what_the_code_gives(name: str) -> None:
    assert (ROOT / "docs" / "reference" / name).read_text() == reference.MAKERS[name](), "run make reference"


@pytest.mark.parametrize("section", reference.SECTIONS)
def test_defaults_are_shown_as_a_file_takes_them(section: str) -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    told = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    record = reference.SECTIONS[section][1]
    needed = {"source": "x", "cert": "x", "key": "b", "name": "a", "tools": ["*"], "command": ["x"]}
    needed = {key: needed[key] for key in needed if key in record.model_fields}
    for key, default in re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", told, re.MULTILINE):
        record.model_validate({key: yaml.safe_load(default), **needed}, context=FROM_FILE)


def test_every_command_and_option_is_one_that_the_command_line_has() -> None:
    lines = []
    for page in PAGES:
        lines += [line for block in BLOCK.findall(page.read_text()) for line in block.splitlines()]
        lines += re.findall(r"`(dovetail bench [^`|]+)`", page.read_text())  # what made a figure, within a sentence
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("dovetail ")]
    assert len(commands) > 30
    for words in commands:
        check(words[1:])


def test_nothing_is_installed_by_a_name_that_is_another_projects() -> None:
    """On PyPI `dovetail` is a build tool. An extra is added where Dovetail is installed already."""
    for page in PAGES:
        for command in re.findall(r"pip install [^\n`#]*", page.read_text()):
            words = [word for word in shlex.split(command)[2:] if not word.startswith("-")]
            assert "dovetail" not in words, f"{page.name}: {command}"


def check(words: list[str]) -> None:
    assert words[0] in COMMANDS, f"no command {words[0]}"
    app = typer.main.get_command(build_app(words[0]))
    assert isinstance(app, TyperGroup)
    command = app.commands[words[0]]
    if isinstance(command, TyperGroup):
        command = command.commands.get(words[1]) or command.commands["file"]  # `plan FILE`
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.partition("=")[0] for word in words}
    for parameter in command.params if len(words) > 2 else []:  # a command's bare name stands for all of its uses
        if parameter.required and parameter.opts[0].startswith("-"):
            assert given & set(parameter.opts), f"{' '.join(words)}: without {parameter.opts[0]}, which has to be there"
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in options, f"{' '.join(words)}: no option {word}"


def test_the_reference_says_of_every_refusal_what_caused_it_and_what_to_do() -> None:
    page = (ROOT / "docs" / "reference" / "serving.md").read_text()
    section = page[page.index("## Why a request was refused") : page.index("## Several nodes")]
    rows = [f"| `{code}` | {why.cause} | {why.remedy} |" for code, why in OVERLOAD_CODES.items()]
    rows += [f"| {reason.words} | {reason.remedy} |" for reason in REASONS.values()]
    found = [line for line in section.splitlines() if line.startswith("|") and "---" not in line]
    assert found == ["| code | cause | what to do |", *rows[: len(OVERLOAD_CODES)], *found[len(OVERLOAD_CODES) + 1 :]]
    assert found[len(OVERLOAD_CODES) + 1 :] == ["| reason | what changes it |", *rows[len(OVERLOAD_CODES) :]]
    assert set(REASONS) == {reason.value for reason in Refusal}
