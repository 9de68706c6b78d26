"""The admin API under `/api`: models that come, change and go; pulls; the configuration.

Who may call is `keys`': with keys those with admin: true; without, everyone may look (sources are left out), and
whoever has the token of this machine may change.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from dovetail.errors import ConfigError, InvalidRequest
from dovetail.gateway.admin.admin import Admin
from dovetail.gateway.admin.api import (
    AddModel,
    ChangeModel,
    ConfigState,
    Ended,
    LogLines,
    ModelState,
    ModelStates,
    PullList,
    PullState,
)
from dovetail.gateway.admin.log_ring import CAPACITY, LogRing
from dovetail.gateway.admin.model_states import model_state, model_states, pull_state
from dovetail.gateway.http.endpoint import Responses, json_response, read_body, request_body, responses

_ERRORS = (400, 401, 403)
_BODY_ERRORS = (*_ERRORS, 409, 413, 415)


def make_admin_router(admin: Admin, ring: LogRing) -> APIRouter:
    endpoints = AdminEndpoints(admin, ring)
    router = APIRouter(prefix="/api")

    def route(method: str, path: str, handler: Any, answers: Responses, body: type[BaseModel] | None = None) -> None:
        extra = {"requestBody": request_body(body)} if body is not None else None
        router.add_api_route(path, handler, methods=[method], responses=answers, openapi_extra=extra)

    route("GET", "/models", endpoints.list_models, responses(ModelStates, (401, 500)))
    added = responses(ModelState, _BODY_ERRORS)
    route(
        "POST",
        "/models",
        endpoints.add,
        added | {201: added.pop(200), 202: added[400] | {"model": ModelState}},
        AddModel,
    )
    route("GET", "/models/{name}", endpoints.show, responses(ModelState, (401, 404, 500, 503)))
    route(
        "PATCH", "/models/{name}", endpoints.change, responses(ModelState, (*_BODY_ERRORS, 404, 500, 503)), ChangeModel
    )
    route("DELETE", "/models/{name}", endpoints.remove, responses(Ended, (*_ERRORS, 404, 500, 503)))
    route("POST", "/models/{name}/load", endpoints.load, responses(ModelState, (*_ERRORS, 404, 500, 503)))
    route("POST", "/models/{name}/unload", endpoints.unload, responses(Ended, (*_ERRORS, 404, 409, 500, 503)))
    route("GET", "/pulls", endpoints.list_pulls, responses(PullList, (401,)))
    route("GET", "/config", endpoints.show_config, responses(ConfigState, (401, 403)))
    route("POST", "/config/reload", endpoints.reload, responses(ConfigState, _ERRORS))
    route("GET", "/logs", endpoints.show_logs, responses(LogLines, (400, 401, 403)))
    return router


class AdminEndpoints:
    def __init__(self, admin: Admin, ring: LogRing) -> None:
        self._admin = admin
        self._ring = ring

    async def show_logs(self, request: Request) -> Response:
        """The last lines of the log: ?level=warning, ?limit=100, and ?after=NUMBER for what is new."""
        level = request.query_params.get("level", "info").upper()
        if level not in logging.getLevelNamesMapping():
            raise InvalidRequest("level is debug, info, warning or error", param="level")
        after, limit = _number(request, "after", 0), _number(request, "limit", CAPACITY)
        return json_response(self._ring.lines(after=after, limit=limit, level=logging.getLevelNamesMapping()[level]))

    async def list_models(self, request: Request) -> Response:
        """Every model: where it is, what it holds, how well it does."""
        models = await asyncio.to_thread(self._admin.service.models.all)
        return json_response(ModelStates(data=[_shown(state, request) for state in model_states(self._admin, models)]))

    async def show(self, name: str, request: Request) -> Response:
        """One model."""
        return json_response(_shown(model_state(self._admin, name), request))

    async def add(self, request: Request) -> Response:
        """Offer one more model, until the server ends. 201: it is there. 202: it is being pulled."""
        body = await read_body(AddModel, request)
        await self._admin.add(body.name, body.config)
        state = model_state(self._admin, body.name)
        return json_response(state, 202 if state.pull is not None else 201)

    async def change(self, name: str, request: Request) -> Response:
        """Other targets, class, keep-alive, aliases."""
        body = await read_body(ChangeModel, request)
        await self._admin.change(name, body.changes)
        return json_response(model_state(self._admin, name))

    async def remove(self, name: str, request: Request) -> Response:
        """Offer it no longer. Running requests finish; with ?force=true they end with an error. Files stay."""
        unfinished = await self._admin.remove(name, force=_flag(request, "force"))
        return json_response(Ended(name=name, unfinished=unfinished))

    async def load(self, name: str) -> Response:
        """Make it ready now; answers when it is."""
        await self._admin.load(name)
        return json_response(model_state(self._admin, name))

    async def unload(self, name: str, request: Request) -> Response:
        """Free its memory; the next request loads it again. A busy one only with ?force=true."""
        return json_response(Ended(name=name, unfinished=self._admin.unload(name, force=_flag(request, "force"))))

    async def list_pulls(self, request: Request) -> Response:
        """Models on their way into the store, and how the last ones ended."""
        pulls = [pull_state(pull) for pull in self._admin.pulls.all()]
        return json_response(PullList(data=[_shown_pull(pull, request) for pull in pulls]))

    async def show_config(self) -> Response:
        """The configuration in force, and why the last one was refused if it was."""
        settings = self._admin.settings
        return json_response(
            ConfigState(
                file=settings.file,
                loaded_at=settings.loaded_at,
                problem=settings.problem,
                needs_restart=list(settings.needs_restart),
                config=settings.config.model_dump(mode="json", by_alias=True),
            )
        )

    async def reload(self) -> Response:
        """Read the file again, as on SIGHUP."""
        try:
            await self._admin.reload()
        except ConfigError as error:
            raise InvalidRequest(str(error), code="invalid_config") from error
        return await self.show_config()


def _shown(state: ModelState, request: Request) -> ModelState:
    """Sources and what went wrong with them may name paths and buckets, which are the administrator's."""
    if request.state.caller.is_admin:
        return state
    pull = None if state.pull is None else _shown_pull(state.pull, request)
    return state.model_copy(update={"source": "", "pull": pull})


def _shown_pull(pull: PullState, request: Request) -> PullState:
    if request.state.caller.is_admin:
        return pull
    return pull.model_copy(update={"source": "", "error": pull.error and "the log says why"})


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InvalidRequest(f"{name} is a number", param=name)
    return int(text)


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0", ""):
        raise InvalidRequest(f"{name} is true or false", param=name)
    return text in ("true", "1", "")
