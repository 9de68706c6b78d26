"""The event log: one JSON object a line, keys in a fixed order, times to the microsecond."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from dovetail.cluster.decisions import Decision
from dovetail.node.node import Node
from dovetail.node.work import Work
from dovetail.policy.latency import Latency
from dovetail.policy.placement import Hosting
from dovetail.sim.profile import BATCHES

# Points of a latency table: as close as profiles are measured where most requests are.
_LENGTHS = (1, *(2**power for power in range(3, 16)))
_BATCHES = (*BATCHES, 128, 256)


class Kind(NamedTuple):
    """What a turn's pace depends on."""

    is_prefill: bool
    is_beside_load: bool  # weights were read meanwhile, by the same cores and memory
    size: int  # tokens of the prompt, or sequences that decode: the power of two above

    @property
    def name(self) -> str:
        return f"{self.family}/{self.size}"

    @property
    def family(self) -> str:
        return ("prefill" if self.is_prefill else "decode") + ("_beside_load" if self.is_beside_load else "")


def kind_of(is_prefill: bool, is_beside_load: bool, amount: int) -> Kind:
    return Kind(is_prefill, is_beside_load, 1 << amount.bit_length())


@dataclass
class Pace:
    """How long a real node's turns took beside what was expected before anything was learnt, and what lay between."""

    turns: int = 0
    gap_s: float = 0.0
    took_s: dict[str, float] = field(default_factory=dict)  # by the name of the kind
    expected_s: dict[str, float] = field(default_factory=dict)

    def add(self, kind: Kind, took_s: float, expected_s: float, gap_s: float) -> None:
        self.turns += 1
        self.gap_s += gap_s
        for name in (kind.name, kind.family):
            self.took_s[name] = self.took_s.get(name, 0.0) + took_s
            self.expected_s[name] = self.expected_s.get(name, 0.0) + expected_s

    @property
    def mean_gap_s(self) -> float:
        return self.gap_s / self.turns if self.turns else 0.0

    def factor(self, kind: Kind) -> float:
        """As the same kind of that size came out, else the kind as a whole."""
        for name in (kind.name, kind.family):
            if self.expected_s.get(name, 0.0) > 0.0:
                return self.took_s[name] / self.expected_s[name]
        return 1.0


def open_log(path: Path) -> EventLog:
    """A new log in this file; every line is there as soon as it is written."""
    return EventLog(path.open("w", buffering=1, encoding="utf-8"))


class EventLog:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def close(self) -> None:
        self._file.close()

    def header(self, **settings: Any) -> None:
        """First line: everything that a replay needs."""
        self._file.write(json.dumps({"dovetail_sim": 1, **settings}) + "\n")

    def start_real(self, node: Node, device: str) -> None:
        """First line of a real node's log: what a simulation of the same node needs. Its models follow as they come."""
        self.header(
            real=True,
            node=node.name,
            device=device,
            memory_bytes=node.residency.ledger.capacity,
            knobs=asdict(node.knobs),
        )

    def hosting(self, now: float, model: str, hosting: Hosting) -> None:
        values = {field.name: getattr(hosting, field.name) for field in fields(hosting) if field.name != "latency"}
        if values["keep_alive_s"] == float("inf"):
            values["keep_alive_s"] = -1.0
        self.write(now, "hosting", model=model, **values, latency=tabulate(hosting.latency))

    def write(self, now: float, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"t": round(now, 6), "event": event, **values}) + "\n")

    def said(self, now: float, node: str, event: str, record: Any) -> None:
        self.write(now, event, node=node, **_flat(record))

    def decision(self, now: float, decision: Decision) -> None:
        self.write(now, type(decision).__name__.lower(), **_flat(decision))


def _flat(record: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for known in fields(record):
        value = getattr(record, known.name)
        if isinstance(value, Work):
            values["request"] = value.id
        elif isinstance(value, float):
            values[known.name] = round(value, 6) if value != float("inf") else None
        else:
            values[known.name] = value
    return values


def tabulate(latency: Latency) -> dict[str, Any]:
    """A latency model as the points of a profile."""
    return {
        "prefill_ms": [[n, round(latency.prefill_s(n) * 1e3, 4)] for n in _LENGTHS],
        "decode_ms": [
            {
                "mean_length": length,
                "batch_ms": [[batch, round(latency.decode_s(batch, batch * length) * 1e3, 4)] for batch in _BATCHES],
            }
            for length in _LENGTHS[1:]
        ],
    }
