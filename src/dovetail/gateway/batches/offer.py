"""What the endpoints of files and batches share: the runner where there is one, whose files these are, and pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from fastapi import Request

from dovetail.config import Config
from dovetail.errors import ConfigError, InvalidRequest, Overloaded
from dovetail.gateway.admin.settings import Settings
from dovetail.gateway.batches.runner import BatchRunner
from dovetail.gateway.batches.store import BatchStore
from dovetail.gateway.batches.uploads import Uploads
from dovetail.gateway.service import Service

FILES_PATH = "/v1/files"
MESSAGES_PATH = "/v1/messages/batches"
MAX_MESSAGES_BYTES = 256 * 1024**2  # of one batch of messages, as Anthropic has it
_FORM_BYTES = 64 * 1024  # around a file


class _Named(Protocol):
    @property
    def id(self) -> str: ...


Record = TypeVar("Record", bound=_Named)


class Batches:
    """The runner, or why there is none."""

    def __init__(self, settings: Settings, runner: BatchRunner | None = None, problem: str = "") -> None:
        self._settings = settings
        self._runner = runner
        self._problem = problem or "this gateway keeps no files"
        self.uploads = Uploads(runner.store) if runner is not None else None

    @classmethod
    def open(cls, folder: Path | None, service: Service, settings: Settings) -> Batches:
        """None: a front's, which has no folder."""
        if folder is None:
            return cls(settings, problem="this gateway is a front: files and batches are with the one that decides")
        try:
            return cls(settings, BatchRunner(BatchStore(folder), service, settings))
        except ConfigError as error:
            return cls(settings, problem=str(error))

    @property
    def problem(self) -> str | None:
        return None if self._runner is not None else self._problem

    @property
    def runner(self) -> BatchRunner:
        """Raises Overloaded."""
        if self._runner is None:
            raise Overloaded(self._problem, code="batches_unavailable", retry_after_s=60)
        return self._runner

    @property
    def config(self) -> Config:
        return self._settings.config

    def room_for(self, owner: str) -> int:
        """Bytes that this key may still store."""
        store, limit = self.runner.store, self.config.batch.max_storage
        left = limit - store.used_bytes()
        if len(self._settings.keys) > 1:  # one key alone shares with nobody
            left -= store.used_bytes(owner)
        if left <= 0:
            raise Overloaded(
                f"{store.used_bytes(owner)} bytes of files are kept for this key, and no more fit batch.max_storage "
                f"({limit} bytes for all); delete some",
                code="storage_full",
                retry_after_s=60,
            )
        return left

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.close()


def batch_folder(config: Config, state: Path | None) -> Path:
    """Where batches are kept: `state` is the folder of what else the server keeps."""
    if config.batch.folder is not None:
        return config.batch.folder
    return (state or config.store.profiles.parent) / "batches"


def upload_limit(config: Config, path: str, method: str) -> int | None:
    """Of a body that is streamed to disk; None: of all others, which are read into memory."""
    if method != "POST":
        return None
    if path == FILES_PATH:
        return config.batch.max_file + _FORM_BYTES
    return min(config.batch.max_file, MAX_MESSAGES_BYTES) if path == MESSAGES_PATH else None


def owner_of(request: Request) -> str:
    """Name of the key; empty where there are none."""
    account = request.state.caller.account
    return account.name if account is not None else ""


def announced_bytes(request: Request) -> int:
    text = request.headers.get("content-length", "0")
    return int(text[:20]) if text.isascii() and text.isdigit() else 0


def number_in(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise InvalidRequest(f"{name} is a number from 1 to {most}", param=name)
    return int(text)


def page_of(
    records: Sequence[Record], after: str | None, limit: int, param: str = "after"
) -> tuple[list[Record], bool]:
    """So many of them after the one of this id, and whether there are more."""
    first = 0
    if after is not None:
        at = next((at for at, one in enumerate(records) if one.id == after), None)
        if at is None:
            raise InvalidRequest(f"{param}: there is no '{after[:100]}' here", param=param)
        first = at + 1
    return list(records[first : first + limit]), len(records) > first + limit
