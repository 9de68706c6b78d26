"""Anthropic's Messages API on a real server, through the official client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from server_fixture import Server

QUESTION: Any = [{"role": "user", "content": "Please name the capital of Germany."}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}

ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client(smollm2_server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=smollm2_server.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def asked(smollm2_server: Server) -> dict[str, Any]:
    greedy = {"temperature": 0}  # which newer clients know no more
    return {"model": smollm2_server.models[0], "max_tokens": 24, "messages": QUESTION, "extra_body": greedy}


def test_a_message_answers_as_the_chat_does(
    smollm2_server: Server, client: anthropic.Anthropic, asked: dict[str, Any]
) -> None:
    message = client.messages.create(**asked)
    assert message.type == "message"
    assert message.content[0].type == "text"
    assert "Berlin" in message.content[0].text
    chat = smollm2_server.client().chat.completions.create(
        model=asked["model"], messages=QUESTION, temperature=0, max_tokens=24
    )
    assert message.content[0].text == chat.choices[0].message.content
    assert message.stop_reason == "end_turn"
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens  # type: ignore[union-attr]
    counted = client.messages.count_tokens(model=asked["model"], messages=QUESTION)
    assert counted.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]


def test_the_clients_stream_builds_the_whole_message(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        built = stream.get_final_message()
    assert len(texts) > 3
    assert "".join(texts) == whole.content[0].text  # type: ignore[union-attr]
    assert built.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert (built.stop_reason, built.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_system_prefill_and_stop_sequences_hold(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    system: Any = [{"type": "text", "text": "Answer in one word.", "cache_control": {"type": "ephemeral"}}]
    told = client.messages.create(**asked | {"system": system})
    plain = client.messages.create(**asked)
    total = [one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0) for one in (told, plain)]
    assert total[0] != total[1]
    started = {"role": "assistant", "content": "The capital of Germany is"}
    prefilled = client.messages.create(**asked | {"messages": [*QUESTION, started]})
    assert "Berlin" in prefilled.content[0].text  # type: ignore[union-attr]
    stopped = client.messages.create(**asked | {"stop_sequences": ["Berlin"]})
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Berlin")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_answered(
    client: anthropic.Anthropic, asked: dict[str, Any], stream: bool
) -> None:
    forced: Any = asked | {"tools": [WEATHER], "tool_choice": ONE_CALL, "max_tokens": 60}
    if stream:
        with client.messages.stream(**forced) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**forced)
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert isinstance(call.input["city"], str)  # type: ignore[index]
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 31 degrees."}
    said: Any = [
        *QUESTION,
        {"role": "assistant", "content": [block.model_dump() for block in message.content]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**asked | {"messages": said, "tools": [WEATHER]})
    assert answer.content


def test_what_agents_ask_for_is_clamped_to_the_context(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    message = client.messages.create(**asked | {"max_tokens": 32_000, "stop_sequences": ["Berlin"]})
    assert message.stop_reason == "stop_sequence"
    assert "32000" in message.model_extra["warnings"][0]  # type: ignore[index]


def test_errors_are_the_clients_own(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nothing"):
        client.messages.create(**asked | {"model": "nothing"})
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(anthropic.BadRequestError, match="reads text") as refused:
        client.messages.create(**asked | {"messages": [{"role": "user", "content": [image]}]})
    assert refused.value.request_id
    assert client.models.list().data[0].id == asked["model"]
