"""Mirascope's call with a tool."""

from __future__ import annotations

from common import check, run
from mending import KEY, MODEL, TASK, URL, bash, check_mended
from mirascope import llm

llm.register_provider("openai:completions", scope="openai/", base_url=URL, api_key=KEY)


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    @llm.call(f"openai/{MODEL}", tools=[llm.tool(bash)])
    def mend() -> str:
        return TASK

    answer = mend()
    while answer.tool_calls:
        answer = answer.resume(answer.execute_tools())
    check_mended(answer.text())


run("mirascope")
