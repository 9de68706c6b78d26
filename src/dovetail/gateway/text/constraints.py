"""Constraints on an answer's text, from whichever option a client names them by, checked before they go out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dovetail.errors import InvalidRequest, Unprocessable
from dovetail.gateway.http.api import GenerationBody
from dovetail.gateway.text.grammar_trials import grammar_trials
from dovetail.gateway.text.tools.grammar import closed_schema
from dovetail.types import Grammar, ModelCard

Constraint = tuple[str, Grammar]  # the parameter that set it, and what it is
_MAX_GRAMMAR_CHARS = 256 * 1024


def constraint_of(body: GenerationBody) -> Constraint | None:
    found = [*_response_format(body), *_guided(body), *_structured(body)]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequest(f"only one constraint on the text is possible, got {names}", param=found[1][0])
    return found[0] if found else None


def _response_format(body: GenerationBody) -> list[Constraint]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [("response_format", Grammar("json_object"))]
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequest("type json_schema needs json_schema.schema", param="response_format")
    return [("response_format", _json_schema(wanted.json_schema.schema_))]


def _guided(body: GenerationBody) -> list[Constraint]:
    found = []
    if body.guided_json is not None:
        found.append(("guided_json", _json_schema(body.guided_json)))
    if body.guided_regex is not None:
        found.append(("guided_regex", Grammar("regex", body.guided_regex)))
    if body.guided_grammar is not None:
        found.append(("guided_grammar", Grammar("lark", body.guided_grammar)))
    if body.guided_choice is not None:
        found.append(("guided_choice", _choice(body.guided_choice)))
    return found


def _structured(body: GenerationBody) -> list[Constraint]:
    wanted = body.structured_outputs
    if wanted is None:
        return []
    found = []
    if wanted.json_ is not None:
        found.append(_json_schema(wanted.json_))
    if wanted.regex is not None:
        found.append(Grammar("regex", wanted.regex))
    if wanted.choice is not None:
        found.append(_choice(wanted.choice))
    if wanted.grammar is not None:
        found.append(Grammar("lark", wanted.grammar))
    if wanted.json_object:
        found.append(Grammar("json_object"))
    return [("structured_outputs", grammar) for grammar in found]


def _json_schema(schema: dict[str, Any] | bool | str) -> Grammar:
    """Objects have the properties that they name and no others, unless the schema says so: a small model that may
    invent keys does, until its limit."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) and len(schema) <= _MAX_GRAMMAR_CHARS else schema
        return Grammar("json_schema", parsed if isinstance(parsed, str) else json.dumps(closed_schema(parsed)))
    except (ValueError, RecursionError):  # the trial says what is wrong with it
        return Grammar("json_schema", schema if isinstance(schema, str) else "{")


def _choice(choices: Sequence[str]) -> Grammar:
    return Grammar("lark", "start: " + " | ".join(json.dumps(choice) for choice in choices))


async def checked_constraint(constraint: Constraint | None, card: ModelCard) -> Grammar | None:
    if constraint is None:
        return None
    param, grammar = constraint
    if len(grammar.text) > _MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param} has more than {_MAX_GRAMMAR_CHARS} characters", param=param)
    problem = await grammar_trials.problem(card, grammar)
    if problem:
        raise Unprocessable(f"{param} does not compile: {problem}", param=param)
    return grammar
