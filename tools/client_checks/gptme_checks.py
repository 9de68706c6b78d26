"""gptme, over /v1/chat/completions."""

from __future__ import annotations

from common import check, run
from mending import FOLDER, MODEL, TASK, URL, command


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    said = command(
        "gptme", "--non-interactive", "--tool-format", "tool", "--tools", "shell", "-m", f"local/{MODEL}", TASK,
        OPENAI_BASE_URL=URL, OPENAI_API_KEY="none",
    )  # fmt: skip
    assert "a + b" in (FOLDER / "calc.py").read_text(), said[-400:]


run("gptme")
