"""Tools and thoughts through the official client, with random models (whatever they write under force is valid) and a
small real one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from server_fixture import Server, running_server
from tiny import CHAT_TEMPLATE, save_tiny
from tokenizers import AddedToken, Tokenizer

from dovetail.gateway.text.tools.harmony import MARKS

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
}
MAIL = {
    "type": "object",
    "properties": {
        "to": {"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 1, "maxItems": 2},
        "urgent": {"type": "boolean"},
    },
    "required": ["to", "urgent"],
    "$defs": {"person": {"type": "object", "properties": {"id": {"type": "integer", "maximum": 99, "minimum": 0}}}},
}
SCHEMAS: dict[str, Any] = {"get_weather": CITY, "send-mail": MAIL, "now": None}


def tool(name: str, **fields: Any) -> Any:
    function = {"name": name, "description": f"Use it for {name}.", "parameters": SCHEMAS[name], **fields}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


TOOLS = [tool(name) for name in SCHEMAS]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Berlin? Then write a mail to 7."}]


# A family that takes tools in its template and begins to think in its prompt.
THINKER = "{{ tools | tojson if tools }}" + CHAT_TEMPLATE.replace("<|assistant|>{%", "<|assistant|><think>\n{%")


CHANNELS = (
    "{{ tools | tojson if tools }}{% for message in messages %}<|start|>{{ message.role }}<|message|>"
    "{{ message.thinking or message.content }}<|end|>{% endfor %}<|start|>assistant{# <|channel|> #}"
)


def save_channels(folder: Path) -> None:
    save_tiny("llama", folder, seed=2, max_position_embeddings=4096)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = folder / "tokenizer_config.json"
    changed = {"chat_template": CHANNELS, "eos_token": "<|return|>"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | changed))
    ends = [tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Random models with room for tools in their contexts: one of a plain template, one that thinks, one that speaks in
    gpt-oss's channels."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("plain", "thinker")):
        save_tiny("llama", root / name, seed=seed, max_position_embeddings=4096)
    settings = root / "thinker" / "tokenizer_config.json"
    template = THINKER + "{# <tool_call> </think> #}"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": template}))
    save_channels(root / "channels")
    with running_server(
        root / "plain", root / "thinker", root / "channels", "--kv-cache", "64MiB", "--threads", "1"
    ) as running:
        yield running


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def check(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMAS[call.function.name] or {"type": "object", "maxProperties": 0})


def ask(server: Server, model: str, **options: Any) -> Any:
    fields = {"model": model, "messages": QUESTION, "tools": TOOLS, "temperature": 1.0, "seed": 1, "max_tokens": 200}
    return server.client().chat.completions.create(**(fields | options))


def test_a_hundred_of_a_hundred_forced_calls_parse_and_validate(server: Server) -> None:
    async def run() -> None:
        client = server.async_client()
        gate = asyncio.Semaphore(50)

        async def call(seed: int) -> list[str]:
            choice = "required" if seed % 2 else named(list(SCHEMAS)[seed // 2 % 3])
            async with gate:
                answer = await client.chat.completions.create(
                    model="plain",
                    messages=QUESTION,
                    tools=TOOLS,
                    tool_choice=choice,  # type: ignore[arg-type]
                    parallel_tool_calls=False,
                    seed=seed,
                    temperature=1.3,
                    max_tokens=400,
                )
            (only,) = answer.choices[0].message.tool_calls or ()
            assert answer.choices[0].finish_reason == "tool_calls"
            assert answer.choices[0].message.content is None
            assert choice == "required" or only.function.name == choice["function"]["name"]  # type: ignore[union-attr,index]
            check(only)
            return [only.function.name, only.function.arguments]  # type: ignore[union-attr]

        calls = await asyncio.gather(*(call(seed) for seed in range(100)))
        assert {name for name, _ in calls} == set(SCHEMAS)
        assert len({arguments for _, arguments in calls}) > 20

    asyncio.run(run())


def collect(chunks: Any) -> dict[str, Any]:
    """What a client puts together of a stream."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None, "pieces": 0}
    for chunk in chunks:
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            found["finish"] = choice.finish_reason or found["finish"]
            for delta in choice.delta.tool_calls or ():
                found["pieces"] += 1
                call = found["calls"].setdefault(delta.index, {"name": "", "arguments": "", "id": ""})
                call["id"] += delta.id or ""
                call["name"] += delta.function.name or ""
                call["arguments"] += delta.function.arguments or ""
    return found


@pytest.mark.parametrize("choice", ["required", "auto", "none", named("get_weather")], ids=str)
@pytest.mark.parametrize("model", ["plain", "thinker"])
@pytest.mark.parametrize("parallel", [True, False])
def test_a_streamed_answer_is_the_whole_one(server: Server, model: str, choice: Any, parallel: bool) -> None:
    options = {
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": 200 if choice in ("auto", "none") else 600,
    }
    if model == "thinker":
        options["extra_body"] = {"thinking_token_budget": 20}
    whole = ask(server, model, **options).choices[0]
    streamed = collect(ask(server, model, stream=True, **options))
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert [(call["name"], call["arguments"]) for call in streamed["calls"].values()] == calls
    assert streamed["content"] == (whole.message.content or "")
    assert streamed["finish"] == whole.finish_reason
    assert streamed["reasoning"] == (getattr(whole.message, "reasoning_content", None) or "")
    assert bool(streamed["reasoning"]) == (model == "thinker")
    if choice == "required" or isinstance(choice, dict):
        assert calls
        assert all(call["id"] for call in streamed["calls"].values())
        assert streamed["pieces"] > len(calls)  # arguments come while they are written
    if choice == "none":
        assert not calls


def test_a_model_whose_template_drops_tools_is_told_of_them_all_the_same(server: Server) -> None:
    without = ask(server, "plain", tool_choice="none", max_tokens=1).usage.prompt_tokens
    assert ask(server, "plain", max_tokens=1).usage.prompt_tokens > without + 500
    counted = server.post("/tokenize", {"model": "plain", "messages": QUESTION, "tools": TOOLS}).json()["count"]
    assert counted == ask(server, "plain", max_tokens=1).usage.prompt_tokens


def test_a_small_model_calls_what_it_must_and_goes_on_with_the_result(smollm2_server: Server) -> None:
    model = smollm2_server.models[0]
    first = ask(smollm2_server, model, tool_choice=named("get_weather"), temperature=0).choices[0].message
    (call,) = first.tool_calls
    check(call)
    assert "Berlin" in call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "17 degrees"}
    messages = [*QUESTION, first.model_dump(exclude_none=True), result]
    answer = ask(smollm2_server, model, messages=messages, tool_choice="none", max_tokens=8)
    assert answer.choices[0].message.content


@pytest.mark.parametrize("budget", [0, 7])
def test_thoughts_end_with_their_budget(server: Server, budget: int) -> None:
    options: Any = {"tools": None, "max_tokens": 40, "extra_body": {"thinking_token_budget": budget}}
    message = ask(server, "thinker", **options).choices[0].message
    assert len((getattr(message, "reasoning_content", None) or "").encode()) <= budget * 3  # U+FFFD has three bytes
    assert message.content
    options["extra_body"]["include_reasoning"] = False
    assert not hasattr(ask(server, "thinker", **options).choices[0].message, "reasoning_content")


def test_a_format_is_the_answers_and_thoughts_before_it_are_free(server: Server) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    message = (
        ask(server, "thinker", tools=None, response_format=wanted, extra_body={"thinking_token_budget": 9})
        .choices[0]
        .message
    )
    assert message.reasoning_content
    assert json.loads(message.content)["ok"] in (True, False)


def test_calls_and_answers_come_out_of_channels_whole_and_streamed(server: Server) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    thoughts = set()
    for seed in range(4):
        shared: Any = {"seed": seed, "max_tokens": 600, "extra_body": {"thinking_token_budget": 30}}
        for options in (
            {"tool_choice": "required", "parallel_tool_calls": False, **shared},
            {"tools": None, "response_format": wanted, **shared},
        ):
            whole = ask(server, "channels", **options).choices[0]
            streamed = collect(ask(server, "channels", stream=True, **options))
            calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
            assert [(call["name"], call["arguments"]) for call in streamed["calls"].values()] == calls
            assert (streamed["content"] or None, streamed["finish"]) == (whole.message.content, whole.finish_reason)
            assert streamed["reasoning"] == (getattr(whole.message, "reasoning_content", None) or "")
            assert "<|" not in streamed["content"] + streamed["reasoning"]
            thoughts.add(bool(streamed["reasoning"]))
            if "response_format" in options:
                assert json.loads(whole.message.content)["ok"] in (True, False)
            else:
                assert whole.finish_reason == "tool_calls"
                for call in whole.message.tool_calls:
                    check(call)
    assert True in thoughts


def test_a_format_and_tools_together_give_one_or_the_other(server: Server) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    for seed in range(4):
        message = ask(server, "plain", response_format=wanted, seed=seed, max_tokens=900).choices[0].message
        if message.tool_calls:
            for call in message.tool_calls:
                check(call)
        else:
            jsonschema.validate(json.loads(message.content), schema)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [tool("now"), tool("now")]}, "tools"),
        ({"tool_choice": named("nobody")}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"guided_regex": "a"}}, "guided_regex"),
        ({"extra_body": {"thinking_token_budget": 5}}, "thinking_token_budget"),
    ],
)
def test_tools_that_make_no_sense_are_a_400(server: Server, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, "plain", **options)
    assert caught.value.param == param


def test_a_schema_that_cannot_be_held_is_followed_as_far_as_it_can_be(server: Server) -> None:
    number = {"type": "integer", "maximum": 9, "minimum": 0, "not": {"const": 3}}
    function: dict[str, Any] = {"name": "f", "parameters": {"properties": {"at": number}, "required": ["at"]}}
    options: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    message = ask(server, "plain", tools=[{"type": "function", "function": function}], **options).choices[0].message
    assert 0 <= json.loads(message.tool_calls[0].function.arguments)["at"] <= 9
    function["strict"] = True
    with pytest.raises(openai.UnprocessableEntityError, match="tools"):
        ask(server, "plain", tools=[{"type": "function", "function": function}], **options)
