"""Chat templates: messages to prompt text, by the model's own jinja2 template in a sandbox.

Follows the conventions of Hugging Face templates (globals, filters, white space), because the templates were written
against them. Compiled once per model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dovetail.errors import InvalidRequest
from dovetail.gateway.text.reasoning import think_marks
from dovetail.gateway.text.tools.formats import HERMES, PYTHONIC, format_in
from dovetail.gateway.text.tools.harmony import is_harmony
from dovetail.types import ModelCard

# A rendering may grow on its input (a template that repeats the tools), but not without end.
_MAX_RENDERED_CHARS = 32 * 1024 * 1024


class TemplateText(NamedTuple):
    """What rendering takes of a model."""

    name: str  # of the model
    text: str
    bos_token: str
    eos_token: str


class TemplateFacts:
    """What a template does, as far as reading it tells: nothing of it is run or compiled here, because compiling
    computes its constants. Every failure is an InvalidRequest that names it."""

    def __init__(self, card: ModelCard) -> None:
        if card.chat_template is None:
            raise InvalidRequest(
                f"the model '{card.name}' has no chat template; use /v1/completions, or `dovetail run --complete`",
                param="messages",
            )
        self.text = TemplateText(card.name, card.chat_template, card.bos_token or "", card.eos_token or "")
        try:
            parsed = _environment().parse(card.chat_template)
            takes_tools = any(name.name == "tools" and name.ctx == "load" for name in parsed.find_all(nodes.Name))
        except (jinja2.TemplateError, RecursionError) as error:
            raise _problem(card.name, error) from error
        found = format_in(card.chat_template)
        # A template that takes tools but has its model write calls in a way that is not known here is told as if it
        # took none: what comes back can be read then.
        self.knows_tools = found is not None and takes_tools
        own = PYTHONIC if card.spec.family.startswith("gemma") else HERMES
        self.tool_format = found if found is not None and self.knows_tools else own
        self.think_marks = think_marks(card.chat_template)
        self.is_harmony = is_harmony(card.chat_template)


class ChatTemplate:
    """The template of one model, to be rendered. Every failure is an InvalidRequest that names it."""

    def __init__(self, template: TemplateText) -> None:
        self._name = template.name
        self._tokens = {"bos_token": template.bos_token, "eos_token": template.eos_token}
        environment = _environment()
        try:
            self._template = environment.from_string(template.text)
            self._knows_null = _asks_for_null_content(environment.parse(template.text))
        except (jinja2.TemplateError, RecursionError) as error:
            raise _problem(self._name, error) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        if not self._knows_null:
            messages = [{**message, "content": message.get("content") or ""} for message in messages]
        context = {
            **(extra or {}),
            **self._tokens,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(context)
        return _cut_after_final_message(text, messages) if continue_final_message else text

    def _render(self, context: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(**context):
                pieces.append(piece)
                size += len(piece)
                if size > _MAX_RENDERED_CHARS:
                    raise InvalidRequest(f"the chat template of '{self._name}' renders without end", param="messages")
        # Templates index, add and call what the caller sent, so that every one of these is a bad message to them.
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _problem(self._name, error) from error
        except RecursionError as error:
            raise InvalidRequest("messages are nested too deeply for the chat template", param="messages") from error
        return "".join(pieces)


def _problem(name: str, error: Exception) -> InvalidRequest:
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if line else ""
    detail = " ".join(str(error).split()) or type(error).__name__
    return InvalidRequest(
        f"the chat template of '{name}' refuses these messages{where}: {detail[:500]}",
        param="messages",
        code="chat_template_error",
    )


def _asks_for_null_content(template: nodes.Template) -> bool:
    """Whether it tells messages without content (calls of tools) by `content is none`. Others put their text together
    from whatever is there, and would fail on a null or show it as "None"."""
    names = (test.node for test in template.find_all(nodes.Test) if test.name == "none")
    return any(_last_name(node) == "content" for node in names)


def _last_name(node: nodes.Expr) -> object:
    if isinstance(node, nodes.Getitem):
        return node.arg.value if isinstance(node.arg, nodes.Const) else None
    return getattr(node, "attr", getattr(node, "name", None))


def _cut_after_final_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Prompt that ends within the last message, so that the model goes on with it."""
    final = str(messages[-1].get("content") or "").strip()
    position = text.rfind(final)
    if not final or position < 0:
        raise InvalidRequest("the final message has no text to go on with", param="continue_final_message")
    return text[: position + len(final)]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which models have not been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's own text for training; when serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
