"""Pydantic AI's agent."""

from __future__ import annotations

from common import check, run
from mending import KEY, MODEL, TASK, URL, bash, check_mended
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    check_mended(Agent(model, tools=[bash]).run_sync(TASK).output)


run("pydantic-ai-slim")
