"""Inspect's evaluations: an agent with a tool."""

from __future__ import annotations

import os

from common import check, run
from mending import MODEL, TASK, URL, bash, check_mended

os.environ |= {"DOVETAIL_API_KEY": "none", "DOVETAIL_BASE_URL": URL, "INSPECT_DISPLAY": "none"}

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool


@tool(name="bash")
def shell() -> Tool:
    async def execute(command: str, description: str) -> str:
        """Run a command.

        Args:
            command: what the shell is given
            description: what it is for
        """
        return bash(command, description)

    return execute


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    task = Task(dataset=[Sample(input=TASK)], solver=[use_tools(shell()), generate()])
    log = eval(task, model=f"openai-api/dovetail/{MODEL}", log_dir="/tmp/inspect-logs")[0]
    assert log.status == "success", log.error
    assert log.samples
    check_mended(log.samples[0].output.completion)


run("inspect-ai")
