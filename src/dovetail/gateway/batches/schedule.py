"""Whose line is next: keys by what they have had, of a key its batches by what they have had, of a batch the model that
costs least to have. Pure; time is an argument.

What one has had is counted in tokens, those of running lines by estimate. A model that has to be loaded is asked when
the others are ahead by what loading it costs, and then as long as it has lines that are due: it is loaded once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from dovetail.gateway.batches.lines import BatchLines


class NextLine(NamedTuple):
    batch: str
    number: int
    model: str


@dataclass(eq=False)
class _Entry:
    id: str
    owner: str
    models: tuple[str, ...]  # names by number
    lines: BatchLines
    done: float = 0.0  # tokens of lines that have ended, and what it began with

    @property
    def running(self) -> float:
        """Tokens of running lines, as far as is known by now."""
        return self.lines.num_taken * self.lines.mean_tokens

    @property
    def tokens(self) -> float:
        return self.done + self.running


class LineSchedule:
    """Lines of all batches in progress."""

    def __init__(self) -> None:
        self._batches: dict[str, _Entry] = {}
        self._done: dict[str, float] = {}  # by owner: tokens of lines that have ended

    def add(self, batch: str, owner: str, models: tuple[str, ...], lines: BatchLines) -> None:
        """A newcomer has had as much as whoever has had least: it neither waits for the past nor is it owed any."""
        owners = {entry.owner for entry in self._batches.values()}
        entry = _Entry(batch, owner, models, lines)
        if owner not in owners:
            least = min((self._done[other] for other in owners), default=0.0)
            self._done[owner] = max(self._done.get(owner, 0.0), least)
        else:
            entry.done = min(one.done for one in self._batches.values() if one.owner == owner)
        self._batches[batch] = entry

    def remove(self, batch: str) -> None:
        """What it has had stays its owner's."""
        del self._batches[batch]

    def take(
        self,
        now: float,
        load_tokens: Callable[[str], float],
        has_room: Callable[[str, int], bool],
        held: Collection[str] = (),
    ) -> Iterator[NextLine]:
        """While a line of its model has room beside so many. What is the same for all batches is asked once."""
        running = sum(entry.lines.num_taken for entry in self._batches.values())
        load_tokens = cache(load_tokens)
        while True:
            room = cache(lambda model, running=running: has_room(model, running))
            line = self.next(now, load_tokens, room, held)
            if line is None:
                return
            yield line
            running += 1

    def next(
        self,
        now: float,
        load_tokens: Callable[[str], float],
        has_room: Callable[[str], bool],
        held: Collection[str] = (),
    ) -> NextLine | None:
        """`load_tokens`: what could be computed while the model is loaded, 0 if it is there. `held`: batches."""
        had = defaultdict(float, self._done)
        for entry in self._batches.values():
            had[entry.owner] += entry.running
        found = [
            (had[entry.owner] + cost, entry.tokens + cost, cost, order, number, entry)
            for order, entry in enumerate(self._batches.values())
            if entry.id not in held
            for number in entry.lines.models
            if has_room(entry.models[number])
            for cost in (load_tokens(entry.models[number]),)
        ]
        for *_, number, entry in sorted(found, key=lambda one: one[:5]):
            line = entry.lines.take(number, now)
            if line is not None:
                return NextLine(entry.id, line, entry.models[number])
        return None

    def done(self, batch: str, number: int, tokens: int) -> None:
        entry = self._batches[batch]
        entry.done += tokens
        self._done[entry.owner] += tokens
        entry.lines.done(number, tokens)

    def give_back(self, batch: str, number: int, not_before: float) -> None:
        self._batches[batch].lines.give_back(number, not_before)
