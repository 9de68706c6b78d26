"""aider: writes a file anew and has its test run, over /v1/chat/completions."""

from __future__ import annotations

from common import check, run
from mending import FOLDER, MODEL, TASK, command


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    options = ["--edit-format", "whole", "--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings"]
    test = ["--auto-test", "--test-cmd", "python3 test_calc.py"]
    said = command("aider", "--model", f"openai/{MODEL}", *options, *test, "--message", TASK, "calc.py")
    assert "a + b" in (FOLDER / "calc.py").read_text(), said[-400:]
    assert "passed" in said, said[-400:]


run("aider-chat")
