"""The host pool as a worker uses it: models of the store are read into it once and used from it in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from dovetail.engine.devices import Device
from dovetail.errors import DamagedCheckpoint, OutOfMemory
from dovetail.modelspec import ModelSpec
from dovetail.node.events import StartLoad
from dovetail.node.ports import Checkpoint
from dovetail.policy.placement import DeviceKind
from dovetail.store import open_checkpoint
from dovetail.store.checking import check_weights
from dovetail.store.format.manifest import (
    ARRIVING,
    Manifest,
    StoredModel,
    is_arriving,
    is_stored,
    partition_files,
    read_manifest,
)
from dovetail.store.hf.adapter_parts import ModelAdapter, open_adapter
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.loading.loader import Loader, LoaderConfig, Ticket
from dovetail.store.loading.pooled import PooledModel, open_pooled, open_pooled_adapter, pooled_keys
from dovetail.store.loading.reader import cached_share
from dovetail.worker.arriving import ArrivingWeights
from dovetail.worker.fetching import Fetched

Tier = Literal["host", "disk", "neighbour", "remote"]
CACHED = 0.98  # of a file in the page cache: the rest is read as it is touched
ROOM_WAIT_S = 1.0  # models in use may leave the pool meanwhile; the queue itself needs a moment too


class WeightCache:
    def __init__(self, pool: HostPool, loader: Loader, for_copies: bool, verify: bool = False) -> None:
        """`for_copies`: a device copies out of the pool, so that everything goes through it, and may begin to while the
        rest is still read. `verify`: what comes from the disk is compared with its checksums."""
        self._verify = verify
        self._pool = pool
        self._loader = loader
        self._for_copies = for_copies

    @classmethod
    def attach(
        cls, descriptor: int, direct_io: str, readers: int, device: Device, *, verify: bool = False
    ) -> WeightCache:
        pool = HostPool(descriptor)
        copies = device.kind is not DeviceKind.CPU
        if copies:
            device.use_host_pool(pool.address + pool.chunk_offset(0), pool.capacity_bytes, pool.chunk_bytes)
        config = LoaderConfig(direct_io=direct_io, readers=readers)  # type: ignore[arg-type]
        return cls(pool, Loader(pool, config), copies, verify)

    def open(self, path: str, on_place: Callable[[Sequence[Ticket]], None] = lambda _: None) -> tuple[Checkpoint, Tier]:
        """The model, and where its bytes were. What the page cache holds already is mapped from there: a copy in the
        pool would cost more than it saves. So is what is not in the store's form, or finds no room."""
        folder = Path(path)
        if (manifest := _arriving(folder)) is not None:  # in the pool, and not on disk yet
            return self._open_arriving(folder, manifest, on_place), "host"
        if not is_stored(folder):
            return open_checkpoint(path), "disk"
        manifest = read_manifest(folder)
        tier: Tier = "host" if self._holds(manifest) else "disk"
        if tier == "disk" and not self._for_copies and _is_cached(folder, manifest):
            return self._mapped(folder, manifest), "host"
        try:
            wait_s, whole = ROOM_WAIT_S, not self._for_copies
            model = open_pooled(
                folder,
                self._loader,
                room_wait_s=wait_s,
                verify=self._verify,
                whole=whole,
                manifest=manifest,
                on_place=on_place,
            )
            return model, tier
        except OutOfMemory:
            return self._mapped(folder, manifest), "disk"

    def _open_arriving(
        self, folder: Path, manifest: Manifest, on_place: Callable[[Sequence[Ticket]], None]
    ) -> PooledModel:
        """Where weights are used in place, rows of the embedding may come later."""
        whole = self._for_copies
        model = open_pooled(folder, self._loader, room_wait_s=0.0, manifest=manifest, on_place=on_place, whole=whole)
        with ExitStack() as undo:
            undo.callback(model.close)
            if not whole:
                model.wait_but_late()
            undo.pop_all()
        return model

    def open_adapter(self, path: Path, spec: ModelSpec) -> ModelAdapter:
        """By the pool where it is in the store's form and there is room."""
        if not is_stored(path):
            return open_adapter(path, spec)
        try:
            return open_adapter(path, spec, open_pooled_adapter(path, self._loader, room_wait_s=ROOM_WAIT_S))
        except OutOfMemory:
            return open_adapter(path, spec)

    def arrivals(self, on_end: Callable[[StartLoad, Fetched], None]) -> ArrivingWeights:
        """Of models that download into the pool."""
        return ArrivingWeights(self._pool, on_end, waits_for_all=self._for_copies)

    def tier_of(self, path: str) -> Tier:
        """Where `open` would find the model's bytes."""
        folder = Path(path)
        if not is_stored(folder):
            return "disk"
        manifest = read_manifest(folder)
        if self._holds(manifest) or (not self._for_copies and _is_cached(folder, manifest)):
            return "host"
        return "disk"

    def _mapped(self, folder: Path, manifest: Manifest) -> Checkpoint:
        if self._verify:
            check_weights(folder, manifest)
        return StoredModel(folder, manifest=manifest)

    def trim(self, idle_s: float) -> None:
        self._pool.trim(idle_s=idle_s)

    def fit(self, free_bytes: int) -> int:
        """Models between uses may take what nobody else needs; returns what was given back. Of a device with memory of
        its own the host's is no part."""
        return 0 if self._for_copies else self._pool.trim(unpinned_bytes=max(free_bytes, 0))

    def drop_unused(self) -> int:
        """Give back everything that is not in use."""
        return self._pool.trim(unpinned_bytes=0)

    def close(self) -> None:
        self._loader.close()
        self._pool.close()

    def _holds(self, manifest: Manifest) -> bool:
        return pooled_keys(manifest) <= set(self._pool.stats().ready_keys)


def _arriving(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder, ARRIVING) if is_arriving(folder) else None
    except DamagedCheckpoint:
        if is_stored(folder):  # since
            return None
        raise


def _is_cached(folder: Path, manifest: Manifest) -> bool:
    for path, partition in partition_files(folder, manifest):
        with path.open("rb") as file:
            if cached_share(file.fileno(), 0, partition.size) < CACHED:
                return False
    return True
