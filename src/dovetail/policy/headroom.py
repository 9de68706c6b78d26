"""Urgency of requests, whose turn it is, and whether a node can take one more request (S1, S2, S4).

Works on small views of what a node's instances have to do; knows neither memory nor where else a request could go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from dovetail.policy.latency import Latency

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
    SILENT = "silent"  # the node did not answer in time


class Prefill(NamedTuple):
    """A prompt that waits to be computed, overestimated."""

    due_s: float  # when its token is due
    urgent_s: float  # by when it should have its turn: earlier than due where an answer must not fall silent
    seconds: float
    tpot_s: float  # its pace from then on
    safety_s: float = INFINITY  # later than its pace from its first token on, its tokens may be; more is not kept
    part_s: float = 0.0  # the smallest part of it
    split_s: float = 0.0  # by which the length of its parts goes
    lost_s: float = 0.0  # what it takes longer with each further part
    start: int = 0  # from this token on it is to be computed
    tokens: int = 0  # so many; 0: it is computed whole


@dataclass(slots=True)
class InstanceDemand:
    """What one instance has to do next, after the turn under way; every duration is overestimated already."""

    deadline_s: float  # of its most urgent request; INFINITY when it has nothing to do
    decode_deadline_s: float  # of its most urgent running request; INFINITY when none runs
    prefill_s: float  # sum over its waiting prefills
    decode_s: float  # one iteration of its batch, waiting requests counted as members; 0 when empty
    tpot_s: float  # the strictest pace among its requests
    blocked: bool = False  # loading: it cannot take turns yet, and its deadlines will move by the grace
    batch: int = 0
    frees_bytes: float = 0.0  # memory that running it to its end is expected to free
    ready_s: float = 0.0  # it takes no turn before: its weights arrive, or its pool is being resized
    spoke_s: float = INFINITY  # when its running requests had their last token, the earliest of these times
    turned_s: float = 0.0  # when its last turn ended
    parted_s: float = 0.0  # likewise, of those that computed a part of a prompt
    prompted_s: float = 0.0  # of its prompts, computed since its running requests had a token
    prefills: tuple[Prefill, ...] = ()  # most urgent first, their deadlines as they will be after a load
    grown_s: float = 0.0  # one iteration when its contexts will have grown
    latency: Latency | None = field(
        default=None, compare=False
    )  # of its model, not overestimated; None: its prompts are computed whole
    overestimate: float = 1.0


class Candidate(NamedTuple):
    """The request to be added, as seen by the instance that would take it."""

    prefill: Prefill  # its own; takes no time where its KV blocks come with it
    decode_s: float  # one iteration of the instance with it, overestimated
    grown_s: float = 0.0  # the same when contexts will have grown


class Contender(Protocol):
    """An instance that could have the next turn."""

    @property
    def deadline_s(self) -> float: ...

    @property
    def urgent_s(self) -> float: ...

    @property
    def frees_bytes(self) -> float: ...


ContenderT = TypeVar("ContenderT", bound=Contender)
SILENCE_MARGIN_S = 0.5  # draining small batches ends this long before somebody would have been silent for too long


def choose_turn(contenders: Sequence[ContenderT], now: float, slack_s: float | None) -> ContenderT | None:
    """S2: whose turn it is. With a slack, the smallest batch runs while everyone has more headroom than that.

    The node asks this for real and shadow validation for play: there is no second copy of the rule.
    """
    best: ContenderT | None = None
    urgent = due = INFINITY
    for one in contenders:
        if one.urgent_s < urgent:
            urgent = one.urgent_s
            best = one
        if one.deadline_s < due:
            due = one.deadline_s
    if slack_s is not None and best is not None and due - now > slack_s and urgent - now > SILENCE_MARGIN_S:
        return min(contenders, key=_drain_key)
    return best


def guards_decodes(now: float, prefill_s: float, urgent_s: float, running_due_s: float) -> bool:
    """Whether a prompt lets the running requests of its model go first: it would make them late, which they are not
    yet, and has time itself."""
    return now <= running_due_s < now + prefill_s and now < urgent_s


def must_be_late(candidate: Candidate, target: InstanceDemand, start_s: float) -> bool:
    """Its first token, whoever its neighbours are."""
    return max(start_s, target.ready_s) + candidate.prefill.seconds > candidate.prefill.due_s


def is_overtaken(now: float, part_s: float, latest_s: float, begins_s: float) -> bool:
    """The same where prompts are computed in parts, for running requests of any model, which have to begin by
    `begins_s`: not even the smallest part of the prompt is over by then, and the prompt has time until `latest_s`."""
    return begins_s < now + part_s and now < latest_s


def _drain_key(one: Contender) -> tuple[float, float]:
    return (-one.frees_bytes, one.deadline_s)


def is_overcommitted(demands: Sequence[InstanceDemand], target: int, candidate: Candidate) -> bool:
    """S4, case 3: one decode iteration of every instance takes longer than the strictest pace of all requests there,
    those of the target included, now or when their contexts will have grown."""
    tpot_s = candidate.prefill.tpot_s
    total_s = max(candidate.decode_s, candidate.grown_s)
    for index, demand in enumerate(demands):
        if demand.tpot_s < tpot_s:
            tpot_s = demand.tpot_s
        if index != target:
            total_s += max(demand.decode_s, demand.grown_s)
    return total_s > tpot_s


def validate_closed(
    demands: Sequence[InstanceDemand], target: int, candidate: Candidate, start_s: float
) -> Refusal | None:
    """S4 in closed form. `start_s` is when the device is next free; None means that all three cases are clear.

    The future of earliest-deadline-first turns is summed up: until the target instance's turn comes, every
    instance with an earlier deadline runs as many iterations as push its deadline past the target's; then the target
    runs its prefills; then everyone must still manage one more iteration in deadline order.
    """
    if is_overcommitted(demands, target, candidate):
        return Refusal.DECODE_OVERCOMMITTED
    own = demands[target]
    if own.blocked:
        return None  # its prefill starts after the load, and the grace covers that
    turn_deadline = min(own.deadline_s, candidate.prefill.due_s)
    clock = start_s
    later: list[tuple[float, float]] = []  # (deadline, duration) of what follows the target's prefills
    for index, demand in enumerate(demands):
        if index == target or demand.blocked or demand.deadline_s == INFINITY:
            continue
        clock += _ahead(demand, turn_deadline, later)
    clock += own.prefill_s + candidate.prefill.seconds
    if clock > candidate.prefill.due_s:
        return Refusal.FIRST_TOKEN_LATE
    if own.decode_deadline_s != INFINITY:
        later.append((own.decode_deadline_s, candidate.decode_s))
    later.sort()
    for deadline, duration in later:
        clock += duration
        if clock > deadline:
            return Refusal.NEIGHBOUR_LATE
    return None


def _ahead(demand: InstanceDemand, turn_deadline: float, later: list[tuple[float, float]]) -> float:
    """Time that a neighbour takes before the target's turn; what it must do afterwards is appended to `later`."""
    if demand.deadline_s >= turn_deadline:
        later.append((demand.deadline_s, demand.prefill_s if demand.prefill_s else demand.decode_s))
        return 0.0
    if demand.prefill_s:  # its prefills come first, and give it one token's time of headroom
        later.append((demand.deadline_s + demand.tpot_s, demand.decode_s))
        return demand.prefill_s
    iterations = int((turn_deadline - demand.deadline_s) / demand.tpot_s) + 1
    later.append((demand.deadline_s + iterations * demand.tpot_s, demand.decode_s))
    return iterations * demand.decode_s
