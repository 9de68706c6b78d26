"""Calls of tools: read the same however their text is cut, and valid by construction where they are forced."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from gateway_builders import END, byte_level_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import InvalidRequest
from dovetail.gateway.http.api import ChatRequest
from dovetail.gateway.http.ollama.request import OllamaChat
from dovetail.gateway.text.constraints import constraint_of
from dovetail.gateway.text.reading import Parts, Reader
from dovetail.gateway.text.reasoning import ThinkingReader, ThinkMarks
from dovetail.gateway.text.tools import formats
from dovetail.gateway.text.tools.formats import (
    BARS,
    HARMONY,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    MISTRAL_ARGS,
    PYTHONIC,
    ToolFormat,
    format_in,
)
from dovetail.gateway.text.tools.grammar import CallGrammar, closed_schema
from dovetail.gateway.text.tools.harmony import MARKS, HarmonyReader
from dovetail.gateway.text.tools.prompt import told_in_system, told_in_user, tools_as_text, without_tool_roles
from dovetail.gateway.text.tools.readers import CallReader
from dovetail.gateway.text.tools.schema import NamedTool, Tool, Wanted, wanted_tools

FORMATS = {value.name: value for value in vars(formats).values() if isinstance(value, ToolFormat)}

WEATHER = {"city": "Berlin", "days": 3}
TIME = {"zone": "UTC"}


def read(reader: Reader, pieces: list[str]) -> tuple[str, str, list[tuple[str | None, str]]]:
    parts = Parts()
    for piece in pieces:
        parts.add(reader.feed(piece))
    parts.add(reader.flush())
    calls: dict[int, tuple[str | None, str]] = {}
    for call in parts.calls:
        name, arguments = calls.get(call.index, (call.name, ""))
        calls[call.index] = (name, arguments + call.arguments)
    return parts.reasoning, parts.content, list(calls.values())


def read_whole(format: ToolFormat, text: str) -> tuple[str, list[tuple[str | None, Any]]]:
    _, content, calls = read(format.reader(), [text])
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


W, T = ("weather", WEATHER), ("time", TIME)
CASES: list[tuple[ToolFormat, str, str, list[Any]]] = [
    (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Berlin", "days": 3}}\n</tool_call>', "", [W]),
    (
        HERMES,
        'Let me look.\n<tool_call>{"arguments": {"city": "Berlin", "days": 3}, "name": "weather"}</tool_call>\n'
        '<tool_call>\n{"name": "time", "arguments": "{\\"zone\\": \\"UTC\\"}"}\n</tool_call>\n',
        "Let me look.",
        [W, T],
    ),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    (HERMES, "a <tool_call> is a tag, {", "a <tool_call> is a tag, {", []),
    (HERMES, '<tool_call>{"city": 1}</tool_call> ', '<tool_call>{"city": 1}</tool_call> ', []),
    (HERMES, "plain text  \n", "plain text  \n", []),
    (LLAMA3_JSON, '{"name": "weather", "parameters": {"city": "Berlin", "days": 3}}', "", [W]),
    (
        LLAMA3_JSON,
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Berlin", "days": 3}}; '
        '{"type": "function", "name": "time", "parameters": {"zone": "UTC"}}',
        "",
        [W, T],
    ),
    (LLAMA3_JSON, '{"city": "Berlin"}', '{"city": "Berlin"}', []),
    (LLAMA3_JSON, ' It is {"name": 1}', ' It is {"name": 1}', []),
    (PYTHONIC, "[weather(city='Berlin', days=3), time(zone=\"UTC\")]", "", [W, T]),
    (PYTHONIC, "```tool_code\nweather(city='Berlin', days=3)\n```", "", [W]),
    (PYTHONIC, "[f(a=True, b=null, c=[1, {'x': 'it\\'s'}], d=-1.5)]", "",
     [("f", {"a": True, "b": None, "c": [1, {"x": "it's"}], "d": -1.5})]),
    (PYTHONIC, "[f(**{\"a\": \"\\u00e9)\"})]", "", [("f", {"a": "é)"})]),
    (PYTHONIC, "[1, 2, 3]", "[1, 2, 3]", []),
    (PYTHONIC, "I (think) so", "I (think) so", []),
    (PYTHONIC, "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Berlin", "days": 3}}, '
     '{"name": "time", "arguments": {"zone": "UTC"}, "id": "abc"}]', "", [W, T]),
    (MISTRAL, "See [TOOL_CALLS", "See [TOOL_CALLS", []),
    (MISTRAL_ARGS, '[TOOL_CALLS]weather[ARGS]{"city": "Berlin", "days": 3}'
     '[TOOL_CALLS]time[CALL_ID]a1[ARGS]{"zone": "UTC"}', "", [W, T]),
    (HARMONY, '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Berlin", "days": 3}'
     '<|call|>', "", [W]),
    (HARMONY, ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Berlin", "days": 3}<|end|>'
     '<|start|>assistant<|channel|>commentary to=functions.time<|constrain|>json<|message|>{"zone": "UTC"}', "",
     [W, T]),
    (HARMONY, "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant to=functions.now<|channel|>"
     "commentary<|message|><|call|>", "Let me look.", [("now", {})]),
    (HARMONY, "<|channel|>final<|message|>a < b <|x|>  \n<|return|>", "a < b <|x|>  \n", []),
    (HARMONY, "plain text <|en", "plain text <|en", []),
    (HARMONY, " to=me", " to=me", []),
    (HARMONY, "<|channel|>final", "", []),
    (BARS, '<|tool_call|>[{"name": "weather", "arguments": {"city": "Berlin", "days": 3}}]<|/tool_call|>', "", [W]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "content", "calls"), CASES)
def test_calls_of_each_family_are_read(format: ToolFormat, text: str, content: str, calls: list[Any]) -> None:
    assert read_whole(format, text) == (content, calls)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=12), st.booleans())
@settings(max_examples=300, deadline=None)
def test_how_the_text_is_cut_does_not_matter(case: Any, cuts: list[int], by_character: bool) -> None:
    format, text, _, _ = case
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = list(text) if by_character else [text[a:b] for a, b in pairwise(places)]
    assert read(format.reader(), pieces) == read(format.reader(), [text])


def test_arguments_are_told_while_they_are_written() -> None:
    reader = CallReader(HERMES.form)
    told = [reader.feed(char) for char in '<tool_call>\n{"name": "f", "arguments": {"a": "long text"}}\n</tool_call>']
    pieces = [call.arguments for parts in told for call in parts.calls]
    assert len(pieces) > 10
    assert "".join(pieces) == '{"a": "long text"}'


def test_a_call_that_is_cut_short_gives_what_there_is() -> None:
    assert read(CallReader(HERMES.form), ['<tool_call>\n{"name": "f", "arguments": {"a": 1'])[2] == [("f", '{"a": 1')]


@pytest.mark.parametrize("rest", ["\n<tool_call>", '\n<tool_call>\n{"name":', "\n<tool_c"])
def test_a_further_call_that_is_cut_short_before_its_name_is_no_text(rest: str) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert read(CallReader(HERMES.form), [text + rest]) == ("", "", [("f", "{}")])
    assert read(CallReader(HERMES.form), [rest])[1] + read(CallReader(HERMES.form), [rest])[0]  # alone it may be text


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_what_a_format_writes_it_reads(format: ToolFormat) -> None:
    assert read_whole(format, format.write_all([W, T])) == ("", [W, T])


# Grammars

PARAMETERS = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b{", "c\"d"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
        "deep": {"$ref": "#/$defs/deep"},
    },
    "required": ["count"],
    "$defs": {"deep": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}  # fmt: skip
TOOLS = tuple(
    Tool.model_validate({"type": "function", "function": function})
    for function in ({"name": "first-one", "parameters": PARAMETERS}, {"name": "second"})
)


def random_text(grammar: str, tokenizer_file: Path, seed: int) -> str:
    """What a model without any sense would write under this grammar."""
    tokenizer = llguidance.LLTokenizer(str(tokenizer_file), eos_token=END)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("lark", grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    rng, tokens = random.Random(seed), []
    while not matcher.is_stopped():
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        token = rng.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return byte_level_tokenizer().decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("parallel", [False, True])
def test_forced_calls_are_valid_by_construction(format: ToolFormat, parallel: bool, tokenizer_file: Path) -> None:
    wanted = Wanted(TOOLS, TOOLS, is_forced=True, parallel=parallel)
    grammar = "start: calls\n" + CallGrammar(format, wanted, lambda text: None).forced()
    seen = set()
    for seed in range(12):
        content, calls = read_whole(format, random_text(grammar, tokenizer_file, seed))
        assert content == ""
        assert len(calls) == 1 if not parallel else len(calls) >= 1
        for name, arguments in calls:
            seen.add(name)
            if name == "first-one":
                jsonschema.validate(arguments, PARAMETERS)
            else:
                assert arguments == {}
    assert seen == {"first-one", "second"}


def test_text_around_strict_calls_is_free_and_the_calls_are_not(tokenizer_file: Path) -> None:
    wanted = Wanted(TOOLS, TOOLS[:1])
    grammar = "start: answer\n" + CallGrammar(HERMES, wanted, lambda text: None).free()
    tokenizer = llguidance.LLTokenizer(str(tokenizer_file), eos_token=END)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from("lark", grammar), log_level=0)
    ids = byte_level_tokenizer().encode
    assert matcher.consume_tokens(ids('Well, <tool> <tool_call>\n{"name": "first-one", "arguments": {"count": ').ids)
    assert not matcher.validate_tokens(ids("x").ids)
    assert matcher.consume_tokens(ids('3}}\n</tool_call> and that is all').ids)  # fmt: skip
    assert matcher.is_accepting()
    assert matcher.validate_tokens(ids(" <tool_call>x").ids) < len(ids(" <tool_call>x").ids)


def test_closing_a_schema_narrows_it_only_where_that_is_safe() -> None:
    plain = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    closed = closed_schema(plain)
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    for open_schema in (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]},
        {"type": "object", "additionalProperties": {"type": "string"}},
    ):
        assert closed_schema(open_schema) == open_schema


# What a client asks for


def test_tool_choice_says_who_may_and_who_must_be_called() -> None:
    assert wanted_tools(TOOLS, "none", None) is None
    assert wanted_tools(None, "auto", None) is None
    auto = wanted_tools(TOOLS, None, None)
    assert auto is not None
    assert (auto.is_forced, auto.parallel, auto.callable) == (False, True, TOOLS)
    required = wanted_tools(TOOLS, "required", False)
    assert required is not None
    assert (required.is_forced, required.parallel) == (True, False)
    choice = NamedTool.model_validate({"type": "function", "function": {"name": "second"}})
    named = wanted_tools(TOOLS, choice, None)
    assert named is not None
    assert named.callable == TOOLS[1:]
    assert named.shown == TOOLS


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ((), "required"),
        (TOOLS[:1], NamedTool.model_validate({"type": "function", "function": {"name": "second"}})),
        (TOOLS + TOOLS, "auto"),
    ],
)
def test_tools_and_choices_that_do_not_fit_are_refused(tools: Any, choice: Any) -> None:
    with pytest.raises(InvalidRequest):
        wanted_tools(tools, choice, None)


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("…<tool_call></tool_call>…", HERMES),
        ("[TOOL_CALLS]", MISTRAL),
        ("[TOOL_CALLS] [ARGS]", MISTRAL_ARGS),
        ("<|python_tag|>", LLAMA3_JSON),
        ("[func_name1(params_name1=params_value1)]", PYTHONIC),
        ("<|tool_call|>", BARS),
        ("<|start|>assistant<|channel|>final<|message|>", HARMONY),
        ("{{ messages }}", None),
    ],
)
def test_a_template_names_the_form_of_its_calls(template: str, format: ToolFormat | None) -> None:
    assert format_in(template) is format


def test_a_model_that_knows_no_tools_is_told_in_words() -> None:
    told = tools_as_text(TOOLS, HERMES)
    assert '"name": "first-one"' in told
    assert "<tool_call>" in told
    user = {"role": "user", "content": "hi"}
    assert told_in_system([user], told) == [{"role": "system", "content": told}, user]
    assert told_in_system([{"role": "system", "content": "S"}, user], "T")[0]["content"] == "S\n\nT"
    assert told_in_user([{"role": "system", "content": "S"}, user], "T") == [
        {"role": "user", "content": "S\n\nT\n\nhi"}
    ]
    call = {"id": "1", "function": {"name": "time", "arguments": TIME}}
    plain = without_tool_roles(
        [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "12:00"},
            {"role": "tool", "content": "13:00"},
        ],
        HERMES,
    )
    assert [message["role"] for message in plain] == ["assistant", "user"]
    assert read_whole(HERMES, plain[0]["content"]) == ("", [T])
    assert plain[1]["content"].count("<tool_response>") == 2


# Thoughts

THINK = ThinkMarks("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nBerlin ", False, "hm", "Berlin "),
        ("hm </think> Berlin", True, "hm", "Berlin"),
        ("Berlin <think>", False, "", "Berlin <think>"),
        (" <th", False, "", " <th"),
        ("hm, that is ", True, "hm, that is", ""),
        ("<think></think>", False, "", ""),
        ("a < b </thin", True, "a < b </thin", ""),
    ],
)
def test_thoughts_are_apart_from_the_answer(text: str, is_open: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert read(ThinkingReader(THINK, is_open=is_open), pieces) == (reasoning, content, [])


def test_a_call_may_follow_thoughts() -> None:
    text = 'I need the time.</think>\n\n<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>'
    for pieces in ([text], list(text)):
        reader = ThinkingReader(THINK, CallReader(HERMES.form), is_open=True)
        assert read(reader, pieces) == ("I need the time.", "", [("time", '{"zone": "UTC"}')])


# Channels

CHANNELS = [
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi!<|return|>",
        "Hm.",
        "Hi!",
    ),
    ("<|channel|>analysis<|message|>Hm, ", "Hm, ", ""),
    (
        "<|channel|>analysis<|message|>One.<|end|>\n<|start|>assistant<|channel|>analysis to=python code<|message|>"
        "1 + 1<|end|><|start|>python to=assistant<|channel|>analysis<|message|>2<|end|><|start|>assistant<|channel|>"
        "commentary<|message|>Soon.<|end|><|start|>assistant<|channel|>final<|message|>2<|end|>",
        "One.\n1 + 1",
        "Soon.\n2",
    ),
    ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi!", "Hm.", "Hi!"),
    ("<|channel|>analysis<|end|><|start|>assistant<|channel|>final<|message|>Hi!", "", "Hi!"),
    ("<|message|>Hi!", "", "Hi!"),
    ('<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>', "", '{"a": 1}'),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), CHANNELS)
def test_channels_are_thoughts_and_what_is_said(text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert read(HarmonyReader(reads_calls=False), pieces) == (reasoning, content, [])


PIECES = ["assistant", "analysis", "commentary", "final", " to=functions.f", " to=", "json", "{}", "hm ", "\n", *MARKS]


@given(st.lists(st.sampled_from(PIECES), max_size=14), st.lists(st.integers(0, 200), max_size=12), st.booleans())
@settings(max_examples=200, deadline=None)
def test_channels_in_any_order_read_the_same_however_they_are_cut(
    words: list[str], cuts: list[int], calls: bool
) -> None:
    text = "".join(words)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    whole = read(HarmonyReader(reads_calls=calls), [text])
    assert read(HarmonyReader(reads_calls=calls), [text[a:b] for a, b in pairwise(places)]) == whole
    assert read(HarmonyReader(reads_calls=calls), list(text)) == whole


def test_objects_of_a_format_are_closed_unless_the_schema_says_otherwise() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner, "c": {**inner, "additionalProperties": True}}}
    wanted: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
    ]
    asked = {"messages": [{"role": "user", "content": "x"}]}
    bodies = [ChatRequest.model_validate_json(json.dumps(asked | change)) for change in wanted]
    bodies.append(OllamaChat.model_validate_json(json.dumps(asked | {"model": "m", "format": schema})).as_chat())
    for body in bodies:
        found = constraint_of(body)
        assert found is not None
        held = json.loads(found[1].text)
        assert held["additionalProperties"] is False
        assert held["properties"]["a"]["additionalProperties"] is False
        assert held["properties"]["c"]["additionalProperties"] is True
