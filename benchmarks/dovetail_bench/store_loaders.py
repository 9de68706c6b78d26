"""Our own store as a contender: the node's loader and host pool, as a worker uses them.

into the pool      disk → chunks of a pool that an earlier load has used, where it stays for every later load
into fresh memory  the same into a pool that was just made: what the very first load costs
mapped             the model is in the pool; a worker maps it and touches every page
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from dovetail.store.host_pool.pool import CHUNK_BYTES, HostPool
from dovetail.store.loading.loader import Loader, LoaderConfig
from dovetail.store.loading.pooled import open_pooled, open_pooled_adapter
from dovetail_bench.contenders import Load, SampleFiles, State
from dovetail_bench.sample_checkpoints import stored_checksum

_PAGE = 4096
_PATIENCE_S = 10.0


class _StoreContender:
    states: tuple[State, ...] = ("cold", "warm")
    reads_store = True
    name = ""

    def files(self, sample: SampleFiles) -> tuple[Path, ...]:
        return sample.blobs

    def prepare(self, sample: SampleFiles, state: State) -> None:
        pass

    def close(self) -> None:
        pass


class IntoPool(_StoreContender):
    def __init__(self, loader: Loader, name: str = "dovetail (pool)") -> None:
        self.name = name
        self._loader = loader

    def prepare(self, sample: SampleFiles, state: State) -> None:
        """The pool's memory was used by an earlier load, the model is not in it."""
        if not self._loader.pool.stats().resident_bytes:
            timed_load(self._loader, sample)
        forget(self._loader.pool)

    def load(self, sample: SampleFiles) -> Load:
        return timed_load(self._loader, sample)


class IntoFreshMemory(_StoreContender):
    name = "dovetail (fresh memory)"

    def __init__(self, config: LoaderConfig) -> None:
        self._config = config

    def load(self, sample: SampleFiles) -> Load:
        pool = pool_for(sample.blobs)
        loader = Loader(pool, self._config)
        try:
            return timed_load(loader, sample)
        finally:
            loader.close()
            pool.close()


class Mapped(_StoreContender):
    states: tuple[State, ...] = ("warm",)

    def __init__(self, loader: Loader) -> None:
        self.name = "dovetail (in the pool)"
        self._loader = loader

    def prepare(self, sample: SampleFiles, state: State) -> None:
        timed_load(self._loader, sample)

    def load(self, sample: SampleFiles) -> Load:
        return timed_load(self._loader, sample, touches=True)


def timed_load(loader: Loader, sample: SampleFiles, *, touches: bool = False) -> Load:
    """From the model's folder to tensors whose bytes are all in memory."""
    started = time.perf_counter()
    opens = open_pooled_adapter if sample.is_adapter else open_pooled
    tensors = opens(sample.stored, loader)
    if touches:
        for ticket in tensors.tickets:
            np.frombuffer(ticket.lease.view(), np.uint8)[::_PAGE].sum()
    seconds = time.perf_counter() - started
    checksum = stored_checksum(tensors)
    tensors.close()
    return Load(tensors.manifest.size_bytes, seconds, checksum)


def pool_for(blobs: tuple[Path, ...]) -> HostPool:
    """Of whole chunks, as large as these files need."""
    return HostPool.create(sum(-(-path.stat().st_size // CHUNK_BYTES) * CHUNK_BYTES for path in blobs))


def forget(pool: HostPool) -> None:
    """Empty the pool. A load that has just ended is let go of by its threads a moment later."""
    deadline = time.monotonic() + _PATIENCE_S
    while (stats := pool.stats()).used_bytes:
        for key in stats.ready_keys:
            pool.evict(key)
        assert time.monotonic() < deadline, f"still held: {stats}"
        time.sleep(0.001)
