"""The Responses API, embeddings and echoed prompts through the official client."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from server_fixture import Server, eventually

FUNCTION: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def model(smollm2_server: Server) -> str:
    return smollm2_server.models[0]


def respond(server: Server, model: str, **options: Any) -> Any:
    fields = {"model": model, "input": "Please name the capital of Germany.", "temperature": 0, "max_output_tokens": 24}
    return server.client().responses.create(**(fields | options))


def test_a_response_says_what_the_chat_would(smollm2_server: Server, model: str) -> None:
    response = respond(smollm2_server, model)
    assert "Berlin" in response.output_text
    assert response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    text = {"type": "input_text", "text": "Please name the capital of Germany."}
    parts = [{"type": "message", "role": "user", "content": [text]}]
    assert respond(smollm2_server, model, input=parts).output_text == response.output_text
    short = respond(smollm2_server, model, max_output_tokens=2)
    assert short.status == "incomplete"
    assert short.incomplete_details.reason == "max_output_tokens"


def test_a_streamed_response_is_the_whole_one_event_by_event(smollm2_server: Server, model: str) -> None:
    whole = respond(smollm2_server, model)
    events = list(respond(smollm2_server, model, stream=True))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == whole.output_text
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_a_conversation_is_remembered_or_not_as_the_client_says(smollm2_server: Server, model: str) -> None:
    client = smollm2_server.client()
    first = respond(smollm2_server, model, input="My name is Ada. Remember it.", instructions="Be brief.")
    second = respond(smollm2_server, model, input="What is my name?", previous_response_id=first.id)
    told = [
        {"role": "user", "content": "My name is Ada. Remember it."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "What is my name?"},
    ]
    assert second.output_text == respond(smollm2_server, model, input=told).output_text  # instructions are not kept
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert client.responses.input_items.list(first.id).data
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    forgotten = respond(smollm2_server, model, store=False)
    with pytest.raises(openai.BadRequestError) as caught:
        respond(smollm2_server, model, previous_response_id=forgotten.id)
    assert caught.value.param == "previous_response_id"


def test_a_function_is_called_and_its_result_is_taken(smollm2_server: Server, model: str) -> None:
    options: Any = {
        "tools": [FUNCTION],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 60,
    }
    question = [{"role": "user", "content": "What is the weather in Berlin?"}]
    whole = respond(smollm2_server, model, input=question, **options)
    (call,) = whole.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert set(json.loads(call.arguments)) == {"city"}
    events = list(respond(smollm2_server, model, input=question, stream=True, **options))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "17 degrees"}
    after = respond(smollm2_server, model, input=[*question, call.model_dump(), result])
    assert after.output_text
    remembered = respond(smollm2_server, model, input=[result], previous_response_id=whole.id)
    assert remembered.output_text == after.output_text


def test_formats_and_what_is_not_there(smollm2_server: Server, model: str) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"], "additionalProperties": False}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    assert 0 <= json.loads(respond(smollm2_server, model, text=wanted).output_text)["n"] <= 9
    for options, param in (
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            respond(smollm2_server, model, **options)
        assert caught.value.param == param


def test_a_response_is_made_in_the_background_and_can_be_ended(smollm2_server: Server, model: str) -> None:
    kept = smollm2_server.client().responses
    asked = respond(smollm2_server, model, background=True)
    assert (asked.status, asked.background) == ("queued", True)
    eventually(lambda: kept.retrieve(asked.id).status == "completed")
    assert kept.retrieve(asked.id).output_text == respond(smollm2_server, model).output_text
    again = respond(smollm2_server, model, input="Go on.", previous_response_id=asked.id, max_output_tokens=4)
    assert again.previous_response_id == asked.id
    long = respond(smollm2_server, model, background=True, max_output_tokens=2000, extra_body={"ignore_eos": True})
    eventually(lambda: kept.retrieve(long.id).status == "in_progress")
    assert kept.cancel(long.id).status == "cancelled"
    assert kept.retrieve(long.id).status == "cancelled"
    eventually(lambda: smollm2_server.node()["models"][0]["running"] == 0)
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        kept.cancel(respond(smollm2_server, model, max_output_tokens=1).id)


def test_embeddings_are_those_of_transformers(tiny_server: Server, tiny_folder: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_folder("qwen3"), dtype=torch.float32).eval()
    texts = ["a short text", "another one, which is longer"]
    for pooling in ("last", "mean"):
        answer = tiny_server.client().embeddings.create(  # the client asks for base64
            model="qwen3", input=texts, extra_body={"pooling": pooling}
        )
        assert answer.usage.prompt_tokens == sum(len(text) for text in texts)
        for text, item in zip(texts, answer.data, strict=True):
            with torch.no_grad():
                output = reference(torch.tensor([list(text.encode())]), output_hidden_states=True)
            states = output.hidden_states[-1][0]
            wanted = torch.nn.functional.normalize(states[-1] if pooling == "last" else states.mean(dim=0), dim=0)
            assert np.abs(np.array(item.embedding) - wanted.numpy()).max() < 1e-4


def test_an_echoed_prompt_has_the_log_probabilities_of_transformers(
    tiny_server: Server, tiny_folder: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32).eval()
    text = "what it thought of this"
    answer = tiny_server.client().completions.create(model="llama", prompt=text, echo=True, logprobs=2, max_tokens=0)
    with torch.no_grad():
        logprobs = torch.log_softmax(reference(torch.tensor([list(text.encode())])).logits[0].double(), dim=-1)
    (choice,) = answer.choices
    assert choice.text == text
    first, *rest = choice.logprobs.token_logprobs
    assert first is None
    wanted = [float(logprobs[at, byte]) for at, byte in enumerate(text.encode()[1:])]
    assert rest == pytest.approx(wanted, abs=1e-4)
