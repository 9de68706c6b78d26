"""Ollama's own client."""

from __future__ import annotations

import json

from common import CITY_SCHEMA, MODEL, QUESTION, TEXTS, TOOL, URL, WANTED, check, check_call, check_vectors, run
from ollama import Client

client = Client(host=URL, timeout=120)
OPTIONS = {"temperature": 0, "num_predict": 60}
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "options": OPTIONS}


@check("chat")
def chat_and_generate() -> None:
    answer = client.chat(**ASKED)
    assert WANTED in answer.message.content
    assert answer.eval_count > 0
    assert WANTED in client.generate(model=MODEL, prompt=QUESTION, options=OPTIONS).response


@check("chat")
def what_there_is() -> None:
    assert MODEL in [model.model for model in client.list().models]
    assert client.show(MODEL).modelinfo["general.architecture"] == "llama"
    assert MODEL in [model.model for model in client.ps().models]


@check("stream")
def stream() -> None:
    parts = list(client.chat(**ASKED, stream=True))
    assert "".join(part.message.content for part in parts) == client.chat(**ASKED).message.content
    assert parts[-1].done_reason == "stop"


@check("tools")
def tools() -> None:
    for stream in (False, True):
        answer = client.chat(**ASKED, tools=[TOOL], stream=stream)
        parts = list(answer) if stream else [answer]
        for part in parts:  # Ollama has no choice of tools: whether one is called is the model's to say
            for call in part.message.tool_calls or ():
                check_call(call.function.name, dict(call.function.arguments))
    call = {"function": {"name": "get_forecast", "arguments": {"city": "Berlin", "days": 2}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    told = {"role": "tool", "content": "rain", "tool_name": "get_forecast"}
    assert client.chat(**ASKED | {"messages": [*ASKED["messages"], said, told]}).message.content


@check("structured output")
def formats() -> None:
    check_call("get_forecast", client.chat(**ASKED, format=CITY_SCHEMA).message.content)
    longer = ASKED | {"options": OPTIONS | {"num_predict": 400}}
    assert isinstance(json.loads(client.chat(**longer, format="json").message.content), dict)


@check("embeddings")
def embed() -> None:
    check_vectors([list(vector) for vector in client.embed(model=MODEL, input=TEXTS).embeddings])


run("ollama")
