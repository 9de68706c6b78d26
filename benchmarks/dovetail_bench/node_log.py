"""What a real node's event log says of its starts: when each model was loaded and how long that took.

The log's times and a load generator's are on the same monotonic clock of the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dovetail_bench.attainment import Grace
from dovetail_bench.load import Answer


class Start(msgspec.Struct, frozen=True):
    model: str
    began_s: float  # monotonic clock
    ready_s: float

    @property
    def seconds(self) -> float:
        return self.ready_s - self.began_s


class _Line(msgspec.Struct):
    t: float = 0.0
    event: str = ""
    instance: int | None = None
    model: str = ""


def read_starts(path: Path) -> list[Start]:
    """In order of becoming ready. Loads that never ended are left out."""
    began: dict[int, float] = {}
    starts = []
    decode = msgspec.json.Decoder(_Line).decode
    with path.open("rb") as file:
        for text in file:
            if not text.endswith(b"\n"):  # being written
                break
            line = decode(text)
            if line.instance is None:
                continue
            if line.event == "load":
                began[line.instance] = line.t
            elif line.event == "instanceready" and line.instance in began:
                starts.append(Start(line.model, began.pop(line.instance), line.t))
    return starts


def grace_of(starts: Sequence[Start], run_began_s: float) -> Grace:
    """S1: a request that waited for its model to load has that much more time; waiting for a place is no grace."""
    by_model: dict[str, list[Start]] = {}
    for start in starts:
        by_model.setdefault(start.model, []).append(start)

    def grace_s(answer: Answer) -> float:
        if not answer.text_s:
            return 0.0
        arrival, first = run_began_s + answer.arrival_s, run_began_s + answer.text_s[0]
        awaited = [start for start in by_model.get(answer.model, ()) if arrival < start.ready_s < first]
        return sum(min(start.seconds, start.ready_s - arrival) for start in awaited)

    return grace_s
