"""From a client's body to the worker's requests: prompts to tokens, options to SamplingParams, formats to a Grammar.

Everything here that can be wrong depends on the model: its vocabulary, template, context and recommended defaults.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from dovetail.errors import ContextTooLong, InvalidRequest
from dovetail.gateway.http.api import ChatRequest, CompletionRequest, GenerationBody
from dovetail.gateway.http.sampling import sampling_values
from dovetail.gateway.http.tiers import class_asked
from dovetail.gateway.models import ServedModel
from dovetail.gateway.text.chat_form import ChatForm, chat_form
from dovetail.gateway.text.chat_prompt import bounded_text, check_text_fits
from dovetail.gateway.text.constraints import checked_constraint, constraint_of
from dovetail.gateway.text.infill import infill_prompt
from dovetail.gateway.text.reading import MakeReader, PlainReader
from dovetail.types import Grammar, Request, SamplingParams, ServiceClass, Slo

Value = TypeVar("Value")
Body = TypeVar("Body", ChatRequest, CompletionRequest)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for plain completions; a chat may use the whole context
_MANY_PROMPTS = 8  # more are not tokenised on the event loop, however short they are
_MAX_ANSWERS = 256  # of one HTTP request
MAX_PROMPT_REPORTS = 1 << 18  # log-probabilities of prompts in one answer: some 100 MB while it is written


@dataclass(frozen=True)
class GenerationRequest:
    """One HTTP request: what the worker shall do, and how the text of it is cut."""

    id: str
    model: ServedModel
    requests: tuple[Request, ...]  # one per prompt
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    shown_tokens: frozenset[int] = frozenset()  # special ones that are part of the text all the same
    make_reader: MakeReader = PlainReader  # of each choice of a chat
    warnings: tuple[str, ...] = ()  # what was asked for and is done otherwise, for the answer and the log

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_answers(self) -> int:
        return sum(request.num_choices for request in self.requests)

    @property
    def service_class(self) -> ServiceClass:
        return self.requests[0].service_class

    @property
    def is_best_effort(self) -> bool:
        return self.service_class is ServiceClass.BEST_EFFORT


def with_tenant(job: GenerationRequest, tenant: str, *, traced: bool = False) -> GenerationRequest:
    """The job as one of this tenant: it finds prefixes of its own requests only, and of those with the same salt where
    a request names one. Without either all share."""
    requests = tuple(
        msgspec.structs.replace(request, cache_salt=_salt(tenant, request.cache_salt), traced=traced)
        for request in job.requests
    )
    return dataclasses.replace(job, requests=requests)


def with_class(job: GenerationRequest, service_class: ServiceClass) -> GenerationRequest:
    """The job as of this class; best effort has no targets."""
    if service_class is job.service_class and service_class is not ServiceClass.BEST_EFFORT:
        return job
    requests = tuple(
        msgspec.structs.replace(
            request,
            service_class=service_class,
            slo=Slo() if service_class is ServiceClass.BEST_EFFORT else request.slo,
        )
        for request in job.requests
    )
    return dataclasses.replace(job, requests=requests)


def _salt(tenant: str, salt: str) -> str:
    if not tenant and not salt:
        return ""
    return hashlib.sha256(json.dumps([tenant, salt]).encode()).hexdigest()[:32]


async def translate_chat(
    body: ChatRequest, model: ServedModel, job_id: str, context: int, slo: Slo, *, default_tokens: int
) -> GenerationRequest:
    form = await chat_form(body, model)
    # Agents ask for as much as the largest models have; a chat gets what is left of the context, as with llama.cpp,
    # Ollama and vLLM.
    clamped, notes = _clamped(body, form, context) if _clamps(body, model, default=True) else (body, ())
    job = await _generation_request(clamped, model, job_id, form, context, slo, default_tokens=default_tokens)
    return dataclasses.replace(job, warnings=(*job.warnings, *notes))


def _clamps(body: GenerationBody, model: ServedModel, *, default: bool) -> bool:
    return _first(body.clamp_max_tokens, model.config.clamp_max_tokens, default)


def _clamped(body: Body, form: ChatForm, context: int) -> tuple[Body, tuple[str, ...]]:
    """Of several prompts the longest decides."""
    num_prompt, keep = max(map(len, form.prompts)), body.truncate_prompt_tokens
    if keep is not None:  # of a prompt that is cut the answer leaves half of the context
        num_prompt = min(num_prompt, context // 2 if keep < 0 else keep)
    wanted, room = body.wanted_tokens or 0, context - num_prompt
    if wanted <= room or room < 1:
        return body, ()
    note = f"the answer was asked to have up to {wanted} tokens and has up to {room}: the context is {context}"
    name = "max_completion_tokens" if isinstance(body, ChatRequest) else "max_tokens"
    return body.model_copy(update={name: room}), (note,)


async def translate_completion(
    body: CompletionRequest, model: ServedModel, job_id: str, context: int, slo: Slo
) -> GenerationRequest:
    form = ChatForm(await completion_prompts(body, model), constraint_of(body))
    clamped, notes = _clamped(body, form, context) if _clamps(body, model, default=False) else (body, ())
    default = DEFAULT_COMPLETION_TOKENS
    job = await _generation_request(clamped, model, job_id, form, context, slo, default_tokens=default)
    return dataclasses.replace(job, warnings=(*job.warnings, *notes))


async def completion_prompts(body: CompletionRequest, model: ServedModel) -> list[list[int]]:
    model.require_text()
    await model.prepare()
    prompt: Sequence[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if isinstance(prompt[0], int):
        prompt = [prompt]
    if len(prompt) > _MANY_PROMPTS and isinstance(prompt[0], str) and not body.suffix:
        prompt = [bounded_text(text, body, model, "prompt") for text in prompt]
        return await model.encode_all(prompt, as_prompts=body.add_special_tokens is not False)
    return [await _completion_prompt(body, item, model) for item in prompt]


async def _completion_prompt(body: CompletionRequest, item: str | list[int], model: ServedModel) -> list[int]:
    if isinstance(item, str):
        item = bounded_text(item, body, model, "prompt")
    if not body.suffix:
        return item if isinstance(item, list) else await _encoded(body, item, model)
    check_text_fits(body.suffix, model, "suffix")
    before = item if isinstance(item, list) else await model.encode(item, add_special_tokens=False)
    after = await model.encode(body.suffix, add_special_tokens=False)
    return infill_prompt(model.tokenizer.table, before, after, model.name)


async def _encoded(body: CompletionRequest, text: str, model: ServedModel) -> list[int]:
    if body.add_special_tokens is False:
        return await model.encode(text, add_special_tokens=False)
    return await model.encode_prompt(text)


async def _generation_request(
    body: ChatRequest | CompletionRequest,
    model: ServedModel,
    job_id: str,
    form: ChatForm,
    context: int,
    slo: Slo,
    *,
    default_tokens: int,
) -> GenerationRequest:
    prompts: Sequence[Sequence[int]] = form.prompts
    if len(prompts) * body.num_choices > _MAX_ANSWERS:
        raise InvalidRequest(f"prompts times n may not exceed {_MAX_ANSWERS}", param="n")
    prompts = [_truncated(body, prompt, context) for prompt in prompts]
    _check_reports(body, prompts)
    param = "messages" if isinstance(body, ChatRequest) else "prompt"
    limits = [token_limit(len(p), body.wanted_tokens, default_tokens, context, param) for p in prompts]
    grammar = await checked_constraint(form.constraint, model.card)
    sampling = msgspec.structs.replace(
        sampling_params(body, model, body.wanted_logprobs, grammar),
        bad_words=await _bad_words(body.bad_words or (), model),
        thinking=form.thinking,
        prompt_logprobs=body.wanted_prompt_logprobs,
    )
    prediction = await _prediction(body, model)
    requests = tuple(
        Request(
            id=job_id if len(prompts) == 1 else f"{job_id}-{index}",
            model=model.host,
            adapter=model.adapter_ref,
            prompt=checked_tokens(prompt, model, param),
            sampling=_with_limit(sampling, limit),
            num_choices=body.num_choices,
            slo=slo,
            cache_salt=body.cache_salt or "",
            speculates=body.speculative is not False,
            prediction=prediction,
            service_class=class_asked(body.service_tier, body.priority, model.config.service_class),
        )
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    )
    skip_special = body.skip_special_tokens is not False
    return GenerationRequest(
        job_id,
        model,
        requests,
        body.stops,
        bool(body.include_stop_str_in_output),
        skip_special,
        form.shown_tokens,
        form.make_reader,
        body.warnings,
    )


def _check_reports(body: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]]) -> None:
    """What prompts are told of is written once per choice, and takes no computing that would bound it."""
    wanted = body.wanted_prompt_logprobs
    if wanted is None:
        return
    count = sum(map(len, prompts)) * body.num_choices * (1 + wanted)
    if count > MAX_PROMPT_REPORTS:
        param = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(
            f"prompts times n would have {count} log-probabilities, more than {MAX_PROMPT_REPORTS}", param=param
        )


def _truncated(body: ChatRequest | CompletionRequest, prompt: Sequence[int], context: int) -> Sequence[int]:
    """What is left of the prompt, where the caller would rather lose a part of it than be refused: its end, unless
    told."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == 0:
        raise InvalidRequest("truncate_prompt_tokens is at least 1, or -1", param="truncate_prompt_tokens")
    if keep == -1:
        keep = max(context - (body.wanted_tokens or 1), 1)
    return prompt[:keep] if body.truncation_side == "right" else prompt[-keep:]


def token_limit(num_prompt: int, wanted: int | None, default: int, context: int, param: str) -> int:
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


def checked_tokens(prompt: Sequence[int], model: ServedModel, param: str) -> tuple[int, ...]:
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
    """The client's values, then the model authors', then OpenAI's defaults. max_tokens is set per prompt, later, as is
    what takes text to be tokenised."""
    stop_ids = tuple(body.stop_token_ids or ())
    if not body.ignore_eos:
        stop_ids = tuple(dict.fromkeys((*stop_ids, *model.card.eos_token_ids)))
    return SamplingParams(
        max_tokens=0,
        # Negative seeds are fine with OpenAI; the worker counts from 0.
        seed=secrets.randbits(63) if body.seed is None else body.seed & (2**63 - 1),
        logit_bias=_logit_bias(body.logit_bias or {}, model),
        logprobs=logprobs,
        stop_token_ids=stop_ids,
        min_tokens=body.min_tokens or 0,
        grammar=grammar,
        **sampling_values(body, model.card.defaults),
        allowed_token_ids=_known_tokens("allowed_token_ids", body.allowed_token_ids, model),
        logprob_token_ids=_known_tokens("logprob_token_ids", body.logprob_token_ids, model),
    )


def _first(*values: Value | None) -> Value:
    for value in values:
        if value is not None:
            return value
    raise AssertionError("the last value is never None")


def _logit_bias(bias: Mapping[str, float], model: ServedModel) -> dict[int, float]:
    size = model.card.spec.vocab_size
    wrong = [key for key in bias if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < size)]
    if wrong:
        listed = ", ".join(f"'{key[:40]}'" for key in wrong[:8])
        raise InvalidRequest(
            f"logit_bias: {listed}: not among the {size} token ids of this model, which begin with 0",
            param="logit_bias",
        )
    return {int(key): value for key, value in bias.items()}


def _known_tokens(param: str, tokens: Sequence[int] | None, model: ServedModel) -> tuple[int, ...]:
    known = tuple(dict.fromkeys(tokens or ()))
    if known and max(known) >= model.card.spec.vocab_size:
        size = model.card.spec.vocab_size
        raise InvalidRequest(f"{param}: {max(known)} is not in the vocabulary of {size}", param=param)
    return known


async def _prediction(body: ChatRequest | CompletionRequest, model: ServedModel) -> tuple[int, ...]:
    if not isinstance(body, ChatRequest) or body.prediction is None:
        return ()
    text = body.prediction.text
    check_text_fits(text, model, "prediction")
    return tuple(await model.encode(text, add_special_tokens=False)) if text else ()


async def _bad_words(words: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the beginning of a text and after a space, which are different tokens."""
    if not words:
        return ()
    forms = [form for word in words for form in (word, " " + word.lstrip())]
    return tuple(dict.fromkeys(tuple(tokens) for tokens in await model.encode_all(forms, as_prompts=False) if tokens))
