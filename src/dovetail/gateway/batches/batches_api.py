"""`/v1/batches`: a file of requests becomes a file of answers. Nobody sees another key's."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from starlette.responses import JSONResponse, Response

from dovetail.config import parse_duration
from dovetail.errors import InvalidRequest, QuotaExceeded
from dovetail.gateway.batches.files_api import checked_expiry, listed
from dovetail.gateway.batches.offer import Batches, number_in, owner_of, page_of
from dovetail.gateway.batches.records import ENDPOINT_ALIASES, Api, Batch
from dovetail.gateway.batches.runner import BatchRunner
from dovetail.gateway.http.bodies import StrictBody
from dovetail.gateway.http.endpoint import documented, read_body, request_body

MAX_WINDOW_S = 30 * 86400
_MAX_PAGE = 100

Endpoint = Annotated[
    Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank"],
    BeforeValidator(lambda name: ENDPOINT_ALIASES.get(name, name) if isinstance(name, str) else name),
]


class OutputExpiry(StrictBody):
    anchor: str
    seconds: int


class NewBatch(StrictBody):
    input_file_id: str = Field(min_length=1, max_length=128)
    endpoint: Endpoint
    completion_window: str = Field(max_length=16, description="24h, or any time up to 30d")
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    output_expires_after: OutputExpiry | None = None

    @property
    def window_s(self) -> int:
        try:
            seconds = parse_duration(self.completion_window)
        except ValueError as error:
            raise InvalidRequest(f"completion_window: {error}", param="completion_window") from error
        if not 1 <= seconds <= MAX_WINDOW_S:
            raise InvalidRequest("completion_window is a time from 1s to 30d", param="completion_window")
        return int(seconds)


def make_batches_router(batches: Batches) -> APIRouter:
    endpoints = BatchEndpoints(batches)
    router = APIRouter()
    errors = documented((400, 401, 404, 409, 413, 415, 429, 503))
    body = {"requestBody": request_body(NewBatch)}
    router.add_api_route("/v1/batches", endpoints.create, methods=["POST"], responses=errors, openapi_extra=body)
    router.add_api_route("/v1/batches", endpoints.list_all, methods=["GET"], responses=errors)
    one = "/v1/batches/{batch_id}"
    router.add_api_route(one, endpoints.show, methods=["GET"], responses=errors)
    router.add_api_route(f"{one}/cancel", endpoints.cancel, methods=["POST"], responses=errors)
    return router


class BatchEndpoints:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def create(self, request: Request) -> Response:
        """Have the requests of a file answered."""
        runner, owner = self._batches.runner, owner_of(request)
        body = await read_body(NewBatch, request)
        file = runner.store.file(body.input_file_id, owner)
        if file.purpose != "batch":
            raise InvalidRequest(f"the file '{file.id}' is {file.purpose!r}, not 'batch'", param="input_file_id")
        check_room(self._batches, owner)
        expiry = body.output_expires_after
        batch = new_batch(
            "openai",
            owner,
            body.endpoint,
            file.id,
            (body.completion_window, body.window_s),
            metadata=body.metadata,
            output_expires_s=None
            if expiry is None
            else checked_expiry(expiry.anchor, expiry.seconds, "output_expires_after"),
        )
        await runner.add(batch)
        return JSONResponse(_record(runner, batch))

    async def list_all(self, request: Request) -> Response:
        """Batches, the newest first."""
        runner = self._batches.runner
        found = batches_of(runner, owner_of(request), "openai")
        page, has_more = page_of(
            found, request.query_params.get("after"), number_in(request, "limit", 20, _MAX_PAGE)
        )  # fmt: skip
        return JSONResponse(listed([_record(runner, batch) for batch in page], has_more=has_more))

    async def show(self, batch_id: str, request: Request) -> Response:
        """One batch, and how it gets on."""
        runner = self._batches.runner
        return JSONResponse(_record(runner, runner.store.batch(batch_id, owner_of(request))))

    async def cancel(self, batch_id: str, request: Request) -> Response:
        """End a batch; what is answered is kept."""
        runner = self._batches.runner
        return JSONResponse(_record(runner, await runner.cancel(runner.store.batch(batch_id, owner_of(request)))))


def batches_of(runner: BatchRunner, owner: str, api: Api) -> list[Batch]:
    """The newest first."""
    return [one for one in reversed(runner.store.batches.values()) if one.owner == owner and one.api == api]


def check_room(batches: Batches, owner: str) -> None:
    open_ones = sum(one.owner == owner and not one.is_over for one in batches.runner.store.batches.values())
    most = batches.config.batch.max_batches
    if open_ones >= most:
        raise QuotaExceeded(
            f"{open_ones} batches of this key have not ended, more than {most} are not accepted (batch.max_batches)",
            code="too_many_batches",
            retry_after_s=60,
        )


def new_batch(
    api: Api,
    owner: str,
    endpoint: str,
    input_file: str,
    window: tuple[str, int],
    *,
    metadata: dict[str, str] | None = None,
    output_expires_s: int | None = None,
) -> Batch:
    """`window`: as it was said, and in seconds."""
    now = int(time.time())
    prefix = "batch_" if api == "openai" else "msgbatch_"
    return Batch(
        id=prefix + uuid.uuid4().hex,
        owner=owner,
        api=api,
        endpoint=endpoint,
        input_file=input_file,
        output_file=f"file-{uuid.uuid4().hex}",
        error_file=f"file-{uuid.uuid4().hex}",
        completion_window=window[0],
        created_s=now,
        expires_s=now + window[1],
        metadata=metadata,
        output_expires_s=output_expires_s,
    )


def _record(runner: BatchRunner, batch: Batch) -> dict[str, Any]:
    counts, files = runner.counts_of(batch), runner.store.files
    ended = {name: batch.ended_s if batch.status == name else None for name in ("completed", "failed", "expired")}
    usage = runner.usage_of(batch)
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.models[0] if len(batch.models) == 1 else None,
        "errors": _errors(batch),
        "input_file_id": batch.input_file,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file if batch.output_file in files else None,
        "error_file_id": batch.error_file if batch.error_file in files else None,
        "created_at": batch.created_s,
        "in_progress_at": batch.began_s,
        "expires_at": batch.expires_s,
        "finalizing_at": batch.finalizing_s,
        "completed_at": ended["completed"],
        "failed_at": ended["failed"],
        "expired_at": ended["expired"],
        "cancelling_at": batch.cancelling_s,
        "cancelled_at": batch.ended_s if batch.status == "cancelled" else None,
        "request_counts": {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed + counts.expired + counts.cancelled,
        },
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total,
        },
        "metadata": batch.metadata,
        "progress": runner.progress_of(batch),
    }


def _errors(batch: Batch) -> dict[str, Any] | None:
    if not batch.problems:
        return None
    data = [
        {"code": one.code, "message": one.message, "param": one.param, "line": one.line} for one in batch.problems
    ]  # fmt: skip
    return {"object": "list", "data": data}
