"""CrewAI's crew of one."""

from __future__ import annotations

import os

from common import check, run

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from mending import KEY, MODEL, TASK, URL, bash, check_mended


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    llm = LLM(model=f"openai/{MODEL}", base_url=URL, api_key=KEY)
    agent = Agent(role="mender", goal="mend", backstory="a programmer", llm=llm, tools=[tool("bash")(bash)])
    crew = Crew(agents=[agent], tasks=[Task(description=TASK, expected_output="a sentence", agent=agent)])
    check_mended(crew.kickoff().raw)


run("crewai")
