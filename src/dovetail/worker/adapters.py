"""Adapters in a worker's memory: read in a thread, counted in the node's ledger, there while requests name them and a
while longer.

    wanted ──read──▶ counted ──▶ bound to instances as their requests enter ──▶ idle ──▶ gone
                        └─ no room: the request is refused for want of memory, as for KV

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
from typing import NamedTuple

from dovetail.engine.adapters import AdapterMatrices, read_matrices
from dovetail.errors import DovetailError
from dovetail.messages import Ask
from dovetail.node.ports import AdapterWeights
from dovetail.node.protocol import Propose
from dovetail.policy.headroom import Refusal
from dovetail.store.adapter_parts import open_adapter
from dovetail.types import AdapterRef, ModelCard
from dovetail.worker.driver import NodeDriver
from dovetail.worker.runner import ModelRunner
from dovetail.worker.shelf import Shelf

log = logging.getLogger("dovetail.worker")

IDLE_SHARE = 1 / 16  # of the node's memory, for adapters that no request names


class _Order(NamedTuple):
    ref: AdapterRef
    card: ModelCard


class _Read(NamedTuple):
    order: _Order
    matrices: AdapterMatrices | None
    problem: str  # why there are none


@dataclass(eq=False)
class _Entry:
    number: int  # of its account in the ledger
    model: str
    matrices: AdapterMatrices | None
    problem: str
    is_doomed: bool = False  # nobody may ask for it any more

    @property
    def num_bytes(self) -> int:
        return self.matrices.num_bytes if self.matrices is not None else 0


class AdapterRack:
    """Of the worker's own thread, but for the reading; `wake` is called from that for every adapter that was read."""

    def __init__(self, driver: NodeDriver, shelf: Shelf | None, wake: Callable[[], None]) -> None:
        self._driver = driver
        self._shelf = shelf
        self._wake = wake
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by key, the least recently used first
        self._waiting: dict[str, list[Ask]] = {}  # proposals, by the adapter that is being read for them
        self._withdrawn: set[int] = set()  # by number of the question
        self._numbers = count(1)
        self._orders: queue.Queue[_Order] = queue.Queue()
        self._results: queue.Queue[_Read] = queue.Queue()
        self._thread: threading.Thread | None = None

    def hold(self, message: Ask, card: ModelCard) -> bool:
        """The proposal waits until its adapter is there. False: it need not."""
        ref = message.request.adapter if message.request is not None else None
        if ref is None:
            return False
        if ref.key in self._entries:
            self._entries.move_to_end(ref.key)
            self._entries[ref.key].is_doomed = False
            return False
        if ref.key not in self._waiting:
            self._order(_Order(ref, card))
        self._waiting.setdefault(ref.key, []).append(message)
        return True

    def withdraw(self, request: int) -> None:
        """Nobody wants its proposals any more."""
        for message in (one for waiting in self._waiting.values() for one in waiting):
            if isinstance(message.question, Propose) and message.question.request.id == request:
                self._withdrawn.add(message.number)

    def take(self) -> list[tuple[Ask, Refusal | None]]:
        """Proposals that need not wait any more, to be answered at once, some with a refusal. One that was withdrawn
        meanwhile is answered all the same: by that its sender knows that it may ask again."""
        (ref, card), matrices, problem = self._results.get_nowait()
        if problem:
            log.error("%s: the adapter %s cannot be read: %s", card.name, ref.name, problem)
        entry = _Entry(next(self._numbers), card.name, matrices, problem)
        has_room = self._count(entry)
        if has_room:
            self._entries[ref.key] = entry
        refusal = None if has_room else Refusal.MEMORY
        waited = self._waiting.pop(ref.key)
        answers = [(one, Refusal.CLOSED if one.number in self._withdrawn else refusal) for one in waited]
        self._withdrawn.difference_update(one.number for one in waited)
        return answers

    def bind(self, runner: ModelRunner, key: str) -> None:
        """A request that names it enters this instance."""
        entry = self._entries[key]
        runner.bind_adapter(key, entry.matrices, entry.problem)

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
        ledger = self._driver.home.node.residency.ledger
        for key in idle:
            entry = self._entries[key]
            is_over = entry.is_doomed or bool(entry.problem) or not self._driver.instances_of(entry.model)
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
        self._driver.home.node.residency.drop_adapter(entry.number)
        self._driver.adapters_changed()

    # Reading

    def _order(self, order: _Order) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="adapters")
            self._thread.start()
        self._orders.put(order)

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            self._results.put(self._read(order))
            self._wake()

    def _read(self, order: _Order) -> _Read:
        try:
            weights = self._open(order)
            try:
                return _Read(order, read_matrices(weights), "")
            finally:
                weights.close()
        except (DovetailError, OSError) as error:
            return _Read(order, None, str(error))
        except (ValueError, RuntimeError, MemoryError) as error:  # a file that changes while it is read
            return _Read(order, None, f"{order.ref.path}: {type(error).__name__}: {error}")

    def _open(self, order: _Order) -> AdapterWeights:
        path, spec = Path(order.ref.path), order.card.spec
        return open_adapter(path, spec) if self._shelf is None else self._shelf.open_adapter(path, spec)
