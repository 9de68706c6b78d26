"""The generation request of an HTTP body, for every API: with the targets of its headers and this server's limits. A
request for more answers than fit is refused before any text is rendered or tokenised."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Sequence

from starlette.requests import Request

from dovetail.errors import Overloaded, QuotaExceeded
from dovetail.gateway.http.api import ChatRequest, CompletionRequest
from dovetail.gateway.http.respond import origin_of
from dovetail.gateway.http.targets import targets_of
from dovetail.gateway.models import ServedModel
from dovetail.gateway.service import Service
from dovetail.gateway.text.translate import GenerationRequest, translate_chat, translate_completion

REFUSED_S = 0.1  # a refusal comes after this: who asks again at once keeps no core busy with it


async def build_chat(
    service: Service, request: Request, body: ChatRequest, model: ServedModel, *, warnings: Sequence[str] = ()
) -> GenerationRequest:
    """`warnings`: of what was asked for in another API's words and is not in the body."""
    await _check_places(service, request, body.num_choices)
    return await further_chat(service, request, body, model, warnings=warnings)


async def further_chat(
    service: Service, request: Request, body: ChatRequest, model: ServedModel, *, warnings: Sequence[str] = ()
) -> GenerationRequest:
    """Of a request that has its place."""
    context, default = service.context_limit(model), service.default_max_tokens(model)
    targets = targets_of(request, model)
    job = await translate_chat(body, model, uuid.uuid4().hex, context, targets, default_tokens=default)
    return dataclasses.replace(job, warnings=(*warnings, *job.warnings))


async def build_completion(
    service: Service, request: Request, body: CompletionRequest, model: ServedModel
) -> GenerationRequest:
    await _check_places(service, request, body.num_prompts * body.num_choices)
    return await translate_completion(
        body, model, uuid.uuid4().hex, service.context_limit(model), targets_of(request, model)
    )


async def _check_places(service: Service, request: Request, count: int) -> None:
    origin = origin_of(request.scope)
    if origin.is_batch:
        service.check_batch_admission()
        return
    try:
        service.check_admission(count, origin.key, origin.max_unfinished)
    except (Overloaded, QuotaExceeded):
        await asyncio.sleep(REFUSED_S)
        raise
