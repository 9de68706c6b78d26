"""AutoGen's assistant."""

from __future__ import annotations

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from common import check, run
from mending import KEY, MODEL, TASK, URL, bash, check_mended

INFO = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    client = OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, model_info=INFO)  # type: ignore[arg-type]
    agent = AssistantAgent("mender", client, tools=[bash], max_tool_iterations=4)
    check_mended(asyncio.run(agent.run(task=TASK)).messages[-1].content)  # type: ignore[union-attr]


run("autogen-agentchat")
