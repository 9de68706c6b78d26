"""Urgency of requests, whose turn it is, and whether a node can take one more request (S1, S2, S4).

Works on small views of what a node's instances have to do; knows neither memory nor where else a request could go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class SloRule:
    """S1: the SLOs of a request that brings none of its own."""

    ttft_floor_s: float = 0.5
    ttft_tokens_per_s: float = 512.0
    ttft_cap_s: float = 8.0
    tpot_s: float = 0.25

    def ttft_s(self, input_tokens: int) -> float:
        return min(max(self.ttft_floor_s, input_tokens / self.ttft_tokens_per_s), self.ttft_cap_s)


def next_token_deadline(start_s: float, ttft_s: float, tpot_s: float, produced: int) -> float:
    """S2: when the next token is due; headroom is this minus now."""
    return start_s + ttft_s + tpot_s * produced


class Refusal(StrEnum):
    """Why a node refuses a request. The first three are the cases of S4."""

    FIRST_TOKEN_LATE = "first_token_late"
    NEIGHBOUR_LATE = "neighbour_late"
    DECODE_OVERCOMMITTED = "decode_overcommitted"
    MEMORY = "memory"
    SLOTS = "slots"
    LINK = "link"  # loads that are under way would hold its own back too long
    CONCURRENCY = "concurrency"
    HARDWARE = "hardware"  # this device can never serve this request within its SLO
    CLOSED = "closed"  # the instance is being unloaded, or the node is down


@dataclass(slots=True)
class Load:
    """What one instance has to do next, every duration already overestimated."""

    deadline_s: float  # of its most urgent request; INFINITY when it has nothing to do
    decode_deadline_s: float  # of its most urgent running request; INFINITY when none runs
    prefill_s: float  # sum over its waiting prefills
    decode_s: float  # one iteration of its batch, waiting requests counted as members; 0 when empty
    tpot_s: float  # the strictest pace among its requests
    blocked: bool = False  # loading: it cannot take turns yet, and its deadlines will move by the grace


@dataclass(frozen=True, slots=True)
class Joiner:
    """The request to be added, as seen by the instance that would take it."""

    deadline_s: float  # of its next token
    prefill_s: float  # its own prefill, overestimated
    decode_s: float  # one iteration of the instance with it, overestimated
    tpot_s: float


def validate(loads: Sequence[Load], target: int, joiner: Joiner, start_s: float) -> Refusal | None:
    """S4: shadow validation. `start_s` is when the device is next free; None means that all three cases are clear.

    The future of earliest-deadline-first turns is played in closed form: until the target instance's turn comes, every
    instance with an earlier deadline runs as many iterations as push its deadline past the target's; then the target
    runs its prefills; then everyone must still manage one more iteration in deadline order.
    """
    tpot_s = joiner.tpot_s
    total_decode = joiner.decode_s
    for index, load in enumerate(loads):
        if index != target:
            total_decode += load.decode_s
            tpot_s = min(tpot_s, load.tpot_s)
    if total_decode > tpot_s:
        return Refusal.DECODE_OVERCOMMITTED
    own = loads[target]
    if own.blocked:
        return None  # its prefill starts after the load, and the grace covers that
    turn_deadline = min(own.deadline_s, joiner.deadline_s)
    clock = start_s
    later: list[tuple[float, float]] = []  # (deadline, duration) of what follows the target's prefills
    for index, load in enumerate(loads):
        if index == target or load.blocked or load.deadline_s == INFINITY:
            continue
        clock += _ahead(load, turn_deadline, later)
    clock += own.prefill_s + joiner.prefill_s
    if clock > joiner.deadline_s:
        return Refusal.FIRST_TOKEN_LATE
    if own.decode_deadline_s != INFINITY:
        later.append((own.decode_deadline_s, joiner.decode_s))
    later.sort()
    for deadline, duration in later:
        clock += duration
        if clock > deadline:
            return Refusal.NEIGHBOUR_LATE
    return None


def _ahead(load: Load, turn_deadline: float, later: list[tuple[float, float]]) -> float:
    """Time that a neighbour takes before the target's turn; what it must do afterwards is appended to `later`."""
    if load.deadline_s >= turn_deadline:
        later.append((load.deadline_s, load.prefill_s if load.prefill_s else load.decode_s))
        return 0.0
    if load.prefill_s:  # its prefills come first, and give it one token's time of headroom
        later.append((load.deadline_s + load.tpot_s, load.decode_s))
        return load.prefill_s
    iterations = int((turn_deadline - load.deadline_s) / load.tpot_s) + 1
    later.append((load.deadline_s + iterations * load.tpot_s, load.decode_s))
    return iterations * load.decode_s
