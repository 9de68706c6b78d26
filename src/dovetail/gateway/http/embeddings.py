"""Embeddings: prompts whose answer is a vector, served in turn with everything else.

A vector is the model's state behind its final norm: of the last token, the mean over all, or an encoder's first.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.errors import InvalidRequest
from dovetail.gateway.generation_task import Origin
from dovetail.gateway.http.api import FAIL_FAST, ChatRequest, Message, ModelName, TokenId
from dovetail.gateway.http.bodies import StrictBody
from dovetail.gateway.http.endpoint import read_body, request_body, responses
from dovetail.gateway.http.options import check_options
from dovetail.gateway.http.respond import accounted, send_piece, until_disconnect
from dovetail.gateway.http.targets import targets_of
from dovetail.gateway.http.tiers import class_asked
from dovetail.gateway.models import ServedModel
from dovetail.gateway.service import Service
from dovetail.gateway.text.chat_prompt import chat_prompt, check_text_fits
from dovetail.gateway.text.translate import GenerationRequest, checked_tokens, token_limit
from dovetail.types import Request as EngineRequest
from dovetail.types import SamplingParams, Slo

MAX_INPUTS = 2048  # as OpenAI's
_BATCH = 32  # prompts that wait in the node's queue at the same time, so that one caller does not fill it
PIECE_NUMBERS = 8192  # of vectors: written in two milliseconds
POOLED_ERRORS = (400, 401, 404, 413, 415, 422, 429, 500, 503)

Pooling = Literal["last", "mean", "cls"]
Vectors = np.ndarray[Any, Any]
Pieces = Callable[[Vectors], Iterator[bytes]]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[TokenId], Field(min_length=1), FAIL_FAST]


class PooledBody(StrictBody):
    """What both have in common."""

    model_config = ConfigDict(extra="allow")

    model: ModelName = None
    pooling: Pooling | None = Field(default=None, description="the model's own unless given")
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    add_special_tokens: bool | None = None
    priority: int | None = Field(default=None, ge=0, le=2**31 - 1, description="above 0 = best effort")
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None

    @model_validator(mode="after")
    def _check_options(self) -> PooledBody:
        check_options(self.model_extra or {}, type(self).model_fields)
        return self


class EmbeddingRequest(PooledBody):
    input: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS), FAIL_FAST]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_INPUTS), FAIL_FAST]
        | None
    ) = Field(default=None, description="text, token ids, or several of either", union_mode="left_to_right")
    messages: Annotated[list[Message], FAIL_FAST] | None = Field(
        default=None, min_length=1, max_length=4096, description="a conversation instead of input"
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, description="the first so many, made a unit vector again")
    normalize: bool | None = Field(
        default=None, description="unit vectors; unless given, as the encoder has it, else on"
    )
    use_activation: bool | None = Field(default=None, description="vLLM's name for normalize")
    add_generation_prompt: bool | None = Field(default=None, description="of messages")
    continue_final_message: bool | None = Field(default=None, description="of messages")

    @model_validator(mode="after")
    def _check_together(self) -> EmbeddingRequest:
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("give either input or messages", param="input")
        return self

    @property
    def wants_unit(self) -> bool | None:
        return self.use_activation if self.normalize is None else self.normalize

    @property
    def inputs(self) -> list[Any]:
        given: Any = self.input
        if isinstance(given, str) or (isinstance(given, list) and isinstance(given[0], int)):
            return [given]
        return list(given)


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="numbers, or base64 of little-endian float32")


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def make_embedding_router(service: Service) -> APIRouter:
    endpoints = EmbeddingEndpoints(service)
    router = APIRouter()
    extra = {"requestBody": request_body(EmbeddingRequest)}
    answers = responses(EmbeddingList, POOLED_ERRORS)
    router.add_api_route("/v1/embeddings", endpoints.embed, methods=["POST"], responses=answers, openapi_extra=extra)
    return router


class EmbeddingEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def embed(self, request: Request) -> Response:
        """Vectors of texts."""
        self._service.check_admission()
        body = await read_body(EmbeddingRequest, request)
        model = await self._service.models.choose(body.model)
        if scores_pairs(model):
            raise InvalidRequest(f"model '{model.name}' compares two texts: ask /v1/rerank", param="model")
        await model.prepare()
        size = model.card.spec.hidden_size
        if body.dimensions is not None and body.dimensions > size:
            raise InvalidRequest(f"dimensions: this model's vectors have {size}", param="dimensions")
        job = await pooled_request(self._service, request, body, model, await prompts_of(body, model))
        return VectorResponse(self._service, job, lambda vectors: _embeddings(body, job, vectors))


async def pooled_request(
    service: Service, request: Request, body: PooledBody, model: ServedModel, prompts: Sequence[Sequence[int]]
) -> GenerationRequest:
    slo: Slo = targets_of(request, model)
    context = service.context_limit(model)
    most = _longest_text(model, context)
    pooling: Pooling | Literal["score"] = "score" if scores_pairs(model) else _pooling(body, model)
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, pooling=pooling)
    job_id = uuid.uuid4().hex
    requests = []
    for index, prompt in enumerate(prompts):
        if index % _BATCH == 0:
            await asyncio.sleep(0)  # others come in between
        kept = _truncated(prompt, body.truncate_prompt_tokens, most, model)
        if not 0 < len(kept) <= most:
            token_limit(len(kept), None, 1, context, "input")  # says what is wrong
        requests.append(
            EngineRequest(
                id=f"{job_id}-{index}",
                model=model.host,
                adapter=model.adapter_ref,
                prompt=checked_tokens(kept, model, "input"),
                sampling=sampling,
                slo=slo,
                service_class=class_asked(body.service_tier, body.priority, model.config.service_class),
            )
        )
    return GenerationRequest(job_id, model, tuple(requests))


async def prompts_of(body: EmbeddingRequest, model: ServedModel) -> list[list[int]]:
    if body.messages is not None:
        chat = ChatRequest(
            model=body.model,
            messages=body.messages,
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=body.continue_final_message,
        )
        return [(await chat_prompt(chat, model)).tokens]
    return [await encoded(item, body, model, "input") for item in body.inputs]


async def encoded(item: str | list[int], body: PooledBody, model: ServedModel, param: str) -> list[int]:
    if isinstance(item, list):
        return item
    if body.truncate_prompt_tokens is None:
        check_text_fits(item, model, param)
    if body.add_special_tokens is False:
        return await model.encode(item, add_special_tokens=False)
    return await model.encode_prompt(item)


def scores_pairs(model: ServedModel) -> bool:
    encoder = model.card.spec.encoder
    return encoder is not None and encoder.score is not None


def _longest_text(model: ServedModel, context: int) -> int:
    """A decoder's answer takes a place behind the text, an encoder's does not."""
    return context if model.card.spec.encoder is not None else context - 1


def _pooling(body: PooledBody, model: ServedModel) -> Pooling:
    encoder = model.card.spec.encoder
    wanted = body.pooling or model.config.pooling or ("last" if encoder is None else encoder.pooling)
    if wanted == "cls" and encoder is None:
        raise InvalidRequest("pooling: cls is for encoders; this model has last and mean", param="pooling")
    return wanted


def _truncated(prompt: Sequence[int], keep: int | None, most: int, model: ServedModel) -> Sequence[int]:
    """The beginning of a text says what it is about; a chat keeps its end instead. What an encoder's tokenizer put at
    the end of a text stays there."""
    if keep is None:
        return prompt
    if keep == 0:
        raise InvalidRequest("truncate_prompt_tokens is at least 1, or -1", param="truncate_prompt_tokens")
    count = most if keep == -1 else keep
    if model.card.spec.encoder is not None and 1 < count < len(prompt):
        return [*prompt[: count - 1], prompt[-1]]
    return prompt[:count]


class VectorResponse(Response):
    """Runs the job, a few prompts at a time, and answers with what becomes of its vectors, piece by piece: thousands of
    them are megabytes of numbers, which nobody else has to wait for."""

    def __init__(self, service: Service, job: GenerationRequest, pieces: Pieces, size: int | None = None) -> None:
        super().__init__()
        self._size = size or job.model.card.spec.hidden_size  # numbers of a vector
        self._service = service
        self._job = job
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with accounted(scope, self._job) as taken:
            vectors = await until_disconnect(receive, self._vectors(taken.job, taken.origin))
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in self._pieces(vectors):
            await send_piece(send, piece)
            await asyncio.sleep(0)
        await send_piece(send, b"", more=False)

    async def _vectors(self, job: GenerationRequest, origin: Origin) -> Vectors:
        requests = job.requests
        found = np.empty((len(requests), self._size), dtype=np.float32)
        for first in range(0, len(requests), _BATCH):
            part = replace(job, requests=requests[first : first + _BATCH])
            async with aclosing(self._service.run(part, origin)) as deltas:
                async for delta in deltas:
                    assert delta.embedding is not None
                    found[first + delta.index] = np.frombuffer(delta.embedding, dtype=np.float32)
        return found


def unit(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    unit: Vectors = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return unit


def _embeddings(body: EmbeddingRequest, job: GenerationRequest, vectors: Vectors) -> Iterator[bytes]:
    """An EmbeddingList."""
    encoder = job.model.card.spec.encoder
    own = encoder is None or encoder.normalize
    normalize = own if body.wants_unit is None else body.wants_unit
    rest = EmbeddingList(data=[], model=job.model.name, usage=usage_of(job)).model_dump_json(exclude={"data"})
    yield rest[:-1].encode() + b',"data":['
    step = max(1, PIECE_NUMBERS // vectors.shape[1])
    for first in range(0, len(vectors), step):
        part = vectors[first : first + step, : body.dimensions]
        part = unit(part) if normalize else part
        data = [
            {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
            for index, vector in enumerate(part, start=first)
        ]
        yield (b"," if first else b"") + msgspec.json.encode(data)[1:-1]
    yield b"]}"


def _written(vector: Vectors, form: str | None) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def usage_of(job: GenerationRequest) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=job.num_prompt_tokens, total_tokens=job.num_prompt_tokens)
