"""Semantic Kernel's agent."""

from __future__ import annotations

import asyncio

from common import check, run
from mending import KEY, MODEL, TASK, URL, bash, check_mended
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Shell:
    @kernel_function(name="bash", description="Run a command")
    def bash(self, command: str, description: str) -> str:
        return bash(command, description)


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=AsyncOpenAI(base_url=URL, api_key=KEY))
    agent = ChatCompletionAgent(service=service, name="mender", plugins=[Shell()])
    check_mended(asyncio.run(agent.get_response(messages=TASK)).message.content)


run("semantic-kernel")
