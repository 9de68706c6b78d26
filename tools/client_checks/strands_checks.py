"""Strands' agent."""

from __future__ import annotations

from common import check, run
from mending import KEY, MODEL, TASK, URL, bash, check_mended
from strands import Agent, tool
from strands.models.openai import OpenAIModel


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    model = OpenAIModel(client_args={"base_url": URL, "api_key": KEY}, model_id=MODEL)
    check_mended(Agent(model=model, tools=[tool(bash)], callback_handler=None)(TASK))


run("strands-agents")
