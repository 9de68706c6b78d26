"""smolagents' agent that calls tools."""

from __future__ import annotations

from common import check, run
from mending import KEY, MODEL, TASK, URL, bash, check_mended
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    model = OpenAIServerModel(model_id=MODEL, api_base=URL, api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(bash)], model=model, max_steps=4, verbosity_level=0)
    check_mended(agent.run(TASK))


run("smolagents")
