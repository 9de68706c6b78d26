"""What is written down of each request and of each act of administration: a JSON line, without prompts and keys."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from starlette.types import Scope

from dovetail.gateway.admin.keys import OLLAMA_PATHS, Caller, is_of_admin

logger = logging.getLogger("dovetail.audit")

_MAX_TEXT = 200  # of what a client chose: paths, names


class JsonLines:
    """Appends to a file, or writes to standard error."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError."""
        self._file: TextIO | None = None
        if path is not None:
            self._file = sys.stderr if str(path) == "-" else path.expanduser().open("a", buffering=1)

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(record, default=str) + "\n")
            except OSError as error:  # a full disk ends no request
                logging.getLogger("dovetail.gateway").error("a log cannot be written: %s", error)


def access_record(scope: Scope, status: int, sent: int, now: float) -> dict[str, Any]:
    """Times in seconds since the request's first line."""
    state = scope.get("state", {})
    arrived = state.get("arrived_s", now)
    started = state.get("started_s")
    return {
        **_who(scope),
        "method": scope["method"][:20],
        "path": scope["path"][:_MAX_TEXT],
        "status": status,
        "code": state.get("error_code"),
        "seconds": round(now - arrived, 4),
        "first_byte_s": None if started is None else round(started - arrived, 4),
        "bytes_in": state.get("received", 0),
        "bytes_out": sent,
        **state.get("usage", {}),
    }


def request_line(record: dict[str, Any]) -> str:
    """The same for people, in one line."""
    code = f" {record['code']}" if record.get("code") else ""
    parts = [f"{record['path']} {record['status'] or 'client left'}{code}"]
    if "model" in record:
        parts.append(f"{record['model']} {record['prompt_tokens']}+{record['completion_tokens']} tokens")
    if record["first_byte_s"] is not None:
        parts.append(f"first byte {record['first_byte_s']:.3f} s")
    if record.get("warnings"):
        parts.append(f"warned: {'; '.join(record['warnings'])}")
    return ", ".join([*parts, f"{record['seconds']:.3f} s, id {record['id']}"])


class AuditLog:
    """Who did what to the server, and what came of it; also what was refused."""

    def __init__(self, path: Path | None) -> None:
        self._lines = JsonLines(path)

    def write(self, scope: Scope, status: int) -> None:
        record = {**_who(scope), "act": f"{scope['method'][:20]} {scope['path'][:_MAX_TEXT]}", "status": status}
        query = scope.get("query_string", b"").decode("latin-1")[:_MAX_TEXT]
        if query:
            record["query"] = query
        logger.info("%s", json.dumps(record))
        self._lines.write(record)


def is_administration(scope: Scope) -> bool:
    return is_of_admin(scope["path"]) and scope["method"] not in ("GET", "HEAD", "OPTIONS")


def is_generation(scope: Scope) -> bool:
    path: str = scope["path"]
    asks = path.startswith(("/v1/", "/v2/")) or path in ("/rerank", "/score") or path in OLLAMA_PATHS
    return asks and scope["method"] == "POST"


def _who(scope: Scope) -> dict[str, Any]:
    state = scope.get("state", {})
    caller: Caller = state.get("caller") or Caller()
    name = caller.account.name if caller.account is not None else "local" if caller.is_admin else None
    return {
        "time": round(time.time(), 3),
        "id": state.get("request_id"),
        "client": (scope.get("client") or ("",))[0],
        "key": name,
    }
