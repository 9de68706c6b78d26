"""Tools for models whose chat template knows none: told in a system message, calls and results written as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.gateway.text.tools.formats import ToolFormat
from dovetail.gateway.text.tools.schema import Tool

_INTRODUCTION = "You can call functions. These are available, each with the JSON schema of its parameters:"
_EXAMPLE = "To call one, answer with exactly this form and nothing else, with your own function and arguments:"
_OTHERWISE = "If no function is needed, answer in plain text."


def tools_as_text(tools: Sequence[Tool], format: ToolFormat) -> str:
    functions = [json.dumps(tool.function.model_dump(exclude_none=True), ensure_ascii=False) for tool in tools]
    example = format.write_all([("function_name", {"argument": "value"})])
    return "\n".join([_INTRODUCTION, *functions, _EXAMPLE, example, _OTHERWISE])


def told_in_system(messages: Sequence[Mapping[str, Any]], told: str) -> list[dict[str, Any]]:
    """The conversation with this at the end of its system message."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{told}".strip()}
        return [first, *map(dict, messages[1:])]
    return [{"role": "system", "content": told}, *map(dict, messages)]


def told_in_user(messages: Sequence[Mapping[str, Any]], told: str) -> list[dict[str, Any]]:
    """The same for templates that refuse a system message: before what the user says first."""
    lead = [told]
    rest = [dict(message) for message in messages]
    if rest and rest[0]["role"] == "system":
        lead.insert(0, str(rest.pop(0).get("content") or ""))
    for message in rest:
        if message["role"] == "user":
            message["content"] = "\n\n".join([*filter(None, lead), str(message.get("content") or "")])
            break
    return rest


def without_tool_roles(messages: Sequence[Mapping[str, Any]], format: ToolFormat) -> list[dict[str, Any]]:
    """Calls as the assistant's text, results as the user's; results that follow each other in one message."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text, "is_result": True})
        else:
            plain.append(_with_calls_as_text(message, format))
    return [{key: value for key, value in message.items() if key != "is_result"} for message in plain]


def _with_calls_as_text(message: Mapping[str, Any], format: ToolFormat) -> dict[str, Any]:
    fields = dict(message)
    calls = fields.pop("tool_calls", None) or ()
    functions = [call["function"] for call in calls if isinstance(call.get("function"), dict)]
    written = [(str(function.get("name", "")), _arguments(function)) for function in functions]
    if written:
        fields["content"] = "\n".join(filter(None, [fields.get("content") or "", format.write_all(written)]))
    return fields


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    return arguments if isinstance(arguments, dict) else {}
