"""`/v1/messages/batches`: Anthropic's batches of messages. Their requests come in the body, their results as lines."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from dovetail.errors import Conflict, InvalidRequest, RecordNotFound
from dovetail.gateway.batches import job
from dovetail.gateway.batches.batches_api import batches_of, check_room, new_batch
from dovetail.gateway.batches.offer import (
    MAX_MESSAGES_BYTES,
    MESSAGES_PATH,
    Batches,
    announced_bytes,
    number_in,
    owner_of,
    page_of,
)
from dovetail.gateway.batches.records import CANCELLED, EXPIRED, Batch, StoredFile
from dovetail.gateway.batches.results import LineResult, as_line
from dovetail.gateway.batches.runner import BatchRunner
from dovetail.gateway.batches.uploads import received_body
from dovetail.gateway.http.endpoint import documented
from dovetail.gateway.http.problems import AnthropicErrorBody

_WINDOW = ("24h", 86400)
_MAX_PAGE = 1000
_LINES_TOGETHER = 64
_RESULT = msgspec.json.Decoder(LineResult)
_KINDS = {EXPIRED: "expired", CANCELLED: "canceled"}


def make_messages_router(batches: Batches) -> APIRouter:
    endpoints = MessageBatchEndpoints(batches)
    router = APIRouter()
    errors = documented((400, 401, 404, 409, 413, 429, 503), AnthropicErrorBody)
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
    router.add_api_route(MESSAGES_PATH, endpoints.create, methods=["POST"], responses=errors, openapi_extra=body)
    router.add_api_route(MESSAGES_PATH, endpoints.list_all, methods=["GET"], responses=errors)
    one = f"{MESSAGES_PATH}/{{batch_id}}"
    router.add_api_route(one, endpoints.show, methods=["GET"], responses=errors)
    router.add_api_route(one, endpoints.delete, methods=["DELETE"], responses=errors)
    router.add_api_route(f"{one}/cancel", endpoints.cancel, methods=["POST"], responses=errors)
    router.add_api_route(f"{one}/results", endpoints.results, methods=["GET"], responses=errors)
    return router


class MessageBatchEndpoints:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def create(self, request: Request) -> Response:
        """Have messages answered, as Anthropic's batches are."""
        runner, owner, config = self._batches.runner, owner_of(request), self._batches.config
        check_room(self._batches, owner)
        most = min(config.batch.max_file, MAX_MESSAGES_BYTES, self._batches.room_for(owner))
        assert self._batches.uploads is not None
        now = int(time.time())
        file_id = f"file-{uuid.uuid4().hex}"
        batch = new_batch("anthropic", owner, "/v1/messages", file_id, _WINDOW)
        with self._batches.uploads.begin(owner, most, "batch.max_file", announced_bytes(request)) as upload:
            await received_body(request, upload, config.server.body_timeout)
            report = await runner.checker.check_requests(batch, upload.path)
            if report.problems:
                first = report.problems[0]
                where = f"requests[{first.line - 1}]: " if first.line is not None else ""
                raise InvalidRequest(where + first.message, param="requests", code=first.code)
            size = upload.path.stat().st_size
            name = f"{batch.id}.jsonl"
            file = StoredFile(
                id=file_id, owner=owner, filename=name, purpose="batch", size_bytes=size, created_s=now, is_hidden=True
            )
            await runner.store.add_file(file, upload.path)
        await runner.add(job.begin(batch, report.total, report.models, now))
        return JSONResponse(_record(runner, runner.store.batches[batch.id], request))

    async def list_all(self, request: Request) -> Response:
        """Batches of messages, the newest first."""
        runner, query = self._batches.runner, request.query_params
        found = batches_of(runner, owner_of(request), "anthropic")
        limit = number_in(request, "limit", 20, _MAX_PAGE)
        if (before := query.get("before_id")) is not None:
            newer, _ = page_of(found[::-1], before, limit, "before_id")
            page, has_more = newer[::-1], False
        else:
            page, has_more = page_of(found, query.get("after_id"), limit, "after_id")
        records = [_record(runner, batch, request) for batch in page]
        first, last = (records[0]["id"], records[-1]["id"]) if records else (None, None)
        return JSONResponse({"data": records, "has_more": has_more, "first_id": first, "last_id": last})

    async def show(self, batch_id: str, request: Request) -> Response:
        """One batch of messages."""
        return JSONResponse(_record(self._batches.runner, self._find(batch_id, request), request))

    async def cancel(self, batch_id: str, request: Request) -> Response:
        """End a batch of messages; what is answered is kept."""
        runner = self._batches.runner
        return JSONResponse(_record(runner, await runner.cancel(self._find(batch_id, request)), request))

    async def delete(self, batch_id: str, request: Request) -> Response:
        """Forget a batch of messages that has ended, with its results."""
        runner, batch = self._batches.runner, self._find(batch_id, request)
        if not batch.is_over:
            raise Conflict(f"the batch '{batch.id}' has not ended: cancel it first", code="batch_not_ended")
        for file_id in (batch.output_file, batch.error_file):
            await runner.store.drop_file(file_id)
        await runner.store.drop_batch(batch)
        return JSONResponse({"id": batch.id, "type": "message_batch_deleted"})

    async def results(self, batch_id: str, request: Request) -> Response:
        """What became of each message, a line each."""
        store, batch = self._batches.runner.store, self._find(batch_id, request)
        if not batch.is_over:
            raise InvalidRequest(f"the batch '{batch.id}' has not ended: its results are there then", param="batch_id")
        paths = [store.content(id) for id in (batch.output_file, batch.error_file) if id in store.files]
        return StreamingResponse(_results(paths), media_type="application/x-jsonl")

    def _find(self, batch_id: str, request: Request) -> Batch:
        batch = self._batches.runner.store.batch(batch_id, owner_of(request))
        if batch.api != "anthropic":
            raise RecordNotFound(f"no such batch of messages: '{batch_id[:100]}'", code="batch_not_found")
        return batch


async def _results(paths: list[Path]) -> AsyncIterator[bytes]:
    for path in paths:
        with path.open("rb") as file:
            while lines := await asyncio.to_thread(_next_lines, file):
                yield b"".join(map(_shaped, lines))


def _next_lines(file: Any) -> list[bytes]:
    return [line for _ in range(_LINES_TOGETHER) if (line := file.readline())]


def _shaped(line: bytes) -> bytes:
    result = _RESULT.decode(line)
    said: dict[str, Any]
    if result.response is None:
        assert result.error is not None
        said = {"type": _KINDS[result.error.code]}
    elif result.is_answer:
        said = {"type": "succeeded", "message": result.response.body}
    else:
        said = {"type": "errored", "error": result.response.body}
    return as_line({"custom_id": result.custom_id, "result": said})


def _record(runner: BatchRunner, batch: Batch, request: Request) -> dict[str, Any]:
    counts = runner.counts_of(batch)
    address = f"{request.url.scheme}://{request.headers.get('host', '')}{MESSAGES_PATH}/{batch.id}/results"
    status = "ended" if batch.is_over else "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {
            "processing": counts.total - counts.ended,
            "succeeded": counts.completed,
            "errored": counts.failed,
            "canceled": counts.cancelled,
            "expired": counts.expired,
        },
        "created_at": _time(batch.created_s),
        "expires_at": _time(batch.expires_s),
        "ended_at": _time(batch.ended_s),
        "cancel_initiated_at": _time(batch.cancelling_s),
        "archived_at": None,
        "results_url": address if batch.is_over else None,
    }


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
