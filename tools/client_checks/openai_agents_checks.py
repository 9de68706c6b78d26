"""OpenAI's Agents SDK, over the chat and over /v1/responses."""

from __future__ import annotations

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from common import check, run
from mending import FOLDER, KEY, MODEL, TASK, URL, bash, check_mended
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=240)


def mend(model: object) -> None:
    (FOLDER / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    agent = Agent(name="mender", instructions="Mend it.", model=model, tools=[function_tool(bash)])  # type: ignore[arg-type]
    check_mended(Runner.run_sync(agent, TASK).final_output)


@check("tools")
def over_the_chat() -> None:
    mend(OpenAIChatCompletionsModel(MODEL, client))


@check("tools")
def over_responses() -> None:
    mend(OpenAIResponsesModel(MODEL, client))


run("openai-agents")
