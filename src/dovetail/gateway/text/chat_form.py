"""The form of one chat: its prompt, what its answer is held to, and how that answer is read.

Brings together what the client wants (tools, a format, a budget for thoughts) and what the model's template does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from dovetail.errors import InvalidRequest
from dovetail.gateway.http.api import ChatRequest
from dovetail.gateway.models import ServedModel
from dovetail.gateway.text.chat import TemplateFacts
from dovetail.gateway.text.chat_prompt import chat_prompt
from dovetail.gateway.text.constraints import Constraint, constraint_of
from dovetail.gateway.text.grammar_trials import grammar_trials
from dovetail.gateway.text.reading import MakeReader, Parts, PlainReader, Reader
from dovetail.gateway.text.reasoning import ThinkingReader, ThinkMarks
from dovetail.gateway.text.tools import harmony
from dovetail.gateway.text.tools.formats import ToolFormat
from dovetail.gateway.text.tools.grammar import COMPACT, CallGrammar, Mark, escaped, marked_text
from dovetail.gateway.text.tools.schema import Wanted, wanted_tools
from dovetail.types import Grammar, ThinkingLimit

_ANSWERS = {"json_object": '{"type": "object"}'}


@dataclass(frozen=True)
class ChatForm:
    """Also of plain completions, which have prompts and perhaps a constraint."""

    prompts: Sequence[Sequence[int]]
    constraint: Constraint | None = None
    make_reader: MakeReader = PlainReader
    shown_tokens: frozenset[int] = field(default_factory=frozenset)  # special ones that the reader has to see
    thinking: ThinkingLimit | None = None


async def chat_form(body: ChatRequest, model: ServedModel) -> ChatForm:
    wanted = wanted_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    prompt = await chat_prompt(body, model)
    marks = model.template.think_marks
    is_open = marks is not None and prompt.text.rstrip().endswith(marks.opening)
    shape = _Shape(body, model, wanted, marks if is_open else None)
    make_reader = partial(_reader, model.template, is_open, model.template.tool_format if wanted else None, body)
    markers = (
        *(model.template.tool_format.markers if wanted else ()),
        *((marks.opening, marks.closing) if marks else ()),
        *(harmony.MARKS if model.template.is_harmony else ()),
    )
    return ChatForm(
        prompts=[prompt.tokens],
        constraint=await shape.constraint(),
        make_reader=make_reader,
        shown_tokens=frozenset(token for text in markers if (token := _special(model, text)) is not None),
        thinking=await _thinking_limit(body, model, marks, is_open=is_open),
    )


def _reader(template: TemplateFacts, is_open: bool, format: ToolFormat | None, body: ChatRequest) -> Reader:
    reader: Reader
    if template.is_harmony:
        reader = harmony.HarmonyReader(reads_calls=format is not None)
    else:
        reader = format.reader() if format is not None else PlainReader()
        if template.think_marks is None:
            return reader
        reader = ThinkingReader(template.think_marks, reader, is_open=is_open)
    return reader if body.shows_thoughts else _WithoutReasoning(reader)


class _WithoutReasoning:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def feed(self, text: str) -> Parts:
        return _silent(self._reader.feed(text))

    def flush(self) -> Parts:
        return _silent(self._reader.flush())


def _silent(parts: Parts) -> Parts:
    parts.reasoning = ""
    return parts


async def _thinking_limit(
    body: ChatRequest, model: ServedModel, marks: ThinkMarks | None, *, is_open: bool
) -> ThinkingLimit | None:
    if body.thinking_token_budget is None:
        return None
    if marks is None:
        raise InvalidRequest(
            f"the model '{model.name}' does not think aloud, so that thinking_token_budget means nothing to it",
            param="thinking_token_budget",
        )
    opening, closing = map(tuple, await model.encode_all((marks.opening, marks.closing), as_prompts=False))
    opening = () if is_open else opening
    return ThinkingLimit(max(body.thinking_token_budget, len(opening)), closing, opening)


def _special(model: ServedModel, text: str) -> int | None:
    """The token of a text that is one special token."""
    token = model.tokenizer.table.token_to_id(text)
    return token if token is not None and token in model.vocabulary.special_ids else None


class _Shape:
    """What the answer's text must look like. `thoughts`: marks of thoughts that the prompt has begun."""

    def __init__(
        self, body: ChatRequest, model: ServedModel, wanted: Wanted | None, thoughts: ThinkMarks | None
    ) -> None:
        self._body = body
        self._model = model
        self._wanted = wanted
        self._thoughts = thoughts
        self._format = model.template.tool_format
        # An answer whose marks are no tokens of their own comes from no model that was trained on them.
        self._has_channels = model.template.is_harmony and self._mark(harmony.END) is not None
        self._reply = "final reply" if self._has_channels else "reply"

    async def constraint(self) -> Constraint | None:
        asked = constraint_of(self._body)
        wanted = self._wanted
        if wanted is None:
            return self._after_thoughts(asked)
        if wanted.is_forced:
            if asked is not None and asked[0] != "response_format":
                raise InvalidRequest(f"{asked[0]} and a forced tool_choice exclude each other", param=asked[0])
            return "tools", await self._lark(wanted, "calls")
        if asked is not None:
            answer = _as_rule(asked[1])
            return (
                asked
                if answer is None
                else ("response_format", await self._lark(wanted, f"calls | {self._reply}", answer))
            )
        if wanted.is_strict and self._format.form.openings and self._mark(self._format.form.openings[0]) is None:
            return "tools", await self._lark(wanted, "answer")
        return None

    async def _lark(self, wanted: Wanted, start: str, *rules: str) -> Grammar:
        """Schemas with keywords that cannot be held are followed as far as they can be, unless that was ruled out."""
        grammar = self._grammar(wanted, start, rules, lenient=False)
        is_strict = all(tool.function.strict for tool in wanted.callable)
        if is_strict or not await grammar_trials.problem(self._model.card, grammar):
            return grammar
        return self._grammar(wanted, start, rules, lenient=True)

    def _grammar(self, wanted: Wanted, start: str, rules: Sequence[str], *, lenient: bool) -> Grammar:
        calls = CallGrammar(self._format, wanted, self._mark, lenient=lenient)
        text = calls.free() if start == "answer" else calls.forced()
        return Grammar("lark", "\n".join([*self._start(start), text, *rules]))

    def _start(self, rule: str) -> list[str]:
        if self._has_channels:
            return _in_channels(rule, self._mark)
        if self._thoughts is None:
            return [f"start: {rule}"]
        mark = self._mark(self._thoughts.closing)
        thought = f"thought[lazy]: /(?s:.*){escaped(self._thoughts.closing)}/"
        return [f"start: thought WS ({rule})", thought if mark is None else f"thought: /(?s:.*)/ {mark}", r"WS: /\s*/"]

    def _after_thoughts(self, asked: Constraint | None) -> Constraint | None:
        """A format is the answer's; the thoughts before it are free."""
        if asked is None or (self._thoughts is None and not self._has_channels):
            return asked
        answer = _as_rule(asked[1])
        if answer is None:
            return asked
        return asked[0], Grammar("lark", "\n".join([*self._start(self._reply), answer]))

    def _mark(self, text: str) -> str | None:
        token = _special(self._model, text)
        return None if token is None else f"<[{token}]>"


def _in_channels(rule: str, mark: Mark) -> list[str]:
    """Thoughts first, if the model likes; then calls, or what it says in the channel for that."""
    opening, closing, final = (
        marked_text(text, harmony.MARKS, mark)
        for text in (harmony.THOUGHTS[0], f"{harmony.END}{harmony.START}assistant", harmony.FINAL)
    )
    return [f"start: analysis? ({rule})", f"analysis: {opening} /(?s:.*)/ {closing}", f"final: {final}"]


def _as_rule(grammar: Grammar) -> str | None:
    """The rule `reply`; None for grammars that have rules of their own."""
    if grammar.kind in ("json_object", "json_schema"):
        try:
            schema = json.loads(_ANSWERS.get(grammar.kind) or grammar.text)
        except (ValueError, RecursionError):
            return None  # whoever tries the grammar out says what is wrong with it
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": COMPACT}
        return f"reply: %json {json.dumps(schema)}"
    return None
