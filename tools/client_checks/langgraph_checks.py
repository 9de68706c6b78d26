"""LangGraph's agent."""

from __future__ import annotations

from common import check, run
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from mending import KEY, MODEL, TASK, URL, bash, check_mended


@check("tools")
def edits_a_file_and_runs_its_test() -> None:
    agent = create_react_agent(ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY), [bash])
    check_mended(agent.invoke({"messages": [("user", TASK)]})["messages"][-1].content)


run("langgraph")
