"""Reranking and scoring: how near texts are to each other, by the cosines of their embeddings or by a cross-encoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from dovetail.errors import InvalidRequest
from dovetail.gateway.http.api import FAIL_FAST
from dovetail.gateway.http.embeddings import (
    MAX_INPUTS,
    PIECE_NUMBERS,
    POOLED_ERRORS,
    EmbeddingUsage,
    PooledBody,
    Text,
    VectorResponse,
    Vectors,
    encoded,
    pooled_request,
    scores_pairs,
    unit,
    usage_of,
)
from dovetail.gateway.http.endpoint import read_body, request_body, responses
from dovetail.gateway.models import ServedModel
from dovetail.gateway.service import Service
from dovetail.gateway.text.chat_prompt import check_text_fits
from dovetail.gateway.text.translate import GenerationRequest

Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS // 2), FAIL_FAST]
Write = Callable[[GenerationRequest, Vectors], Iterator[bytes]]  # an answer, of the score of each pair


class ScoringBody(PooledBody):
    use_activation: bool | None = Field(default=None, description="false: a cross-encoder's logit instead of 0 to 1")


class RerankDocument(BaseModel):
    model_config = ConfigDict(strict=True)

    text: Text


class RerankRequest(ScoringBody):
    query: Text
    documents: Annotated[list[Text | RerankDocument], FAIL_FAST] = Field(min_length=1, max_length=MAX_INPUTS - 1)
    top_n: int | None = Field(default=None, ge=0, description="0 = all")
    return_documents: bool | None = Field(default=None, description="on unless false")
    max_tokens_per_doc: int | None = Field(default=None, ge=0, description="of each document its beginning; 0 = all")

    @property
    def texts(self) -> list[str]:
        return [item if isinstance(item, str) else item.text for item in self.documents]


class ScoreRequest(ScoringBody):
    """Each query with the document at its place, or one query with all of them."""

    queries: Text | Texts = Field(validation_alias=AliasChoices("queries", "text_1", "data_1"))
    documents: Text | Texts = Field(validation_alias=AliasChoices("documents", "text_2", "data_2", "items"))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        documents = [self.documents] if isinstance(self.documents, str) else self.documents
        queries = [self.queries] if isinstance(self.queries, str) else self.queries
        return list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))

    @model_validator(mode="after")
    def _check_lengths(self) -> ScoreRequest:
        if isinstance(self.queries, list) and len(self.queries) > 1:
            count = 1 if isinstance(self.documents, str) else len(self.documents)
            if len(self.queries) != count:
                raise InvalidRequest(f"{len(self.queries)} queries, {count} documents", param="documents")
        return self


class RerankResult(BaseModel):
    index: int
    relevance_score: float = Field(description="cosine between query and document, or a cross-encoder's score, 0 to 1")
    document: RerankDocument | None = None


class Reranked(BaseModel):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


def make_scoring_router(service: Service) -> APIRouter:
    endpoints = ScoringEndpoints(service)
    router = APIRouter()
    for paths, handler, body, answer in (
        (("/v1/rerank", "/rerank", "/v2/rerank"), endpoints.rerank, RerankRequest, Reranked),
        (("/v1/score", "/score"), endpoints.score, ScoreRequest, ScoreList),
    ):
        extra, found = {"requestBody": request_body(body)}, responses(answer, POOLED_ERRORS)
        for path in paths:  # the first is ours, the others are where clients of other servers look
            shown = path == paths[0]
            router.add_api_route(
                path, handler, methods=["POST"], responses=found, openapi_extra=extra, include_in_schema=shown
            )
    return router


class ScoringEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def rerank(self, request: Request) -> Response:
        """Documents by how near they are to a query."""
        self._service.check_admission()
        body = await read_body(RerankRequest, request)
        model = await self._service.models.choose(body.model)
        await model.prepare()
        pairs = [(body.query, await _beginning(text, body.max_tokens_per_doc, model)) for text in body.texts]
        return await self._scored(request, body, model, pairs, lambda job, scores: _ranked(body, job, scores))

    async def score(self, request: Request) -> Response:
        """How near pairs of texts are."""
        self._service.check_admission()
        body = await read_body(ScoreRequest, request)
        model = await self._service.models.choose(body.model)
        await model.prepare()
        return await self._scored(request, body, model, body.pairs, _listed)

    async def _scored(
        self, request: Request, body: ScoringBody, model: ServedModel, pairs: Sequence[tuple[str, str]], write: Write
    ) -> Response:
        if scores_pairs(model):
            job = await pooled_request(
                self._service, request, body, model, [await _encoded_pair(*pair, body, model) for pair in pairs]
            )
            shown = _plain if body.use_activation is False else _sigmoid
            return VectorResponse(self._service, job, lambda scores: write(job, shown(scores[:, 0])), size=1)
        at = {text: index for index, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        job = await pooled_request(
            self._service, request, body, model, [await encoded(text, body, model, "documents") for text in at]
        )
        places = [(at[query], at[text]) for query, text in pairs]
        return VectorResponse(self._service, job, lambda vectors: write(job, _cosines(vectors, places)))


async def _beginning(text: str, num_tokens: int | None, model: ServedModel) -> str:
    if not num_tokens:
        return text
    tokens = await model.encode(text, add_special_tokens=False)
    return text if len(tokens) <= num_tokens else await model.decode(tokens[:num_tokens], skip_special_tokens=False)


async def _encoded_pair(query: str, text: str, body: PooledBody, model: ServedModel) -> list[int]:
    if body.truncate_prompt_tokens is None:
        check_text_fits(text, model, "documents")
    check_text_fits(query, model, "query")
    return await model.encode_pair(query, text)


def _cosines(vectors: Vectors, places: Sequence[tuple[int, int]]) -> Vectors:
    step = max(1, PIECE_NUMBERS // vectors.shape[1])
    units = np.concatenate([unit(vectors[at : at + step]) for at in range(0, len(vectors), step)])
    return np.array([units[one] @ units[other] for one, other in places])


def _sigmoid(scores: Vectors) -> Vectors:
    shares: Vectors = 1.0 / (1.0 + np.exp(-np.clip(scores.astype(np.float64), -700, 700)))
    return shares


def _plain(scores: Vectors) -> Vectors:
    return scores


def _ranked(body: RerankRequest, job: GenerationRequest, scores: Vectors) -> Iterator[bytes]:
    """A Reranked."""
    texts = body.texts
    order = np.argsort(-scores, kind="stable")[: body.top_n or None].tolist()
    with_text = body.return_documents is not False
    results = [
        RerankResult(
            index=index,
            relevance_score=float(scores[index]),
            document=RerankDocument(text=texts[index]) if with_text else None,
        )
        for index in order
    ]
    record = Reranked(id=f"rerank-{job.id}", model=job.model.name, usage=usage_of(job), results=results)
    yield record.model_dump_json(by_alias=True).encode()


def _listed(job: GenerationRequest, scores: Vectors) -> Iterator[bytes]:
    """A ScoreList."""
    data = [Score(index=index, score=float(score)) for index, score in enumerate(scores)]
    record = ScoreList(
        id=f"score-{job.id}", created=int(time.time()), model=job.model.name, data=data, usage=usage_of(job)
    )
    yield record.model_dump_json().encode()
