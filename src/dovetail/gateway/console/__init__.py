"""The page at `/`: chat, models, and who held which device. Plain modules without a build step, from this server alone.

The files carry no secret and are open; what they show is asked for with the visitor's own key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dovetail.errors import InvalidRequest
from dovetail.gateway.endpoint import json_response, responses
from dovetail.gateway.turn_history import MAX_CELLS, TurnHistory, TurnShares, TurnWatch

PAGES = {"/": "index.html", "/ui": "index.html", "/docs": "docs.html"}
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
# Nothing of another host, nothing inline, in nobody's frame.
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def make_console_router(turns: TurnWatch) -> APIRouter:
    router = APIRouter()
    known = {item.name: item.read_bytes() for item in files(__package__).iterdir() if _kind(item.name) in _TYPES}

    def answer(name: str) -> Response:
        if name not in known:
            raise HTTPException(404)
        return Response(known[name], media_type=_TYPES[_kind(name)], headers=_HEADERS)

    def page(name: str) -> Callable[[], Awaitable[Response]]:
        async def show() -> Response:
            return answer(name)

        return show

    for path, name in PAGES.items():
        router.add_api_route(path, page(name), methods=["GET", "HEAD"], include_in_schema=False)

    async def asset(name: str) -> Response:
        return answer(name)

    async def list_turns(request: Request) -> Response:
        """Who held which device over the last minute, turn by turn; with ?after=NOW_S of an answer, what is new."""
        return json_response(turns.history(_after(request)))

    async def list_shares(request: Request) -> Response:
        """The same as shares of `cells` equal pieces of the minute, each with how long which model held the device."""
        return json_response(turns.shares(_num_cells(request), _after(request)))

    router.add_api_route("/ui/{name}", asset, methods=["GET"], include_in_schema=False)
    router.add_api_route("/api/turns", list_turns, methods=["GET"], responses=responses(TurnHistory, (400, 401)))
    shares = responses(TurnShares, (400, 401))
    router.add_api_route("/api/turns/shares", list_shares, methods=["GET"], responses=shares)
    return router


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


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
