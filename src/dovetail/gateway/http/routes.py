"""The endpoints: a body in, a job or a record out. No state of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

import dovetail
from dovetail.errors import InvalidRequest
from dovetail.gateway.admin.settings import Settings
from dovetail.gateway.admin.status import server_status
from dovetail.gateway.http.answers import ReplyOptions
from dovetail.gateway.http.anthropic.endpoints import model_list, model_record
from dovetail.gateway.http.api import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from dovetail.gateway.http.beam_search import run_beams
from dovetail.gateway.http.build_request import build_chat, build_completion
from dovetail.gateway.http.chat_reply import ChatReply
from dovetail.gateway.http.echoes import echoes_of
from dovetail.gateway.http.endpoint import Handler, Responses, json_response, read_body, request_body, responses
from dovetail.gateway.http.problems import VERSION_HEADER
from dovetail.gateway.http.replies import (
    ChatCompletion,
    Detokenized,
    ModelInfo,
    ModelList,
    ServerStatus,
    Status,
    TextCompletion,
    Tokenized,
    TokenizerInfo,
    Version,
)
from dovetail.gateway.http.respond import GenerationResponse, origin_of, until_disconnect
from dovetail.gateway.http.text_reply import TextForm, TextReply
from dovetail.gateway.models import ServedModel
from dovetail.gateway.service import Service
from dovetail.gateway.text.chat_prompt import chat_prompt
from dovetail.gateway.text.translate import GenerationRequest

_INLINE_TOKENS = 4096  # written as JSON in a millisecond

_JOB_ERRORS = (400, 401, 404, 413, 415, 422, 429, 500, 503)
_BODY_ERRORS = (400, 401, 404, 413, 415, 429, 503)
_PLAIN_TEXT: Responses = {
    200: {"description": "Prometheus text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def make_router(service: Service, settings: Settings) -> APIRouter:
    endpoints = Endpoints(service, settings)
    router = APIRouter()

    def post(path: str, handler: Handler, body: type[BaseModel], answers: Responses) -> None:
        extra = {"requestBody": request_body(body)}
        router.add_api_route(path, handler, methods=["POST"], responses=answers, openapi_extra=extra)

    def get(path: str, handler: Handler, answers: Responses) -> None:
        router.add_api_route(path, handler, methods=["GET"], responses=answers)
        router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)  # what probes ask

    post("/v1/chat/completions", endpoints.chat, ChatRequest, _streamed(ChatCompletion, _JOB_ERRORS))
    post("/v1/completions", endpoints.complete, CompletionRequest, _streamed(TextCompletion, _JOB_ERRORS))
    post("/tokenize", endpoints.tokenize, TokenizeRequest, responses(Tokenized, _BODY_ERRORS))
    post("/detokenize", endpoints.detokenize, DetokenizeRequest, responses(Detokenized, _BODY_ERRORS))
    get("/tokenizer_info", endpoints.tokenizer_info, responses(TokenizerInfo, (400, 401, 404)))
    get("/v1/models", endpoints.list_models, responses(ModelList, (401,)))
    get("/v1/models/{model:path}", endpoints.show_model, responses(ModelInfo, (401, 404)))
    get("/health", endpoints.health, {**responses(Status), 503: {"model": Status, "description": "not now"}})
    get("/live", endpoints.live, responses(Status))
    get("/version", endpoints.version, responses(Version))
    get("/api/ps", endpoints.ps, responses(ServerStatus, (401,)))
    get("/metrics", endpoints.metrics, _PLAIN_TEXT)
    return router


def _streamed(answer: type[BaseModel], errors: Sequence[int]) -> Responses:
    found = responses(answer, errors)
    found[200]["content"] = {"text/event-stream": {}}  # each event is a chunk, which OpenAPI 3.1 cannot say
    return found


class Endpoints:
    def __init__(self, service: Service, settings: Settings) -> None:
        self._service = service
        self._settings = settings

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        self._service.check_admission()
        body = await read_body(ChatRequest, request)
        model = await self._service.models.choose(body.model)
        job = await until_disconnect(request.receive, build_chat(self._service, request, body, model))
        reply = ChatReply(job, _now(), self._options(request, body, job), make_reader=job.make_reader, echo=_echo(body))
        return self._generation(body, job, reply)

    async def complete(self, request: Request) -> Response:
        """Go on with a text."""
        self._service.check_admission()
        body = await read_body(CompletionRequest, request)
        model = await self._service.models.choose(body.model)
        job = await until_disconnect(request.receive, build_completion(self._service, request, body, model))
        form = TextForm(
            await echoes_of(body, job), body.is_prompt_only, body.num_kept, is_ranked=bool(body.use_beam_search)
        )
        return self._generation(body, job, TextReply(job, _now(), self._options(request, body, job), form))

    def _options(self, request: Request, body: ChatRequest | CompletionRequest, job: GenerationRequest) -> ReplyOptions:
        return ReplyOptions.of(body, origin_of(request.scope).serves_as(job.service_class))

    def _generation(
        self, body: ChatRequest | CompletionRequest, job: GenerationRequest, reply: ChatReply | TextReply
    ) -> Response:
        run = partial(run_beams, self._service, body) if body.use_beam_search else None
        return GenerationResponse(
            self._service, job, reply, stream=bool(body.stream), include_usage=body.includes_usage, run=run
        )

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a text or a conversation."""
        body = await read_body(TokenizeRequest, request)
        model = await self._service.models.choose(body.model)
        self._check_tokenizable(body)
        return await until_disconnect(request.receive, self._tokenize(request, body, model))

    def _check_tokenizable(self, body: TokenizeRequest) -> None:
        limit = self._settings.config.server.max_tokenize_bytes
        if body.prompt is not None and len(body.prompt) > limit:
            raise InvalidRequest(f"the prompt has {len(body.prompt)} characters, more than {limit}", param="prompt")

    async def _tokenize(self, request: Request, body: TokenizeRequest, model: ServedModel) -> Response:
        await model.prepare()
        if body.messages is not None:
            tokens = (await chat_prompt(body.as_chat(), model)).tokens
        else:
            tokens = await _tokenize_text(body, model)
        _meter(request, len(tokens))
        context, to_text = model.card.spec.context_length, model.tokenizer.table.id_to_token

        def encode() -> bytes:  # as a `Tokenized`, which would look at each token first
            strings = [to_text(token) or "" for token in tokens] if body.return_token_strs else None
            answer = {"tokens": tokens, "count": len(tokens), "max_model_len": context, "token_strs": strings}
            return msgspec.json.encode(answer)

        long = len(tokens) > _INLINE_TOKENS
        text = await self._service.models.executors.parse.run(encode) if long else encode()
        return Response(text, media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Text of tokens."""
        body = await read_body(DetokenizeRequest, request)
        model = await self._service.models.choose(body.model)
        await model.prepare()
        _meter(request, len(body.tokens))
        text = await until_disconnect(request.receive, model.decode(body.tokens, skip_special_tokens=False))
        return json_response(Detokenized(prompt=text))

    async def tokenizer_info(self, request: Request) -> Response:
        """What is known of a model's tokenizer and template; ?model= unless there is one model only."""
        model = await self._service.models.choose(request.query_params.get("model"))
        await model.prepare()
        return json_response(_tokenizer_info(model))

    async def list_models(self, request: Request) -> Response:
        """Models on offer, loaded or not."""
        models = await asyncio.to_thread(self._service.models.all)
        names = [(name, model) for model in models for name in (model.name, *model.config.aliases)]
        if VERSION_HEADER in request.headers:
            return JSONResponse(model_list(names))
        return json_response(ModelList(data=[_model_info(name, model) for name, model in names]))

    async def show_model(self, model: str, request: Request) -> Response:
        """One model."""
        if VERSION_HEADER in request.headers:
            return JSONResponse(model_record(model, self._service.models.get(model)))
        return json_response(_model_info(model, self._service.models.get(model)))

    async def health(self, request: Request) -> Response:
        """Whether requests should be sent here."""
        status = "ok"
        if self._service.is_draining:
            status = "draining"
        elif not self._service.is_ready:
            status = "starting"
        elif self._service.trouble() is not None:
            status = "not leading"
        elif (why := self._service.why_unservable()) is not None:
            status = why
        elif not self._service.link.is_up():
            status = "a worker is down"
        is_admin = request.state.caller.is_admin
        # Stops nothing, and is for those who may read the configuration.
        detail = Status(status=status, config_problem=self._settings.problem if is_admin else None)
        return json_response(detail, 200 if status == "ok" else 503)

    async def live(self) -> Response:
        """Whether the process is alive."""
        return json_response(Status(status="ok"))

    async def version(self) -> Response:
        """Version of the server."""
        return json_response(Version(version=dovetail.__version__))

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus, in its text format or OpenMetrics."""
        metrics, vllm_names = self._service.metrics, self._settings.config.server.vllm_metrics
        metrics.observe_queued(self._service.cluster.controller.queued.by_model())
        found = metrics.render(request.headers.get("accept", ""), vllm_names=vllm_names)
        return Response(found.body, headers={"content-type": found.content_type, "vary": "accept"})

    async def ps(self) -> Response:
        """What runs where."""
        return json_response(server_status(self._service))


def _meter(request: Request, num_tokens: int) -> None:
    account = request.state.caller.account
    if account is not None:
        account.add_tokens(num_tokens, time.monotonic())


async def _tokenize_text(body: TokenizeRequest, model: ServedModel) -> list[int]:
    assert body.prompt is not None
    if body.add_special_tokens:
        return await model.encode_prompt(body.prompt)
    return await model.encode(body.prompt, add_special_tokens=False)


def _echo(body: ChatRequest) -> str:
    final = body.messages[-1]
    return final.text if body.echo and final.role == "assistant" else ""


def _tokenizer_info(model: ServedModel) -> TokenizerInfo:
    card, table = model.card, model.tokenizer.table
    info = TokenizerInfo(
        tokenizer_class=table.kind,
        vocab_size=table.vocab_size,
        model_max_length=card.spec.context_length,
        bos_token=card.bos_token,
        eos_token=card.eos_token,
        chat_template=card.chat_template,
        added_tokens_decoder={str(number): token for number, token in table.added.items()},
        knows_tools=card.chat_template is not None and model.template.knows_tools,
    )
    if card.chat_template is not None:
        info.tool_format = model.template.tool_format.name
    return info


def _model_info(name: str, model: ServedModel) -> ModelInfo:
    """Under its own name or an alias; `root` is the model that answers."""
    card = model.card
    adapter = model.adapter
    return ModelInfo(
        id=name,
        created=card.created if adapter is None else adapter.created,
        max_model_len=card.spec.context_length,
        root=model.name,
        parent=None if adapter is None else adapter.base,
        default_sampling_params={
            key: value for key, value in msgspec.structs.asdict(card.defaults).items() if value is not None
        },
    )


def _now() -> int:
    return int(time.time())
