"""Ollama's paths under `/api`, beside our own there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

import dovetail
from dovetail.errors import InvalidRequest
from dovetail.gateway.admin.keys import OLLAMA_ABSENT
from dovetail.gateway.http.api import ChatRequest
from dovetail.gateway.http.build_request import build_chat, build_completion
from dovetail.gateway.http.embeddings import EmbeddingRequest, VectorResponse, Vectors, pooled_request, prompts_of, unit
from dovetail.gateway.http.endpoint import read_body
from dovetail.gateway.http.ollama.answer import Kind, OllamaShape, ended
from dovetail.gateway.http.ollama.request import OllamaBody, OllamaChat, OllamaEmbed, OllamaGenerate, OllamaShow
from dovetail.gateway.http.shaped import ShapedResponse
from dovetail.gateway.models import ServedModel
from dovetail.gateway.service import Service
from dovetail.gateway.text.translate import GenerationRequest
from dovetail.types import ModelCard

_INSTEAD = {
    "/api/copy": "give a model a second name with `aliases` in dovetail.yaml",
    "/api/delete": "`dovetail stop NAME --remove` takes it out of the server, `dovetail rm NAME` out of the store",
    "/api/push": "weights stay where they are",
}


def make_ollama_router(service: Service) -> APIRouter:
    endpoints = OllamaEndpoints(service)
    router = APIRouter()
    for path, handler in (
        ("/api/chat", endpoints.chat),
        ("/api/generate", endpoints.generate),
        ("/api/embed", endpoints.embed),
        ("/api/embeddings", endpoints.embed_one),
        ("/api/show", endpoints.show),
    ):  # documented by whose they are, so that our own document is about ours
        router.add_api_route(path, handler, methods=["POST"], include_in_schema=False)
    for path, look in (("/api/tags", endpoints.tags), ("/api/version", endpoints.version)):
        router.add_api_route(path, look, methods=["GET"], include_in_schema=False)
    for path in (*OLLAMA_ABSENT, "/api/blobs/{digest}"):
        methods = ["GET", "HEAD", "POST", "DELETE"]
        router.add_api_route(path, endpoints.absent, methods=methods, include_in_schema=False)
    return router


class OllamaEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        """Answer a conversation, as Ollama does."""
        self._service.check_admission()
        body = await read_body(OllamaChat, request)
        if not body.messages:
            return await self._load("chat", body.served_name)
        job = await self._chat_request(request, body, body.as_chat())
        return self._answer(job, "chat", body)

    async def generate(self, request: Request) -> Response:
        """Answer one prompt, as Ollama does."""
        self._service.check_admission()
        body = await read_body(OllamaGenerate, request)
        if not body.prompt:
            return await self._load("generate", body.served_name)
        ours = body.as_ours()
        if isinstance(ours, ChatRequest):
            job = await self._chat_request(request, body, ours)
        else:
            model = await self._service.models.choose(ours.model)
            job = await build_completion(self._service, request, ours, model)
        return self._answer(job, "generate", body)

    def _answer(self, job: GenerationRequest, kind: Kind, body: OllamaBody) -> Response:
        shape = OllamaShape(job, kind, with_logprobs=bool(body.logprobs))
        return ShapedResponse(self._service, job, shape, stream=body.stream is not False)

    async def absent(self, request: Request) -> Response:
        """What Ollama does for its own store."""
        path = request.url.path
        instead = _INSTEAD.get(path, "models are added with `dovetail add NAME SOURCE`")
        raise InvalidRequest(f"{path} is not possible here: {instead}", code="unsupported_path")

    async def _chat_request(self, request: Request, body: OllamaBody, chat: ChatRequest) -> GenerationRequest:
        model = await self._service.models.choose(chat.model)
        return await build_chat(self._service, request, chat, model, warnings=body.warnings())

    async def _load(self, kind: Kind, name: str) -> Response:
        """Nothing is asked: the model is to be there."""
        model = self._service.models.get(name)
        await self._service.preload([model.name])
        return JSONResponse(ended(kind, model.name, "load"))

    async def embed(self, request: Request) -> Response:
        """Vectors of texts, as Ollama gives them."""
        return await self._embed(request, await read_body(OllamaEmbed, request), is_one=False)

    async def embed_one(self, request: Request) -> Response:
        """The vector of one text, on Ollama's older path."""
        return await self._embed(request, await read_body(OllamaEmbed, request), is_one=True)

    async def _embed(self, request: Request, body: OllamaEmbed, *, is_one: bool) -> Response:
        self._service.check_admission()
        began_s = time.monotonic()
        model = await self._service.models.choose(body.model.removesuffix(":latest"))
        await model.prepare()
        texts = [body.prompt or ""] if is_one else body.input
        keep = None if body.truncate is False else -1
        asked = EmbeddingRequest(model=model.name, input=texts, truncate_prompt_tokens=keep)
        job = await pooled_request(self._service, request, asked, model, await prompts_of(asked, model))
        if is_one:  # the older path gives them as they come
            return VectorResponse(self._service, job, lambda found: iter([_json({"embedding": found[0].tolist()})]))
        return VectorResponse(self._service, job, lambda found: _vectors(body, job, found, began_s))

    async def show(self, request: Request) -> Response:
        """What is known of a model, as Ollama tells it."""
        body = await read_body(OllamaShow, request)
        model = self._service.models.get((body.model or body.name).removesuffix(":latest"))
        await model.prepare()
        return JSONResponse(_shown(model))

    async def tags(self) -> Response:
        """Models on offer, as Ollama lists them."""
        models = await asyncio.to_thread(self._service.models.all)
        return JSONResponse({"models": [_tag(model) for model in models]})

    async def version(self) -> Response:
        """Version of the server, where Ollama's clients ask for it."""
        return JSONResponse({"version": dovetail.__version__})


def _vectors(body: OllamaEmbed, job: GenerationRequest, found: Vectors, began_s: float) -> Iterator[bytes]:
    vectors = unit(found[:, : body.dimensions])
    duration = int((time.monotonic() - began_s) * 1e9)
    figures = {"total_duration": duration, "load_duration": 0, "prompt_eval_count": job.num_prompt_tokens}
    yield _json({"model": job.model.name, "embeddings": vectors.tolist(), **figures})


def _json(record: dict[str, Any]) -> bytes:
    return msgspec.json.encode(record)


def _tag(model: ServedModel) -> dict[str, Any]:
    card = model.card
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _moment(card),
        "size": card.size_bytes,
        "digest": card.tokenizer_digest,
        "details": _details(card),
    }


def _shown(model: ServedModel) -> dict[str, Any]:
    card, spec = model.card, model.card.spec
    facts = {
        "general.architecture": spec.family,
        "general.parameter_count": spec.num_parameters(),
        f"{spec.family}.context_length": spec.context_length,
        f"{spec.family}.embedding_length": spec.hidden_size,
        f"{spec.family}.block_count": spec.num_layers,
    }
    return {
        "modelfile": f"FROM {card.name}",
        "template": card.chat_template or "",
        "parameters": "",
        "modified_at": _moment(card),
        "details": _details(card),
        "model_info": facts,
        "capabilities": _capabilities(model),
    }


def _capabilities(model: ServedModel) -> list[str]:
    card = model.card
    if card.spec.encoder is not None:
        return ["embedding"]
    told = card.chat_template is not None
    thinks = told and model.template.think_marks is not None
    return ["completion", "embedding", *(["tools"] if told else []), *(["thinking"] if thinks else [])]


def _details(card: ModelCard) -> dict[str, Any]:
    billions = card.spec.num_parameters() / 1e9
    size = f"{billions:.1f}B" if billions >= 1 else f"{billions * 1e3:.0f}M"
    family = card.spec.family
    return {
        "parent_model": "",
        "format": "gguf" if card.layout == "gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": size,
        "quantization_level": card.dtype,
    }


def _moment(card: ModelCard) -> str:
    return datetime.fromtimestamp(card.created, UTC).isoformat()
