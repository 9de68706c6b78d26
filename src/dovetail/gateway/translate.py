"""From a client's body to the worker's requests: prompts to tokens, options to SamplingParams, formats to a Grammar.

Everything here that can be wrong depends on the model: its vocabulary, template, context and recommended defaults.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import llguidance
import msgspec

from dovetail.errors import ContextTooLong, InvalidRequest, Unprocessable
from dovetail.gateway.api import ChatRequest, CompletionRequest, GenerationBody, Message
from dovetail.gateway.models import ServedModel
from dovetail.types import Grammar, Request, SamplingParams, ServiceClass, Slo

Value = TypeVar("Value")

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for plain completions; a chat may use the whole context
_MAX_ANSWERS = 256  # of one HTTP request
_MAX_GRAMMAR_CHARS = 256 * 1024
_MIN_TOP_P = 1e-6  # 0 is allowed and means the likeliest token alone


@dataclass(frozen=True)
class Job:
    """One HTTP request: what the worker shall do, and how the text of it is cut."""

    id: str
    model: ServedModel
    requests: tuple[Request, ...]  # one per prompt
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


async def chat_job(
    body: ChatRequest, model: ServedModel, job_id: str, context: int, slo: Slo, *, default_tokens: int
) -> Job:
    prompt = await chat_prompt(body, model)
    return await _job(body, model, job_id, [prompt], context, slo, default_tokens=default_tokens)


async def completion_job(body: CompletionRequest, model: ServedModel, job_id: str, context: int, slo: Slo) -> Job:
    prompts = await completion_prompts(body, model)
    return await _job(body, model, job_id, prompts, context, slo, default_tokens=DEFAULT_COMPLETION_TOKENS)


async def chat_prompt(body: ChatRequest, model: ServedModel) -> list[int]:
    await model.prepare()
    # Rendering is Python and may be long; in a thread the loop still gets its share.
    text = await asyncio.to_thread(
        model.template.render,
        template_messages(body.messages),
        tools=body.tools if body.tool_choice != "none" else None,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        extra=template_options(body),
    )
    check_text_fits(text, model, "messages")
    return await model.encode(text, add_special_tokens=bool(body.add_special_tokens))  # the template writes them


def template_options(body: ChatRequest) -> dict[str, Any]:
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            options.setdefault("enable_thinking", False)
    return options


async def completion_prompts(body: CompletionRequest, model: ServedModel) -> list[list[int]]:
    await model.prepare()
    prompt: Sequence[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if isinstance(prompt[0], int):
        prompt = [prompt]
    tokens = []
    for item in prompt:
        if isinstance(item, str):
            check_text_fits(item, model, "prompt")
            if body.add_special_tokens is False:
                item = await model.encode(item, add_special_tokens=False)
            else:
                item = await model.encode_prompt(item)
        tokens.append(item)
    return tokens


def check_text_fits(text: str, model: ServedModel, param: str) -> None:
    """Refuse what cannot fit before spending seconds on tokenising it."""
    limit = model.card.spec.context_length
    if len(text) > limit * model.words.max_token_chars:
        raise ContextTooLong(
            f"this model's context is {limit} tokens; the prompt has {len(text)} characters, more than that can hold",
            param=param,
        )


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


async def _job(
    body: ChatRequest | CompletionRequest,
    model: ServedModel,
    job_id: str,
    prompts: Sequence[Sequence[int]],
    context: int,
    slo: Slo,
    *,
    default_tokens: int,
) -> Job:
    if len(prompts) * body.num_choices > _MAX_ANSWERS:
        raise InvalidRequest(f"prompts times n may not exceed {_MAX_ANSWERS}", param="n")
    prompts = [_truncated(body, prompt, context) for prompt in prompts]
    param = "messages" if isinstance(body, ChatRequest) else "prompt"
    limits = [_token_limit(len(p), body.wanted_tokens, default_tokens, context, param) for p in prompts]
    grammar = await _checked_grammar(body)
    sampling = sampling_params(body, model, body.wanted_logprobs, grammar)
    requests = tuple(
        Request(
            id=job_id if len(prompts) == 1 else f"{job_id}-{index}",
            model=model.name,
            prompt=_checked_prompt(prompt, model, param),
            sampling=_with_limit(sampling, limit),
            num_choices=body.num_choices,
            slo=slo,
            service_class=ServiceClass.BEST_EFFORT if body.is_best_effort else model.config.service_class,
        )
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    )
    skip_special = body.skip_special_tokens is not False
    return Job(job_id, model, requests, body.stops, bool(body.include_stop_str_in_output), skip_special)


def _truncated(body: ChatRequest | CompletionRequest, prompt: Sequence[int], context: int) -> Sequence[int]:
    """The end of the prompt, where the caller would rather lose its beginning than be refused."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == 0:
        raise InvalidRequest("truncate_prompt_tokens is at least 1, or -1", param="truncate_prompt_tokens")
    if keep == -1:
        keep = max(context - (body.wanted_tokens or 1), 1)
    return prompt[-keep:]


def _token_limit(num_prompt: int, wanted: int | None, default: int, context: int, param: str) -> int:
    room = context - num_prompt
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty", param=param)
    if room < 1 or (wanted or 0) > room:
        answer = f" and {wanted} more were asked for" if wanted else ""
        raise ContextTooLong(
            f"this model's context is {context} tokens; the prompt has {num_prompt}{answer}",
            param=param if room < 1 or wanted is None else "max_tokens",
        )
    return wanted or min(default, room)


def _checked_prompt(prompt: Sequence[int], model: ServedModel, param: str) -> tuple[int, ...]:
    vocabulary = model.card.spec.vocab_size
    if max(prompt) >= vocabulary:
        raise InvalidRequest(f"token {max(prompt)} is not in the vocabulary of {vocabulary}", param=param)
    return tuple(prompt)


def _with_limit(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {sampling.min_tokens}, max_tokens is {max_tokens}", param="min_tokens")
    return msgspec.structs.replace(sampling, max_tokens=max_tokens)


def sampling_params(
    body: GenerationBody, model: ServedModel, logprobs: int | None, grammar: Grammar | None
) -> SamplingParams:
    """The client's values, then the model authors', then OpenAI's defaults. max_tokens is set per prompt, later."""
    defaults = model.card.defaults
    stop_ids = tuple(body.stop_token_ids or ())
    if not body.ignore_eos:
        stop_ids = tuple(dict.fromkeys((*stop_ids, *model.card.eos_token_ids)))
    return SamplingParams(
        max_tokens=0,
        # Negative seeds are fine with OpenAI; the worker counts from 0.
        seed=secrets.randbits(63) if body.seed is None else body.seed & (2**63 - 1),
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        top_k=max(_first(body.top_k, defaults.top_k, 0), 0),
        top_p=max(_first(body.top_p, defaults.top_p, 1.0), _MIN_TOP_P),
        min_p=body.min_p or 0.0,
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}, model),
        logprobs=logprobs,
        stop_token_ids=stop_ids,
        min_tokens=body.min_tokens or 0,
        grammar=grammar,
        allowed_token_ids=_allowed_tokens(body, model),
        bad_words=_bad_words(body.bad_words or (), model),
    )


def _first(*values: Value | None) -> Value:
    for value in values:
        if value is not None:
            return value
    raise AssertionError("the last value is never None")


def _logit_bias(bias: Mapping[str, float], model: ServedModel) -> dict[int, float]:
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < model.card.spec.vocab_size):
            raise InvalidRequest(f"logit_bias: '{key[:40]}' is not a token id of this model", param="logit_bias")
        result[int(key)] = value
    return result


def _allowed_tokens(body: GenerationBody, model: ServedModel) -> tuple[int, ...]:
    allowed = tuple(dict.fromkeys(body.allowed_token_ids or ()))
    if allowed and max(allowed) >= model.card.spec.vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids: {max(allowed)} is not in the vocabulary of {model.card.spec.vocab_size}",
            param="allowed_token_ids",
        )
    return allowed


def _bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the beginning of a text and after a space, which are different tokens."""
    forms = [form for word in words for form in (word, " " + word.lstrip())]
    found = model.tokenizer.encode_batch(forms, add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(encoding.ids) for encoding in found if encoding.ids))


def grammar_of(body: GenerationBody) -> tuple[str, Grammar] | None:
    """The constraint and the parameter that set it."""
    found = [*_response_format(body), *_guided(body), *_structured(body)]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequest(f"only one constraint on the text is possible, got {names}", param=found[1][0])
    return found[0] if found else None


def _response_format(body: GenerationBody) -> list[tuple[str, Grammar]]:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [("response_format", Grammar("json_object"))]
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequest("type json_schema needs json_schema.schema", param="response_format")
    return [("response_format", _json_schema(wanted.json_schema.schema_))]


def _guided(body: GenerationBody) -> list[tuple[str, Grammar]]:
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


def _structured(body: GenerationBody) -> list[tuple[str, Grammar]]:
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
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _choice(choices: Sequence[str]) -> Grammar:
    return Grammar("lark", "start: " + " | ".join(json.dumps(choice) for choice in choices))


async def _checked_grammar(body: GenerationBody) -> Grammar | None:
    found = grammar_of(body)
    if found is None:
        return None
    param, grammar = found
    if len(grammar.text) > _MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param} has more than {_MAX_GRAMMAR_CHARS} characters", param=param)
    problem = await asyncio.to_thread(_grammar_problem, grammar)
    if problem:
        raise Unprocessable(f"{param} does not compile: {problem}", param=param)
    return grammar


def _grammar_problem(grammar: Grammar) -> str:
    """Without a tokenizer this only parses, in about a millisecond; the worker compiles for its vocabulary."""
    if grammar.kind == "json_object":
        return ""
    try:
        source = llguidance.grammar_from(grammar.kind, grammar.text)
        problem = llguidance.LLMatcher.validate_grammar(source)
    except (ValueError, RecursionError) as error:
        problem = str(error)
    return " ".join(problem.split())[:500]
