"""Models that download while they are asked for: waits until their weights are in the host pool, beside the thread that
loads, which goes on with other models meanwhile. Another process brings the bytes (`store.sources.bucket_model`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dovetail import messages
from dovetail.errors import DovetailError
from dovetail.node.events import StartLoad
from dovetail.store.format.late_chunks import late_chunks
from dovetail.store.format.manifest import (
    ARRIVING,
    MANIFEST,
    Manifest,
    Partition,
    blob_path,
    is_arriving,
    is_stored,
    read_manifest,
    store_root,
)
from dovetail.store.host_pool.pool import HostPool
from dovetail.types import ModelCard
from dovetail.worker.fetching import Fetched

log = logging.getLogger("dovetail.worker")

_LOOK_S = 0.05  # how often the pool is looked at
_GRACE_S = 10.0  # a download that ended may be started again, and go on in the same place


class _Awaited(NamedTuple):
    command: StartLoad
    card: ModelCard
    manifest: Manifest
    since_s: float


class ArrivingWeights:
    """`wait_for` hands in, `on_end` is called from its thread for every command."""

    def __init__(self, pool: HostPool, on_end: Callable[[StartLoad, Fetched], None], *, waits_for_all: bool) -> None:
        """`waits_for_all`: also for what a first token can do without (`store.format.late_chunks`)."""
        self._pool = pool
        self._waits_for_all = waits_for_all
        self._on_end = on_end
        self._awaited: list[_Awaited] = []
        self._changed = threading.Condition()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def find(self, *cards: ModelCard) -> list[ModelCard]:
        """Those that cannot be loaded yet."""
        return [card for card in cards if is_arriving(Path(card.path)) and not self._is_here(_manifest(card), card)]

    def wait_for(self, command: StartLoad, card: ModelCard) -> None:
        with self._changed:
            self._awaited.append(_Awaited(command, card, _manifest(card), time.monotonic()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="arrivals")
                self._thread.start()
            self._changed.notify_all()

    def progress(self) -> list[messages.Loading]:
        with self._changed:
            awaited = list(self._awaited)
        return [messages.Loading(one.command.model, self._done_bytes(one), one.card.size_bytes) for one in awaited]

    @property
    def is_waiting(self) -> bool:
        return bool(self._awaited)

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        seen: dict[int, tuple[int, float]] = {}  # by instance: bytes, and when they became so many
        while not self._is_stopped:
            with self._changed:
                self._changed.wait(_LOOK_S if self._awaited else None)
                awaited = list(self._awaited)
            for one in awaited:
                end = self._look(one, seen)
                if end is not None:
                    with self._changed:
                        self._awaited.remove(one)
                    seen.pop(one.command.instance, None)
                    self._on_end(one.command, end)

    def _look(self, one: _Awaited, seen: dict[int, tuple[int, float]]) -> Fetched | None:
        """How it ended; None while it goes on."""
        now = time.monotonic()
        try:
            if is_stored(Path(one.card.path)) or self._is_here(one.manifest, one.card):
                return Fetched(now - one.since_s, tier="remote")
        except (DovetailError, OSError) as error:
            return Fetched(error=str(error))
        if self._is_under_way(one):
            seen.pop(one.command.instance, None)
            return None
        _, since = seen.setdefault(one.command.instance, (0, now))
        if now - since < _GRACE_S:
            return None
        return Fetched(error=f"{one.card.name}: its download ended before all of it was here")

    def _is_under_way(self, one: _Awaited) -> bool:
        return is_arriving(Path(one.card.path)) and any(
            self._pool.progress_of(part.digest)[1]
            for part in one.manifest.partitions
            if self._arrived_bytes(part, one.card) < part.size
        )

    def _is_here(self, manifest: Manifest, card: ModelCard) -> bool:
        late = range(0) if self._waits_for_all else late_chunks(manifest)
        return all(self._is_part_here(partition, card, late) for partition in manifest.partitions)

    def _is_part_here(self, partition: Partition, card: ModelCard, late: range) -> bool:
        if self._arrived_bytes(partition, card) == partition.size:
            return True
        here = self._chunks_here(partition)
        return bool(here) and all(is_here for index, is_here in enumerate(here) if index not in late)

    def _done_bytes(self, one: _Awaited) -> int:
        return sum(self._arrived_bytes(partition, one.card) for partition in one.manifest.partitions)

    def _arrived_bytes(self, partition: Partition, card: ModelCard) -> int:
        if blob_path(store_root(Path(card.path)), partition.digest).exists():
            return partition.size
        from_front = self._pool.progress_of(partition.digest)[0]
        return max(from_front, min(sum(self._chunks_here(partition)) * partition.chunk_bytes, partition.size))

    def _chunks_here(self, partition: Partition) -> list[bool]:
        """Empty where the pool does not know."""
        return self._pool.chunks_here(partition.digest) if self._pool.chunk_bytes == partition.chunk_bytes else []


def _manifest(card: ModelCard) -> Manifest:
    folder = Path(card.path)
    return read_manifest(folder, ARRIVING if is_arriving(folder) else MANIFEST)
