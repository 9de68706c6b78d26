"""The job of a body, whichever API it came by: with the request's targets and this server's limits."""

from __future__ import annotations

import uuid

from starlette.requests import Request

from dovetail.gateway.api import ChatRequest, CompletionRequest
from dovetail.gateway.models import ServedModel
from dovetail.gateway.service import Service
from dovetail.gateway.targets import targets_of
from dovetail.gateway.translate import Job, chat_job, completion_job


async def asked_chat(service: Service, request: Request, body: ChatRequest, model: ServedModel) -> Job:
    context, default = service.context_limit(model), service.default_max_tokens(model)
    return await chat_job(body, model, uuid.uuid4().hex, context, targets_of(request, model), default_tokens=default)


async def asked_completion(service: Service, request: Request, body: CompletionRequest, model: ServedModel) -> Job:
    return await completion_job(body, model, uuid.uuid4().hex, service.context_limit(model), targets_of(request, model))
