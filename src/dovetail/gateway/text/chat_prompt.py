"""A conversation as a prompt: messages in the form that templates know, rendered, tokenised.

A template that knows no tools is told of them in a message, so that they are never dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ContextTooLong, InvalidRequest
from dovetail.gateway.http.api import ChatRequest, CompletionRequest, Message
from dovetail.gateway.models import ServedModel
from dovetail.gateway.text.templates import templates
from dovetail.gateway.text.tools.prompt import told_in_system, told_in_user, tools_as_text, without_tool_roles
from dovetail.gateway.text.tools.schema import Wanted, wanted_tools

_MANY = 64  # messages: fewer are read faster than a thread takes to start on them


@dataclass(frozen=True)
class ChatPrompt:
    text: str
    tokens: list[int]


async def chat_prompt(body: ChatRequest, model: ServedModel) -> ChatPrompt:
    model.require_text()
    await model.prepare()
    wanted = wanted_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    text = await _render(body, model, wanted)
    text = bounded_text(text, body, model, "messages")
    # The template writes special tokens itself.
    return ChatPrompt(text, await model.encode(text, add_special_tokens=bool(body.add_special_tokens)))


def bounded_text(text: str, body: ChatRequest | CompletionRequest, model: ServedModel, param: str) -> str:
    """No more than could fit: of a prompt that is cut to the context the part that may stay, else all or an error."""
    if body.truncate_prompt_tokens is None:
        check_text_fits(text, model, param)
        return text
    most = model.card.spec.context_length * model.tokenizer.table.max_token_chars
    return text[:most] if body.truncation_side == "right" else text[-most:]


def check_text_fits(text: str, model: ServedModel, param: str) -> None:
    """Refuse what cannot fit before spending seconds on tokenising it."""
    limit = model.card.spec.context_length
    if len(text) > limit * model.tokenizer.table.max_token_chars:
        raise ContextTooLong(
            f"this model's context is {limit} tokens; the prompt has {len(text)} characters, more than that can hold",
            param=param,
        )


async def _render(body: ChatRequest, model: ServedModel, wanted: Wanted | None) -> str:
    template = model.template
    if len(body.messages) > _MANY:
        messages = await model.executors.parse.run(lambda: template_messages(body.messages))
    else:
        messages = template_messages(body.messages)
    if template.is_harmony:
        messages = [_with_thinking(message) for message in messages]
    if template.knows_tools:
        tools = [tool.model_dump(exclude_unset=True) for tool in wanted.shown] if wanted is not None else None
        return await _render_messages(body, model, messages, tools)
    if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        messages = without_tool_roles(messages, template.tool_format)
    if wanted is None:
        return await _render_messages(body, model, messages, None)
    told = tools_as_text(wanted.shown, template.tool_format)
    try:
        return await _render_messages(body, model, told_in_system(messages, told), None)
    except InvalidRequest:  # some templates refuse a system message
        return await _render_messages(body, model, told_in_user(messages, told), None)


async def _render_messages(
    body: ChatRequest, model: ServedModel, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> str:
    return await templates.render(
        model.template.text,
        messages,
        tools=tools,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        extra=_template_options(body),
    )


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Thoughts under the name that the template of gpt-oss has for them. Beside a text it takes none."""
    thoughts = message.get("reasoning_content")
    return {**message, "thinking": thoughts} if thoughts and not message.get("content") else message


def _template_options(body: ChatRequest) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    if body.wants_thoughts is not None:
        options.setdefault("enable_thinking", body.wants_thoughts)
    if body.effort is not None:
        options.setdefault("reasoning_effort", body.effort)
        if body.effort == "none":
            options.setdefault("enable_thinking", False)
    return options


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [_template_message(message, position) for position, message in enumerate(messages)]


def _template_message(message: Message, position: int) -> dict[str, Any]:
    fields = message.model_dump(exclude_unset=True)
    if message.role == "developer":  # OpenAI's newer name for it, which no template knows
        fields["role"] = "system"
    if isinstance(message.content, list):
        fields["content"] = "\n".join(_text_parts(message, position))
    elif message.content is None and not message.tool_calls:
        fields["content"] = ""
    elif message.content is None:
        fields["content"] = None  # what a template makes of it is `chat`'s to know
    if "reasoning" in fields:  # as answers have it, too; templates look for the longer name
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    for call in fields.get("tool_calls") or ():
        _parse_arguments(call)
    return fields


def _text_parts(message: Message, position: int) -> list[str]:
    assert isinstance(message.content, list)
    for index, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                f"content parts of type '{part.type[:40]}' are not supported; this model reads text",
                param=f"messages[{position}].content[{index}]",
            )
    return [part.text or "" for part in message.content]


def _parse_arguments(call: dict[str, Any]) -> None:
    """OpenAI sends a call's arguments as JSON text, templates expect the object."""
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            return  # a model may have written it; the template shows it as it is
