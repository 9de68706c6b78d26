"""Adapters in a worker's memory: read and placed by a thread, counted in the node's ledger in between, there while
requests name them and a while longer.

    wanted ──read──▶ counted ──place──▶ bound to instances as their requests enter ──▶ idle ──▶ gone
                        └─ no room: the request is evicted for want of memory, as for KV

A device has it only after it was counted; from then on the host need not keep it.

Idle ones are kept within IDLE_SHARE of the node's memory, the least recently used goes first; they go with their model.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple, Protocol

from dovetail.engine.adapters import AdapterMatrices, PackedAdapter, read_matrices
from dovetail.errors import DovetailError, OutOfMemory
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import AdapterWeights
from dovetail.store.hf.adapter_parts import open_adapter
from dovetail.types import AdapterRef, ModelCard
from dovetail.worker.driver import NodeDriver
from dovetail.worker.runner import ModelRunner
from dovetail.worker.weight_cache import WeightCache

log = logging.getLogger("dovetail.worker")

IDLE_SHARE = 1 / 16  # of the node's memory, for adapters that no request names


class Packs(Protocol):
    """A device, as far as adapters need it."""

    def pack_adapter(self, adapter: AdapterMatrices, spec: ModelSpec, dtype: str) -> PackedAdapter: ...


class _Order(NamedTuple):
    ref: AdapterRef
    card: ModelCard
    dtype: str  # that the model is computed in


@dataclass(eq=False)
class _Entry:
    number: int  # of its account in the ledger
    order: _Order
    packed: PackedAdapter | None = None
    problem: str = ""  # why there is none
    is_counted: bool = False
    is_placed: bool = False
    is_doomed: bool = False  # nobody may ask for it any more

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes if self.packed is not None else 0

    def give_up(self, problem: str = "") -> None:
        self.problem = problem
        if self.packed is not None:
            self.packed.close()
            self.packed = None


class AdapterCache:
    """Of the worker's own thread, but for the reading; `wake` is called from that for every adapter that was read."""

    def __init__(
        self, driver: NodeDriver, device: Packs, weight_cache: WeightCache | None, wake: Callable[[], None]
    ) -> None:
        self._driver = driver
        self._device = device
        self._weight_cache = weight_cache
        self._wake = wake
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by key, the least recently used first
        self._waiting: dict[str, set[int]] = {}  # requests, by the adapter that is being read for them
        self._numbers = count(1)
        self._orders: queue.Queue[_Entry] = queue.Queue()  # to be read, or to be placed
        self._results: queue.Queue[_Entry] = queue.Queue()
        self._thread: threading.Thread | None = None

    def awaits(self, id: int, ref: AdapterRef | None, card: ModelCard, dtype: str) -> bool:
        """The request waits until its adapter is there, for a model that is computed in this type. False: it need
        not."""
        if ref is None:
            return False
        if ref.key in self._entries:
            self._entries.move_to_end(ref.key)
            self._entries[ref.key].is_doomed = False
            return False
        if ref.key not in self._waiting:
            self._order(_Entry(next(self._numbers), _Order(ref, card, dtype)))
        self._waiting.setdefault(ref.key, set()).add(id)
        return True

    def take(self) -> list[tuple[int, bool]]:
        """Requests that need not wait any more, and whether their adapter is there: else there is no memory for it.
        None yet, where an adapter that was read has to be placed first."""
        entry = self._results.get_nowait()
        if entry.packed is not None and not entry.is_counted and self._count(entry):
            self._orders.put(entry)
            return []
        if entry.problem:
            log.error("%s: the adapter %s: %s", entry.order.card.name, entry.order.ref.name, entry.problem)
        is_there = entry.is_placed or bool(entry.problem)  # requests fail with the problem
        if is_there:
            self._entries[entry.order.ref.key] = entry
        else:
            self._release(entry)
        return [(id, is_there) for id in sorted(self._waiting.pop(entry.order.ref.key))]

    def bind(self, runner: ModelRunner, key: str) -> None:
        """A request that names it enters this instance."""
        entry = self._entries[key]
        runner.bind_adapter(key, entry.packed, entry.problem)

    def doom(self, key: str) -> None:
        """It goes as soon as no request names it."""
        if key in self._entries:
            self._entries[key].is_doomed = True
            self.tend()

    def tend(self) -> None:
        """Let go of what nobody needs."""
        if not self._entries:
            return
        idle = self._idle()
        spare = sum(self._entries[key].num_bytes for key in idle)
        ledger = self._driver.home.node.device.ledger
        for key in idle:
            entry = self._entries[key]
            is_over = entry.is_doomed or bool(entry.problem) or not self._driver.instances_of(entry.order.card.name)
            if is_over or spare > IDLE_SHARE * ledger.capacity:
                spare -= entry.num_bytes
                self._drop(key)

    def drop_idle(self) -> int:
        """The host is short of memory; returns the bytes that were given back."""
        idle = self._idle()
        given = sum(self._entries[key].num_bytes for key in idle)
        for key in idle:
            self._drop(key)
        return given

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries.values())

    def _count(self, entry: _Entry) -> bool:
        """Into the ledger; idle ones give way for it."""
        residency = self._driver.home.node.residency
        idle = self._idle()
        while not residency.keep_adapter(entry.number, entry.num_bytes):
            if not idle:
                return False
            self._drop(idle.pop(0))
        entry.is_counted = True
        self._driver.adapters_changed()
        return True

    def _idle(self) -> list[str]:
        """Keys that no request names, the least recently used first."""
        named = {state.sequence.adapter for state in self._driver.states.values()}
        return [key for key in self._entries if key not in named]

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key)
        for runner in self._driver.runners.values():
            runner.drop_adapter(key)
        self._release(entry)

    def _release(self, entry: _Entry) -> None:
        """Its memory, and then what the ledger has of it."""
        entry.give_up(entry.problem)
        if entry.is_counted:
            self._driver.home.node.residency.drop_adapter(entry.number)
            self._driver.adapters_changed()

    def close(self) -> None:
        """After the instances that they are bound to."""
        for entry in self._entries.values():
            entry.give_up()
        self._entries.clear()

    # Reading and placing

    def _order(self, entry: _Entry) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="adapters")
            self._thread.start()
        self._orders.put(entry)

    def _run(self) -> None:
        while True:
            entry = self._orders.get()
            try:
                if entry.packed is None:
                    entry.packed = self._read(entry.order)
                else:
                    entry.packed.place()
                    entry.is_placed = True
            except OutOfMemory:  # the ledger said that there is room: somebody else has it
                log.exception("%s: no memory for the adapter %s", entry.order.card.name, entry.order.ref.name)
            except (DovetailError, OSError) as error:
                entry.give_up(str(error))
            except (ValueError, RuntimeError, MemoryError) as error:  # a file that changes while it is read
                entry.give_up(f"{entry.order.ref.path}: {type(error).__name__}: {error}")
            self._results.put(entry)
            self._wake()

    def _read(self, order: _Order) -> PackedAdapter:
        weights = self._open(order)
        try:
            return self._device.pack_adapter(read_matrices(weights), order.card.spec, order.dtype)
        finally:
            weights.close()

    def _open(self, order: _Order) -> AdapterWeights:
        path, spec = Path(order.ref.path), order.card.spec
        return open_adapter(path, spec) if self._weight_cache is None else self._weight_cache.open_adapter(path, spec)
