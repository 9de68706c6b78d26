"""Who held which device over the last minute, turn by turn, and how the KV memory of each model grew and shrank."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel, Field

from dovetail.messages import Stats, ToGateway, TurnSpan

Told = TypeVar("Told")

WINDOW_S = 60.0
MAX_TURNS = 20_000  # of one node, whatever the window
MAX_CELLS = 10_000  # of a window: more than a screen has columns


class TurnRecord(BaseModel):
    model: str
    ago_s: float = Field(description="since it began")
    seconds: float
    tokens: int
    best_effort: bool = Field(default=False, description="nobody waited for any of its requests")


class MemoryRecord(BaseModel):
    ago_s: float
    kv_bytes: dict[str, int] = Field(description="by model")


class NodeMemory(BaseModel):
    node: str
    memory: list[MemoryRecord]


class NodeTurns(NodeMemory):
    turns: list[TurnRecord] = Field(description="in the order in which they began")


class CellRecord(BaseModel):
    cell: int = Field(description="from `cell` to `cell` + 1 times `cell_s`, by the server's clock")
    turns: int = Field(description="that began in it")
    held_s: dict[str, float] = Field(description="of the cell, by model")
    best_effort_s: dict[str, float] = Field(description="of these, by iterations of best effort alone")


class NodeShares(NodeMemory):
    cells: list[CellRecord] = Field(description="in the order of time; a cell that is told of again has more of it")


class TurnWindow(BaseModel):
    window_s: float
    now_s: float = Field(description="by the server's clock; as `after` it asks for what is told of later")


class TurnHistory(TurnWindow):
    nodes: list[NodeTurns]


class TurnShares(TurnWindow):
    cell_s: float
    nodes: list[NodeShares]


@dataclass
class _NodeHistory:
    turns: deque[tuple[float, TurnSpan]] = field(default_factory=lambda: deque(maxlen=MAX_TURNS))  # when told of
    memory: deque[tuple[float, dict[str, int]]] = field(default_factory=lambda: deque(maxlen=MAX_TURNS))


class TurnWatch:
    """Observes what workers report. A worker's clock is this machine's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: dict[str, _NodeHistory] = {}

    def observe(self, node: str, message: ToGateway) -> None:
        if not isinstance(message, Stats):
            return
        now, history = self._clock(), self._nodes.setdefault(node, _NodeHistory())
        history.turns.extend((now, span) for span in sorted(message.spans, key=lambda span: span.started_s))
        history.memory.append((now, {item.model: item.kv_committed_bytes for item in message.instances}))
        self._forget(history, now)

    def history(self, after: float = 0.0) -> TurnHistory:
        """Of the window, what was told of after this moment."""
        now = self._clock()
        nodes = [self._of_node(name, history, now, after) for name, history in self._nodes.items()]
        return TurnHistory(window_s=WINDOW_S, now_s=now, nodes=nodes)

    def shares(self, num_cells: int, after: float = 0.0) -> TurnShares:
        """The same by cells of time: hundreds of turns a second are as many columns as a picture has, no more."""
        now, cell_s = self._clock(), WINDOW_S / num_cells
        nodes = [self._shares_of_node(name, history, now, after, cell_s) for name, history in self._nodes.items()]
        return TurnShares(window_s=WINDOW_S, cell_s=cell_s, now_s=now, nodes=nodes)

    def _shares_of_node(self, name: str, history: _NodeHistory, now: float, after: float, cell_s: float) -> NodeShares:
        self._forget(history, now)
        cells = _spread((span for _, span in _since(history.turns, after)), cell_s)
        return NodeShares(node=name, cells=cells, memory=_memory(history, now, after))

    def _of_node(self, name: str, history: _NodeHistory, now: float, after: float) -> NodeTurns:
        self._forget(history, now)
        new = [span for _, span in _since(history.turns, after)]
        return NodeTurns(
            node=name,
            turns=[
                TurnRecord(
                    model=span.model,
                    ago_s=round(now - span.started_s, 4),
                    seconds=span.seconds,
                    tokens=span.tokens,
                    best_effort=span.is_best_effort,
                )
                for span in new
            ],
            memory=_memory(history, now, after),
        )

    def _forget(self, history: _NodeHistory, now: float) -> None:
        while history.turns and history.turns[0][1].started_s < now - WINDOW_S:
            history.turns.popleft()
        while history.memory and history.memory[0][0] < now - WINDOW_S:
            history.memory.popleft()


def _memory(history: _NodeHistory, now: float, after: float) -> list[MemoryRecord]:
    return [MemoryRecord(ago_s=round(now - at, 3), kv_bytes=kv) for at, kv in _since(history.memory, after)]


def _spread(spans: Iterable[TurnSpan], cell_s: float) -> list[CellRecord]:
    turns: dict[int, int] = {}
    held: defaultdict[int, dict[str, float]] = defaultdict(dict)
    best_effort: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for span in spans:
        first = int(span.started_s // cell_s)
        turns[first] = turns.get(first, 0) + 1
        for cell, seconds in _cells_of(span, cell_s):
            for shares in (held, best_effort) if span.is_best_effort else (held,):
                shares[cell][span.model] = shares[cell].get(span.model, 0.0) + seconds
    return [
        CellRecord(
            cell=cell,
            turns=turns.get(cell, 0),
            held_s=_rounded(held[cell]),
            best_effort_s=_rounded(best_effort.get(cell, {})),
        )
        for cell in sorted(held)
    ]


def _cells_of(span: TurnSpan, cell_s: float) -> Iterator[tuple[int, float]]:
    """Seconds of it in each."""
    at, end = span.started_s, span.started_s + span.seconds
    last = int(end // cell_s)
    for cell in range(int(at // cell_s), last):
        yield cell, (cell + 1) * cell_s - at
        at = (cell + 1) * cell_s
    yield last, end - at


def _rounded(held_s: Mapping[str, float]) -> dict[str, float]:
    return {model: round(seconds, 5) for model, seconds in held_s.items()}


def _since(told: deque[tuple[float, Told]], after: float) -> list[tuple[float, Told]]:
    """The latest, which are few; in their order."""
    new = list(itertools.takewhile(lambda entry: entry[0] > after, reversed(told)))
    return new[::-1]
