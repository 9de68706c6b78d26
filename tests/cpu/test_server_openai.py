"""A real instruct model through the official client, sync and async."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest
from server_fixture import Server

QUESTION = [{"role": "user", "content": "Please name the capital of Germany."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(smollm2_server: Server) -> str:
    return smollm2_server.models[0]


def chat(server: Server, model: str, **options: Any) -> Any:
    return server.client().chat.completions.create(
        **({"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24} | options)
    )


def test_a_chat_is_answered_in_english(smollm2_server: Server, model: str) -> None:
    answer = chat(smollm2_server, model)
    assert "Berlin" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_completion_goes_on_with_the_prompt_and_keeps_the_space(smollm2_server: Server, model: str) -> None:
    answer = smollm2_server.client().completions.create(
        model=model, prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"


def test_the_streamed_text_is_the_whole_text_and_usage_comes_last(smollm2_server: Server, model: str) -> None:
    whole = chat(smollm2_server, model)
    chunks = list(chat(smollm2_server, model, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_logprobs_have_tokens_bytes_and_alternatives(smollm2_server: Server, model: str) -> None:
    answer = chat(smollm2_server, model, logprobs=True, top_logprobs=3, max_tokens=6)
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    text = smollm2_server.client().completions.create(
        model=model, prompt="The capital of France is", temperature=0, max_tokens=3, logprobs=2
    )
    logprobs = text.choices[0].logprobs
    assert "".join(logprobs.tokens) == text.choices[0].text
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


def test_several_choices_differ_and_each_ends(smollm2_server: Server, model: str) -> None:
    messages = [{"role": "user", "content": "Write a story."}]
    answer = chat(smollm2_server, model, messages=messages, n=4, temperature=1.5, seed=3, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert answer.usage.completion_tokens <= 48


def test_a_stop_string_ends_the_text_before_it(smollm2_server: Server, model: str) -> None:
    for stream in (False, True):
        answer = chat(smollm2_server, model, stop=["Germany"], stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content for chunk in answer)
        else:
            assert answer.choices[0].finish_reason == "stop"
            text = answer.choices[0].message.content
        assert text == "The capital of "


def test_the_same_seed_gives_the_same_text_whatever_else_is_in_the_batch(smollm2_server: Server, model: str) -> None:
    async def run() -> None:
        client = smollm2_server.async_client()

        async def ask(seed: int, content: str = "Tell me a joke.") -> str:
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": content}],
                seed=seed,
                temperature=1.0,
                max_tokens=8,
            )
            return answer.choices[0].message.content or ""

        alone = await ask(7)
        crowded, *others = await asyncio.gather(ask(7), *(ask(seed, f"Count to {seed}.") for seed in range(4)))
        assert crowded == alone
        assert len({alone, *others, await ask(8)}) > 2

    asyncio.run(run())


def test_a_hundred_of_a_hundred_answers_follow_the_schema(smollm2_server: Server, model: str) -> None:
    async def run() -> None:
        client = smollm2_server.async_client()
        gate = asyncio.Semaphore(50)

        async def ask(seed: int) -> str:
            async with gate:
                answer = await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": "Name a city as JSON."}],
                    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
                    seed=seed,
                    temperature=1.2,
                    max_tokens=48,
                )
            assert answer.choices[0].finish_reason == "stop"
            return answer.choices[0].message.content or ""

        texts = await asyncio.gather(*(ask(seed) for seed in range(100)))
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)
        assert len(set(texts)) > 10

    asyncio.run(run())


def test_text_can_be_held_to_json_a_regex_a_choice_or_a_grammar(smollm2_server: Server, model: str) -> None:
    def content(**options: Any) -> str:
        return chat(smollm2_server, model, temperature=1, seed=1, max_tokens=40, **options).choices[0].message.content

    assert content(extra_body={"guided_choice": ["red", "green"]}) in ("red", "green")
    assert content(extra_body={"guided_regex": r"[0-9]{3}-[a-c]{2}"}).count("-") == 1
    assert content(extra_body={"structured_outputs": {"grammar": 'start: "yes" | "no"'}}) in ("yes", "no")
    number = content(extra_body={"guided_json": {"type": "integer", "minimum": 10, "maximum": 20}})
    assert 10 <= int(number) <= 20


def test_models_are_listed_and_found(smollm2_server: Server, model: str) -> None:
    client = smollm2_server.client()
    assert [item.id for item in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_the_async_client_streams_two_conversations_at_once(smollm2_server: Server, model: str) -> None:
    async def run() -> None:
        client = smollm2_server.async_client()

        async def ask() -> str:
            stream = await client.chat.completions.create(
                model=model,
                messages=QUESTION,  # type: ignore[arg-type]
                temperature=0,
                max_tokens=24,
                stream=True,
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(ask(), ask())
        assert texts[0] == texts[1]
        assert "Berlin" in texts[0]

    asyncio.run(run())


def test_a_long_prompt_that_fits_is_served_and_repeated_from_the_prefix_cache(
    smollm2_server: Server, model: str
) -> None:
    messages = [{"role": "user", "content": "Paris is a city. " * 60 + "Which city?"}]
    first = chat(smollm2_server, model, messages=messages, max_tokens=4)
    second = chat(smollm2_server, model, messages=messages, max_tokens=4)
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 200
