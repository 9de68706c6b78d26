"""What the controller decides: where work goes and why. Plain records, which the runtime carries on and logs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.request import RequestState


class How(StrEnum):
    """By which step of placement a request got its place."""

    JOIN = "join"  # an instance that was there
    PREEMPT = "preempt"  # an instance that was there, after a neighbour gave way (S9)
    START = "start"  # a new instance


@dataclass(frozen=True, slots=True)
class Placed:
    work: RequestState
    node: NodeHandle
    instance: int
    how: How


@dataclass(frozen=True, slots=True)
class Queued:
    """No place now; it tries again when something has changed, and every so often."""

    work: RequestState
    refusals: dict[str, int]  # how often each reason was given


@dataclass(frozen=True, slots=True)
class Extended:
    """Its targets cannot be kept and it is served late: its next token is due then."""

    work: RequestState
    due_s: float


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """It has left: its token was due while it was without a place, or nothing can ever serve it."""

    work: RequestState
    reason: str  # "deadline", "hardware" or "too_large"
    refusals: dict[str, int]  # when it last asked
    retry_after_s: float | None = None  # when it is worth asking again; None = never


@dataclass(frozen=True, slots=True)
class Failed:
    """It has left, because its node was lost."""

    work: RequestState
    reason: str  # "worker_lost", "worker_restarting" or "no_worker"
    message: str
    retry_after_s: float | None = None  # when it is worth asking again; None: it is to blame itself, perhaps


@dataclass(frozen=True, slots=True)
class NoNode:
    """No node has come up for too long: every request has ended."""

    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The node cannot be reached: its shell takes it for lost."""

    node: NodeHandle


@dataclass(frozen=True, slots=True)
class Kill:
    """The node's process hangs: its shell ends it, and starts another."""

    node: NodeHandle
    stood_s: float  # so long it did nothing


@dataclass(frozen=True, slots=True)
class Moving:
    """It is between places until then (its KV blocks travel, or it has nowhere to go)."""

    work: RequestState
    retry_at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Migrated:
    """L4: it goes on there, where its tokens were recomputed while the source went on."""

    work: RequestState
    node: NodeHandle
    instance: int
    source: str
    rounds: int  # of tokens that the destination computed before the last few
    gap: int  # tokens that were left for the end
    produced: int  # tokens that it had then
    reason: str


class DisplacedInstance(NamedTuple):
    instance: int
    requests: tuple[int, ...]  # none = it is idle
    destination: str | None  # the node where they go on, live; None = they are evicted


@dataclass(frozen=True, slots=True)
class Displace:
    """L7: it waits until these have left a node, where it then starts sooner than anywhere else."""

    work: RequestState
    node: NodeHandle
    start_s: float  # until its weights should be there, everything included
    moves: tuple[DisplacedInstance, ...]

    @property
    def instances(self) -> set[tuple[str, int]]:
        """Those who make way, each with its node."""
        return {(self.node.name, move.instance) for move in self.moves}


@dataclass(frozen=True, slots=True)
class Warmed:
    """The model has an instance that nobody asked for, or cannot have one."""

    model: str
    node: NodeHandle | None
    refusals: dict[str, int]


Said = RequestRejected | Failed | NoNode | Warmed | GiveUp | Kill  # to whoever drives the controller
Decision = Warmed | Migrated | Displace | Placed | Queued | Extended | RequestRejected | Moving
