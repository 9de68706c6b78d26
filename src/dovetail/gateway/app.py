"""The HTTP application: middlewares, routes, errors in OpenAI's shape, and the OpenAPI document.

The boundary of the gateway process: the only place that catches everything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import dovetail
from dovetail.errors import EngineFailed, InvalidRequest, RequestError
from dovetail.gateway.admin.adapter_routes import LoadAdapter, UnloadAdapter, make_adapter_router
from dovetail.gateway.admin.admin import Admin
from dovetail.gateway.admin.api import AddModel, ChangeModel
from dovetail.gateway.admin.log_ring import LogRing
from dovetail.gateway.admin.node_routes import make_node_router
from dovetail.gateway.admin.routes import make_admin_router
from dovetail.gateway.admin.turn_history import TurnWatch
from dovetail.gateway.batches.batches_api import NewBatch, make_batches_router
from dovetail.gateway.batches.files_api import make_files_router
from dovetail.gateway.batches.messages_api import make_messages_router
from dovetail.gateway.batches.offer import Batches, upload_limit
from dovetail.gateway.console import make_console_router
from dovetail.gateway.http.anthropic.endpoints import make_anthropic_router
from dovetail.gateway.http.anthropic.request import CountTokensRequest, MessagesRequest
from dovetail.gateway.http.api import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from dovetail.gateway.http.embeddings import EmbeddingRequest, make_embedding_router
from dovetail.gateway.http.logs import (
    AuditLog,
    JsonLines,
    access_record,
    is_administration,
    is_generation,
    request_line,
)
from dovetail.gateway.http.middleware import Auth, BodyLimit, BodyMemory, RequestIds
from dovetail.gateway.http.ollama.endpoints import make_ollama_router
from dovetail.gateway.http.origins import OriginGate
from dovetail.gateway.http.problems import problem_response
from dovetail.gateway.http.responses.conversations import NewConversation, NewItems, NewMetadata
from dovetail.gateway.http.responses.endpoints import make_responses_router
from dovetail.gateway.http.responses.request import CompactRequest, ResponsesRequest
from dovetail.gateway.http.routes import make_router
from dovetail.gateway.http.scoring import RerankRequest, ScoreRequest, make_scoring_router
from dovetail.gateway.http.waits import HEADERS as WAIT_HEADERS
from dovetail.gateway.mcp.servers import McpServers
from dovetail.gateway.tracing import TracedRequests, Tracing

logger = logging.getLogger("dovetail.gateway")
requests = logging.getLogger("dovetail.requests")

_BODIES: tuple[type[Any], ...] = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    ResponsesRequest,
    CompactRequest,
    NewConversation,
    NewItems,
    NewMetadata,
    MessagesRequest,
    CountTokensRequest,
    NewBatch,
    AddModel,
    ChangeModel,
    LoadAdapter,
    UnloadAdapter,
)


def make_app(admin: Admin, batches: Batches | None = None) -> ASGIApp:
    """`batches`: started with what answers their lines. None: nothing is kept."""
    service, settings = admin.service, admin.settings
    app = FastAPI(title="Dovetail", version=dovetail.__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.settings, app.state.executors = settings, service.models.executors
    app.include_router(make_router(service, settings))
    app.include_router(make_embedding_router(service))
    app.include_router(make_scoring_router(service))
    servers = McpServers(lambda: settings.config.mcp)
    service.link.close_observers.append(servers.close)
    app.include_router(make_responses_router(service, servers))
    app.include_router(make_anthropic_router(service))
    app.include_router(make_ollama_router(service))
    batches = batches or Batches(settings)
    app.include_router(make_files_router(batches))
    app.include_router(make_batches_router(batches))
    app.include_router(make_messages_router(batches))
    turns = TurnWatch()
    service.link.observers.append(turns.observe)
    app.include_router(make_console_router(turns))
    ring = LogRing()
    logging.getLogger("dovetail").addHandler(ring)
    service.link.close_observers.append(lambda: logging.getLogger("dovetail").removeHandler(ring))
    app.include_router(make_admin_router(admin, ring))
    app.include_router(make_adapter_router(admin))
    app.include_router(make_node_router(service))
    app.add_middleware(Boundary)
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    if batches.problem is None:
        batches.runner.start(app)
        service.metrics.observers.append(batches.runner.observe)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]

    return _with_middlewares(app, admin)


def _with_middlewares(app: FastAPI, admin: Admin) -> ASGIApp:
    """From the inside out; a request passes them from the outside in."""
    settings, server = admin.settings, admin.settings.config.server
    access, audit = JsonLines(server.access_log), AuditLog(server.audit_log)

    def on_status(scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", "other")
        admin.service.metrics.http.labels(route, str(status)).inc()
        if is_administration(scope):
            audit.write(scope, status)

    def on_end(scope: Scope, status: int, sent: int) -> None:
        is_logged = requests.isEnabledFor(logging.INFO) and is_generation(scope)
        if access.is_open or is_logged:
            record = access_record(scope, status, sent, time.monotonic())
            access.write(record)
            if is_logged:
                requests.info("%s", request_line(record))

    memory = BodyMemory(lambda: settings.config.server.max_body_memory)

    def streamed_limit(scope: Scope) -> int | None:
        return upload_limit(settings.config, scope["path"], scope["method"])

    layers: ASGIApp = BodyLimit(app, lambda: settings.max_body_bytes, memory, streamed_limit)
    layers = OriginGate(Auth(layers, settings.keys), lambda: settings.origin_rules)
    if server.allowed_origins:
        layers = CORSMiddleware(layers, server.allowed_origins, ("GET", "POST"), ("*",), expose_headers=WAIT_HEADERS)
    layers = Boundary(layers)
    if server.traces is not None:
        tracing = Tracing.to(server.traces)
        admin.service.link.observers.append(tracing.observe)
        admin.service.link.close_observers.append(tracing.close)
        layers = TracedRequests(layers, tracing)
    return RequestIds(layers, on_status, on_end)


class Boundary:
    """Whatever goes wrong below ends here, as a 500 and one logged traceback; the server stays. Inside of FastAPI's own
    layers, which would answer in plain text, and outside of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except ClientDisconnect:
            return
        except TimeoutError:
            logger.warning("a client stopped reading its answer and was dropped")
            raise  # the server closes the connection of an unfinished answer
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in a library's Rust is no Exception
            if isinstance(error, RequestError) and not has_started:
                await problem_response(error, scope)(scope, receive, send)
                return
            logger.exception("request %s failed", scope.get("state", {}).get("request_id"))
            if has_started or scope["type"] != "http":
                raise
            problem = problem_response(EngineFailed("internal error", code="internal_error"), scope)
            await problem(scope, receive, send)


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return problem_response(error, request.scope)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, which the router answers."""
    assert isinstance(error, HTTPException)
    message = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not possible here"}.get(
        error.status_code, error.detail
    )
    problem = InvalidRequest(message[:500])
    problem.status = error.status_code
    response = problem_response(problem, request.scope)
    response.headers.update(error.headers or {})
    return response


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document plus the request bodies, which are read by `parse_body` and not by FastAPI."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template="#/components/schemas/{model}"
        )
        document["components"]["schemas"].update(definitions["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
