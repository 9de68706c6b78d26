"""Who moves where, so that a model can start on a device that is full (L7): a dynamic program over those who are there.

Moves run at the same time, each to a device of its own: that one of them is taken there says nothing about the next.
What counts is when the last of them has left. Knows neither who asks nor how a move is carried out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

STEPS = 16  # memory is counted in sixteenths of what is missing, rounded so that never too little is freed


@dataclass(frozen=True, slots=True)
class Destination:
    name: str
    seconds: float  # until the guest could go on there


@dataclass(frozen=True, slots=True)
class MovableInstance:
    """An instance in the way."""

    instance: int
    frees_bytes: int
    destinations: tuple[Destination, ...]  # where it may go; the name "" is nowhere, for one that is idle


@dataclass(frozen=True, slots=True)
class Move:
    instance: int
    destination: str  # "" = it only has to be closed


@dataclass(frozen=True, slots=True)
class MovePlan:
    seconds: float  # until the last of them has left
    moves: tuple[Move, ...]


class MakingWay(Protocol):
    """What may be done to those who run where a model would start soonest."""

    def may_displace(self, moves: int, *, is_full: bool) -> bool:
        """For a request that has moved so often; `is_full`: no device is free, where models have them to themselves."""

    def may_go(self, moves: Iterable[int]) -> bool:
        """An instance whose requests have moved so often."""

    def looks_elsewhere(self, *, is_full: bool) -> bool:
        """Its requests are to be accepted elsewhere first."""

    def destination(self, move: Move) -> str | None:
        """Where its requests go on, live; None = they are evicted."""


@dataclass(frozen=True, slots=True)
class Migrating:
    """L7: they go on elsewhere, live, if the start is sooner with that than anywhere else."""

    def may_displace(self, moves: int, *, is_full: bool) -> bool:
        return not is_full  # else there is nowhere to go

    def may_go(self, moves: Iterable[int]) -> bool:
        return True

    def looks_elsewhere(self, *, is_full: bool) -> bool:
        return True

    def destination(self, move: Move) -> str | None:
        return move.destination or None


def migration_s(start_s: float, tokens: int, token_s: float, resume_s: float) -> float:
    """L6: the model is there after `start_s`; recomputing what was said takes a·(t_in + t_out) + b."""
    return start_s + token_s * tokens + resume_s


def who_moves_where(guests: Sequence[MovableInstance], missing_bytes: int) -> MovePlan | None:
    """The soonest way to free so much, with the fewest moves among equals; None if there is none.

    State after the first i guests: (sixteenths freed, destinations taken). Each guest stays, or goes to one of its
    destinations that is not taken yet.
    """
    best: dict[tuple[int, frozenset[str]], MovePlan] = {(0, frozenset()): MovePlan(0.0, ())}
    for guest in guests:
        freed = min(guest.frees_bytes * STEPS // max(missing_bytes, 1), STEPS)
        for (steps, taken), plan in list(best.items()):
            for place in guest.destinations if freed and steps < STEPS else ():
                if place.name not in taken:
                    state = min(steps + freed, STEPS), taken | {place.name} if place.name else taken
                    _keep_sooner(best, state, _with(plan, guest, place))
    complete = [plan for (steps, _), plan in best.items() if steps == STEPS]
    return min(complete, key=_order, default=None)


def _with(plan: MovePlan, guest: MovableInstance, place: Destination) -> MovePlan:
    return MovePlan(max(plan.seconds, place.seconds), (*plan.moves, Move(guest.instance, place.name)))


def _keep_sooner(
    best: dict[tuple[int, frozenset[str]], MovePlan], state: tuple[int, frozenset[str]], plan: MovePlan
) -> None:
    known = best.get(state)
    if known is None or _order(plan) < _order(known):
        best[state] = plan


def _order(plan: MovePlan) -> tuple[float, int]:
    return plan.seconds, len(plan.moves)
