"""`/v1/files`: uploads, and what batches have written. Nobody sees another key's."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, JSONResponse, Response

from dovetail.errors import Conflict, InvalidRequest
from dovetail.gateway.batches.offer import Batches, announced_bytes, number_in, owner_of, page_of
from dovetail.gateway.batches.records import StoredFile
from dovetail.gateway.batches.uploads import Form, received_form
from dovetail.gateway.http.endpoint import documented

_MAX_FILES = 10_000  # of one key; also in one page
_MIN_EXPIRY_S, _MAX_EXPIRY_S = 3600, 30 * 86400
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}


def make_files_router(batches: Batches) -> APIRouter:
    endpoints = FileEndpoints(batches)
    router = APIRouter()
    errors = documented((400, 401, 404, 408, 409, 413, 503))
    router.add_api_route("/v1/files", endpoints.create, methods=["POST"], responses=errors, openapi_extra=_FORM)
    router.add_api_route("/v1/files", endpoints.list_all, methods=["GET"], responses=errors)
    one = "/v1/files/{file_id}"
    router.add_api_route(one, endpoints.show, methods=["GET"], responses=errors)
    router.add_api_route(one, endpoints.delete, methods=["DELETE"], responses=errors)
    router.add_api_route(f"{one}/content", endpoints.content, methods=["GET"], responses=errors)
    return router


class FileEndpoints:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def create(self, request: Request) -> Response:
        """Upload a file of requests, one a line."""
        store, owner = self._batches.runner.store, owner_of(request)
        config, uploads = self._batches.config, self._batches.uploads
        assert uploads is not None
        if sum(file.owner == owner for file in store.files.values()) >= _MAX_FILES:
            raise InvalidRequest(f"{_MAX_FILES} files are kept for this key: delete some", code="too_many_files")
        most = min(config.batch.max_file, room := self._batches.room_for(owner))
        key = "batch.max_storage" if room < config.batch.max_file else "batch.max_file"
        with uploads.begin(owner, most, key, announced_bytes(request)) as upload:
            form = await received_form(request, upload, config.server.body_timeout)
            file = _file_of(form, owner, upload.size_bytes, int(time.time()))
            await store.add_file(file, upload.path)
        return JSONResponse(_record(file))

    async def list_all(self, request: Request) -> Response:
        """Files, the newest first unless ?order=asc."""
        store, owner, query = self._batches.runner.store, owner_of(request), request.query_params
        found = [file for file in store.files.values() if file.owner == owner and not file.is_hidden]
        if (purpose := query.get("purpose")) is not None:
            found = [file for file in found if file.purpose == purpose]
        if query.get("order") != "asc":
            found.reverse()
        page, has_more = page_of(found, query.get("after"), number_in(request, "limit", _MAX_FILES, _MAX_FILES))
        return JSONResponse(listed([_record(file) for file in page], has_more=has_more))

    async def show(self, file_id: str, request: Request) -> Response:
        """One file."""
        return JSONResponse(_record(self._batches.runner.store.file(file_id, owner_of(request))))

    async def content(self, file_id: str, request: Request) -> Response:
        """What is in a file."""
        store = self._batches.runner.store
        file = store.file(file_id, owner_of(request))
        return FileResponse(store.content(file.id), media_type="application/octet-stream", filename=file.filename)

    async def delete(self, file_id: str, request: Request) -> Response:
        """Delete a file, unless a batch reads it."""
        store = self._batches.runner.store
        file = store.file(file_id, owner_of(request))
        reading = [one.id for one in store.batches.values() if one.input_file == file.id and not one.is_over]
        if reading:
            raise Conflict(f"the batch '{reading[0]}' reads this file: cancel it first", code="file_in_use")
        await store.drop_file(file.id)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})


def listed(records: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    first, last = (records[0]["id"], records[-1]["id"]) if records else (None, None)
    return {"object": "list", "data": records, "first_id": first, "last_id": last, "has_more": has_more}


def _file_of(form: Form, owner: str, size_bytes: int, now: int) -> StoredFile:
    if form.filename is None:
        raise InvalidRequest("the form has no file: its field is 'file', with a filename", param="file")
    if not size_bytes:
        raise InvalidRequest("the file is empty", param="file", code="empty_file")
    purpose = form.fields.get("purpose")
    if purpose != "batch":
        raise InvalidRequest(f"purpose is {str(purpose)[:50]!r}; files are kept for 'batch' only", param="purpose")
    return StoredFile(
        id=f"file-{uuid.uuid4().hex}",
        owner=owner,
        filename=form.filename,
        purpose=purpose,
        size_bytes=size_bytes,
        created_s=now,
        expires_s=_expiry(form, now),
    )


def _expiry(form: Form, now: int) -> int | None:
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    return now + checked_expiry(anchor, int(seconds) if is_number and seconds else -1, "expires_after")


def checked_expiry(anchor: str | None, seconds: int, param: str) -> int:
    if anchor != "created_at" or not _MIN_EXPIRY_S <= seconds <= _MAX_EXPIRY_S:
        raise InvalidRequest(
            f"{param} needs anchor 'created_at' and seconds from {_MIN_EXPIRY_S} to {_MAX_EXPIRY_S}", param=param
        )
    return seconds


def _record(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_s,
        "expires_at": file.expires_s,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
