"""Adapters in a worker's memory: counted before they are used, idle ones first to go, nobody's while they are named."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_adapters import save_adapter

from dovetail.cluster.intake import Submission, works_of
from dovetail.engine.adapters import AdapterMatrices, PackedAdapter
from dovetail.engine.devices.cpu import CpuDevice
from dovetail.errors import OutOfMemory
from dovetail.messages import Ask
from dovetail.modelspec import ModelSpec
from dovetail.node.protocol import Propose
from dovetail.policy.compositions import SERVED
from dovetail.policy.headroom import SloRule
from dovetail.policy.placement import DeviceKind
from dovetail.sched.sequence import sequences_of
from dovetail.store import describe
from dovetail.types import AdapterRef, ModelCard, Request, SamplingParams
from dovetail.worker.adapters import AdapterCache, Packs
from dovetail.worker.driver import NodeDriver, SequenceState

BYTES = 4 * 3 * 4 * (2 * (48 + 48) + 2 * (48 + 16) + 3 * (48 + 88))  # rank 4, three layers, float32


class Rig:
    """One in a node with room for `room` adapters, whose reads are waited for."""

    def __init__(self, folder: Path, base: Path, room: float, device: Packs | None = None) -> None:
        self.card: ModelCard = describe(base, "llama")
        loads: Any = None  # nothing is loaded here
        self.driver = NodeDriver("n", DeviceKind.CPU, int(room * BYTES), SERVED, loads, lambda: 0.0)
        self.woken: queue.Queue[None] = queue.Queue()
        self.cache = AdapterCache(self.driver, device or CpuDevice(1), None, lambda: self.woken.put(None))
        self.refs = {}
        for seed, name in enumerate("abc"):
            self.refs[name] = AdapterRef(name, str(save_adapter(folder / name, base, seed=seed)), "1")
        self._number = 0

    def ask(self, name: str) -> Ask:
        self._number += 1
        sampling = SamplingParams(max_tokens=1, seed=0)
        request = Request(f"r{self._number}", "llama", (1, 2), sampling, adapter=self.refs[name])
        (work,) = works_of(Submission("llama", 2, 0.0), self._number, 0.0, SloRule(), 1.0)
        return Ask(self._number, Propose(work.record()), request)

    def read(self, *asks: Ask) -> list[bool]:
        assert [self.awaits(ask) for ask in asks] == [True] * len(asks)
        answers = self.take()
        assert [id for id, _ in answers] == [ask.number for ask in asks]
        return [is_there for _, is_there in answers]

    def awaits(self, ask: Ask) -> bool:
        assert ask.request is not None
        return self.cache.awaits(ask.number, ask.request.adapter, self.card, "f32")

    def take(self) -> list[tuple[int, bool]]:
        """Once it is read, and placed unless there is no room."""
        while True:
            self.woken.get(timeout=30)
            answers = self.cache.take()
            if answers:
                return answers

    def is_there(self, name: str) -> bool:
        return self.refs[name].key in self.cache._entries

    def use(self, ask: Ask) -> None:
        """The request is here from now on."""
        assert ask.request is not None
        (sequence,) = sequences_of(ask.request, ask.number)
        self.driver.states[ask.number] = SequenceState(ask.number, "llama", sequence)

    @property
    def planned(self) -> int:
        return self.driver.home.node.device.ledger.planned


@pytest.fixture
def make_rig(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Callable[[float], Rig]:
    return lambda room: Rig(tmp_path, tiny_folder("llama"), room)


def test_an_adapter_is_read_once_for_all_who_wait_and_counted_until_it_goes(make_rig: Callable[[float], Rig]) -> None:
    rig = make_rig(10)
    first, second = rig.ask("a"), rig.ask("a")
    assert rig.read(first, second) == [True, True]
    assert rig.planned == rig.cache.num_bytes == BYTES
    assert not rig.awaits(rig.ask("a"))
    rig.use(first)
    rig.cache.doom(rig.refs["a"].key)
    assert rig.is_there("a")  # a request still names it
    rig.driver.states.clear()
    rig.cache.tend()
    assert not rig.is_there("a")
    assert rig.planned == 0


def test_idle_adapters_give_way_and_those_in_use_do_not(make_rig: Callable[[float], Rig]) -> None:
    rig = make_rig(2.5)
    used = rig.ask("a")
    assert rig.read(used) == [True]
    rig.use(used)
    assert rig.read(rig.ask("b")) == [True]
    last = rig.ask("c")
    assert rig.read(last) == [True]
    assert [rig.is_there(name) for name in "abc"] == [True, False, True]
    rig.use(last)
    assert rig.read(rig.ask("b")) == [False]
    assert rig.planned == 2 * BYTES


def test_what_cannot_be_read_takes_no_memory_and_is_tried_again_later(make_rig: Callable[[float], Rig]) -> None:
    rig = make_rig(10)
    path = Path(rig.refs["a"].path) / "adapter_model.safetensors"
    weights = path.read_bytes()
    path.write_bytes(weights[:-100])
    assert rig.read(rig.ask("a")) == [True]  # its requests fail with what is wrong
    assert rig.planned == 0
    rig.cache.tend()
    path.write_bytes(weights)
    assert rig.read(rig.ask("a")) == [True]
    assert rig.planned == BYTES


class Card(PackedAdapter):
    """A device whose memory is not the host's: what is packed for it, placed on it and closed."""

    num_bytes = 3 * BYTES

    def __init__(self, *, is_full: bool = False) -> None:
        self.is_full = is_full
        self.planned: Callable[[], int] = lambda: 0
        self.steps: list[tuple[str, int]] = []  # with what the ledger had counted then

    def pack_adapter(self, adapter: AdapterMatrices, spec: ModelSpec, dtype: str) -> PackedAdapter:
        assert (adapter.num_bytes, dtype) == (BYTES, "f32")
        self.steps.append(("packed", self.planned()))
        return self

    def place(self) -> None:
        self.steps.append(("placed", self.planned()))
        if self.is_full:
            raise OutOfMemory("somebody else has it")

    def close(self) -> None:
        self.steps.append(("closed", self.planned()))


@pytest.mark.parametrize("is_full", [False, True])
def test_a_devices_memory_is_counted_before_it_is_taken_and_given_back_before_it_is_free(
    is_full: bool, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    card = Card(is_full=is_full)
    rig = Rig(tmp_path, tiny_folder("llama"), 4.0, card)
    card.planned = lambda: rig.planned
    assert rig.read(rig.ask("a")) == [not is_full]
    rig.cache.doom(rig.refs["a"].key)
    assert card.steps == [("packed", 0), ("placed", 3 * BYTES), ("closed", 3 * BYTES)]
    assert rig.planned == 0
    card.is_full = False
    assert rig.read(rig.ask("b")) == [True]
    used = rig.ask("b")
    rig.use(used)
    assert rig.read(rig.ask("c")) == [False], "twice three do not fit into four"
    assert card.steps[3:] == [("packed", 0), ("placed", 3 * BYTES), ("packed", 3 * BYTES), ("closed", 3 * BYTES)]
    assert rig.planned == 3 * BYTES
