"""The page at `/`: chat, models, who held which device, the API by examples, and settings for other clients.

Plain modules without a build step, from this server alone. The files carry no secret and are open; what they show is
asked for with the visitor's own key, which `dovetail open` hands over by a code (`handover`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from dovetail.errors import InvalidRequest, PermissionDenied, Unauthenticated
from dovetail.gateway.admin.turn_history import MAX_CELLS, TurnHistory, TurnShares, TurnWatch
from dovetail.gateway.console.files import PageFiles
from dovetail.gateway.console.handover import Handover
from dovetail.gateway.http.endpoint import json_response, read_body, responses

PAGES = {"/": "index.html", "/ui": "index.html", "/docs": "docs.html"}


class UseCode(BaseModel):
    model_config = ConfigDict(extra="forbid")

    code: str = Field(max_length=200)


class PageCode(BaseModel):
    code: str


class PageKey(BaseModel):
    key: str


def make_console_router(turns: TurnWatch) -> APIRouter:
    router = APIRouter()
    files, handover = PageFiles(), Handover(time.monotonic)

    def page(name: str) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            return files.answer(name, request.headers)

        return show

    for path, name in PAGES.items():
        router.add_api_route(path, page(name), methods=["GET", "HEAD"], include_in_schema=False)

    async def asset(name: str, request: Request) -> Response:
        return files.answer(name, request.headers)

    async def issue_code(request: Request) -> Response:
        """A code for the address of the page, good once for the key of this request."""
        return json_response(PageCode(code=handover.issue(_accepted_key(request))))

    async def use_code(request: Request) -> Response:
        """The key for a code."""
        key = handover.redeem((await read_body(UseCode, request)).code)
        if key is None:
            raise PermissionDenied(
                "this address was used before or is too old; `dovetail open` makes a new one", code="code_used"
            )
        response = json_response(PageKey(key=key))
        response.headers["cache-control"] = "no-store"
        return response

    async def list_turns(request: Request) -> Response:
        """Who held which device over the last minute, turn by turn; with ?after=NOW_S of an answer, what is new."""
        return json_response(turns.history(_after(request)))

    async def list_shares(request: Request) -> Response:
        """The same as shares of `cells` equal pieces of the minute, each with how long which model held the device."""
        return json_response(turns.shares(_num_cells(request), _after(request)))

    router.add_api_route("/ui/{name}", asset, methods=["GET"], include_in_schema=False)
    router.add_api_route("/ui/code", issue_code, methods=["POST"], include_in_schema=False)
    router.add_api_route("/ui/key", use_code, methods=["POST"], include_in_schema=False)
    router.add_api_route("/api/turns", list_turns, methods=["GET"], responses=responses(TurnHistory, (400, 401)))
    shares = responses(TurnShares, (400, 401))
    router.add_api_route("/api/turns/shares", list_shares, methods=["GET"], responses=shares)
    return router


def _accepted_key(request: Request) -> str:
    """As it was sent, if it is a key of this server or the token of this machine."""
    caller = request.state.caller
    key = request.headers.get("authorization", "").partition(" ")[2].strip()
    if not key or (caller.account is None and not caller.is_admin):
        raise Unauthenticated(
            "send the key or token that is to be handed over as 'Authorization: Bearer <key>'", code="missing_api_key"
        )
    return key


def _after(request: Request) -> float:
    after = request.query_params.get("after", "0")
    try:
        return float(after)
    except ValueError:
        raise InvalidRequest(f"after: {after[:40]!r} is no number", param="after") from None


def _num_cells(request: Request) -> int:
    cells = request.query_params.get("cells", "600")
    if not (cells.isascii() and cells.isdigit() and len(cells) <= 9 and 1 <= int(cells) <= MAX_CELLS):
        raise InvalidRequest(f"cells: {cells[:40]!r} is no number from 1 to {MAX_CELLS}", param="cells")
    return int(cells)
