"""Anthropic's own Python client."""

from __future__ import annotations

from anthropic import Anthropic
from common import CITY_SCHEMA, MODEL, QUESTION, URL, WANTED, check, check_call, run

client = Anthropic(base_url=URL, api_key="none", timeout=120, max_retries=0)
ASKED = {"model": MODEL, "max_tokens": 60, "messages": [{"role": "user", "content": QUESTION}]}
ASKED |= {"extra_body": {"temperature": 0}}
TOOL = {"name": "get_forecast", "description": "The weather of a city", "input_schema": CITY_SCHEMA}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}


@check("chat")
def messages_and_tokens() -> None:
    answer = client.messages.create(**ASKED)
    assert WANTED in answer.content[0].text
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED["messages"]).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert MODEL in [model.id for model in client.models.list()]


@check("stream")
def stream() -> None:
    with client.messages.stream(**ASKED) as events:
        text = "".join(events.text_stream)
        assert events.get_final_message().stop_reason == "end_turn"
    assert text == client.messages.create(**ASKED).content[0].text


@check("tools")
def tools() -> None:
    with client.messages.stream(**ASKED, **FORCED) as events:
        streamed = events.get_final_message()
    for answer in (client.messages.create(**ASKED, **FORCED), streamed):
        call = answer.content[-1]
        check_call(call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    said = [{"role": "assistant", "content": [call.model_dump()]}, {"role": "user", "content": [result]}]
    assert client.messages.create(**ASKED | {"messages": [*ASKED["messages"], *said]}).content


@check("structured output")
def formats() -> None:
    config = {"format": {"type": "json_schema", "schema": CITY_SCHEMA}}
    check_call("get_forecast", client.messages.create(**ASKED, output_config=config).content[0].text)


run("anthropic")
