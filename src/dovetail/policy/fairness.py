"""Who gives way to a newcomer: nobody who comes without targets waits for the end of other people's long answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

QUANTUM_TOKENS = 100  # that an answer has before it may have to give way to one that has none


class Running(NamedTuple):
    """A choice that runs, as fairness sees it."""

    id: int
    group: int  # of the choices of one request
    produced: int
    is_strict: bool  # its targets were asked for and are kept: it never gives way


def who_gives_way(running: Sequence[Running]) -> int | None:
    """One choice of the request that runs most of them; of requests with one choice, the longest answer beyond the
    quantum. None: nobody has to."""
    choices = Counter(one.group for one in running)
    able = [one for one in running if not one.is_strict]
    able = [one for one in able if choices[one.group] > 1 or one.produced >= QUANTUM_TOKENS]
    return max(able, key=lambda one: (choices[one.group], one.produced, one.id)).id if able else None
