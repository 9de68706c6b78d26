"""Haystack's agent."""

from __future__ import annotations

from common import check, run
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function
from haystack.utils import Secret
from mending import KEY, MODEL, TASK, URL, bash, check_mended


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    generator = OpenAIChatGenerator(model=MODEL, api_base_url=URL, api_key=Secret.from_token(KEY))
    agent = Agent(chat_generator=generator, tools=[create_tool_from_function(bash)])
    check_mended(agent.run(messages=[ChatMessage.from_user(TASK)])["messages"][-1].text)


run("haystack-ai")
