"""OpenAI's own client."""

from __future__ import annotations

import json

from common import (
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
    too_long_line,
)
from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
OPTIONS = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 60}


class Forecast(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


@check("chat")
def chat() -> None:
    assert WANTED in client.chat.completions.create(**OPTIONS).choices[0].message.content


@check("chat")
def responses() -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=40)
    assert WANTED in answer.output_text
    assert client.responses.retrieve(answer.id).output_text == answer.output_text


@check("stream")
def stream() -> None:
    whole = client.chat.completions.create(**OPTIONS).choices[0].message.content
    chunks = client.chat.completions.create(**OPTIONS, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


@check("stream")
def stream_helper() -> None:
    with client.chat.completions.stream(**OPTIONS) as events:
        kinds = {event.type for event in events}
        assert WANTED in events.get_final_completion().choices[0].message.content
    assert {"content.delta", "content.done"} <= kinds


@check("stream")
def responses_stream() -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=40) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == events.get_final_response().output_text


@check("tools")
def forced_tools() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_forecast"}}):
        answer = client.chat.completions.create(
            **OPTIONS, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        for call in answer.message.tool_calls:
            check_call(call.function.name, call.function.arguments)


@check("tools")
def auto_and_the_result_of_a_call() -> None:
    client.chat.completions.create(**OPTIONS, tools=[TOOL], tool_choice="auto")
    call = {"id": "c1", "type": "function", "function": {"name": "get_forecast", "arguments": '{"city": "Berlin"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    after = client.chat.completions.create(**OPTIONS | {"messages": [*OPTIONS["messages"], said, told]}, tools=[TOOL])
    assert after.choices[0].message.content


@check("tools")
def streamed_tools() -> None:
    name, arguments = "", ""
    for chunk in client.chat.completions.create(
        **OPTIONS, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    check_call(name, arguments)


@check("structured output")
def parse() -> None:
    answer = client.chat.completions.parse(**OPTIONS, response_format=Forecast).choices[0].message.parsed
    assert isinstance(answer, Forecast)


@check("structured output")
def responses_parse() -> None:
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Forecast, temperature=0)
    assert isinstance(answer.output_parsed, Forecast)


@check("structured output")
def json_mode() -> None:
    answer = client.chat.completions.create(**OPTIONS | {"max_tokens": 400}, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@check("embeddings")
def embeddings() -> None:
    for form in ("float", "base64", None):
        options = {} if form is None else {"encoding_format": form}
        data = client.embeddings.create(model=MODEL, input=TEXTS, **options).data
        if form != "base64":
            check_vectors([item.embedding for item in data])


def submit(content: bytes) -> str:
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    assert client.files.retrieve(file.id).bytes == len(content)
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "a check"}
    )
    assert batch.id in {one.id for one in client.batches.list(limit=1)}
    return batch.id


@check("batch")
def batch_with_outputs_and_errors() -> None:
    batch_id = submit(batch_lines(5) + too_long_line())
    batch = ended(lambda: client.batches.retrieve(batch_id))
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 6, 5, 1), batch
    check_answers(client.files.content(batch.output_file_id).text, 5)
    [wrong] = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert (wrong["custom_id"], wrong["response"]["status_code"]) == ("too-long", 400)
    for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(file).deleted


@check("batch")
def batch_cancelled() -> None:
    batch_id = submit(batch_lines(400))
    assert client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
    batch = ended(lambda: client.batches.retrieve(batch_id))
    assert batch.status == "cancelled", batch
    assert batch.request_counts.completed < 400


@check("batch")
def batch_with_a_wrong_line() -> None:
    batch_id = submit(batch_lines(2) + b"{}\n")
    batch = ended(lambda: client.batches.retrieve(batch_id))
    assert batch.status == "failed", batch
    assert [problem.line for problem in batch.errors.data] == [3]


@check("chat")
def service_tiers() -> None:
    for asked, had in (("auto", "default"), ("priority", "default"), ("flex", "flex")):
        assert client.chat.completions.create(**OPTIONS, service_tier=asked).service_tier == had


run("openai")
