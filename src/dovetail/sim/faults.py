"""Faults to inject: nodes die, stall, slow down, leave and join; messages are late or lost; work moves."""

from __future__ import annotations

from enum import StrEnum
from random import Random
from typing import NamedTuple


class FaultKind(StrEnum):
    DIE = "die"  # everything on the node is lost; it comes back empty after `duration_s`
    STALL = "stall"  # nothing on the node ends before the stall is over
    SLOW = "slow"  # everything on the node takes `factor` times as long
    LOAD_FAILS = "load_fails"  # the next load on the node fails
    LATE = "late"  # answers and notices of the node reach the controller `factor` seconds late
    DEAF = "deaf"  # questions and orders reach the node `factor` seconds late
    MUTE = "mute"  # questions to the node, or its answers, are lost
    MOVE = "move"  # everything on the node is to go on elsewhere, live (L4)
    DRAIN = "drain"  # the node takes nothing new and is emptied, for `duration_s`
    PARTITION = "partition"  # nothing passes either way for `duration_s`: it is given up, and comes back empty
    LEAVE = "leave"  # the node is emptied, leaves after `duration_s` whatever is left there, and joins again later


class Fault(NamedTuple):
    at_s: float
    kind: FaultKind
    node: int  # index
    duration_s: float
    factor: float = 1.0


def draw_faults(rng: Random, count: int, nodes: int, horizon_s: float) -> list[Fault]:
    """A seeded storm, in order of time."""
    faults = []
    for _ in range(count):
        kind = rng.choice(list(FaultKind))
        factor = rng.uniform(0.05, 3.0) if kind in (FaultKind.LATE, FaultKind.DEAF) else rng.uniform(1.5, 6.0)
        faults.append(Fault(rng.uniform(0, horizon_s), kind, rng.randrange(nodes), rng.uniform(0.5, 15.0), factor))
    return sorted(faults)
