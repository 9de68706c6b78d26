"""LiteLLM, which speaks to the server as to any that is like OpenAI's."""

from __future__ import annotations

import json

import litellm
from common import (
    CITY_SCHEMA,
    MODEL,
    QUESTION,
    TEXTS,
    TOOL,
    URL,
    WANTED,
    batch_lines,
    check,
    check_answers,
    check_call,
    check_vectors,
    ended,
    run,
)

OPTIONS = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 40,
}


@check("chat")
def chat() -> None:
    assert WANTED in litellm.completion(**OPTIONS).choices[0].message.content


@check("stream")
def stream() -> None:
    chunks = litellm.completion(**OPTIONS, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == litellm.completion(**OPTIONS).choices[0].message.content


@check("tools")
def tools() -> None:
    for stream in (False, True):
        answer = litellm.completion(
            **OPTIONS, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=stream
        )
        answer = litellm.stream_chunk_builder(list(answer)) if stream else answer
        for call in answer.choices[0].message.tool_calls:
            check_call(call.function.name, call.function.arguments)


@check("structured output")
def json_schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": CITY_SCHEMA, "strict": True}}
    answer = litellm.completion(**OPTIONS, response_format=wanted).choices[0].message.content
    check_call("get_forecast", json.loads(answer))


@check("embeddings")
def embeddings() -> None:
    place = {"api_base": OPTIONS["api_base"], "api_key": "none"}
    data = litellm.embedding(model=OPTIONS["model"], input=TEXTS, encoding_format="float", **place).data
    check_vectors([item["embedding"] for item in data])


@check("embeddings")
def rerank() -> None:
    answer = litellm.rerank(
        model=f"hosted_vllm/{MODEL}", query=TEXTS[0], documents=TEXTS[:2], api_base=URL, api_key="none"
    )
    assert answer.results[0]["index"] == 0


BATCHES = {"custom_llm_provider": "openai", "api_base": f"{URL}/v1", "api_key": "none"}


def submit(count: int) -> str:
    file = litellm.create_file(file=("lines.jsonl", batch_lines(count)), purpose="batch", **BATCHES)
    batch = litellm.create_batch(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **BATCHES
    )
    assert batch.id in {one.id for one in litellm.list_batches(limit=1, **BATCHES).data}
    return str(batch.id)


@check("batch")
def batch() -> None:
    batch_id = submit(5)
    found = ended(lambda: litellm.retrieve_batch(batch_id=batch_id, **BATCHES))
    assert (found.status, found.request_counts.completed) == ("completed", 5), found
    check_answers(litellm.file_content(file_id=found.output_file_id, **BATCHES).text, 5)


@check("batch")
def batch_cancelled() -> None:
    batch_id = submit(400)
    litellm.cancel_batch(batch_id=batch_id, **BATCHES)
    assert ended(lambda: litellm.retrieve_batch(batch_id=batch_id, **BATCHES)).status == "cancelled"


run("litellm")
