"""Where a model may start, and in which order nodes are asked (S11); when a queued request is given up.

The check of the hardware comes first: a device whose bare prefill or decode time breaks the SLO is passed over. The
paper also passes over CPUs without matrix units; here the measured profile decides, on any processor. Then bin packing:
nodes in use before empty ones, the fullest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from dovetail.policy.latency import Latency


class DeviceKind(StrEnum):
    CPU = "cpu"
    GPU = "gpu"


class ServingNodes(Protocol):
    def takes(self, kind: DeviceKind) -> bool:
        """Nodes of the kind serve."""


@dataclass(frozen=True, slots=True)
class AllNodes:
    def takes(self, kind: DeviceKind) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Hosting:
    """One model shape on one kind of node: what it takes and how fast it runs."""

    weight_bytes: int
    kv_bytes_per_token: int
    latency: Latency
    block_tokens: int = 16
    slots: int = 1  # at most this many instances of this shape on one node
    concurrency: int = 1  # limit of the ServerlessLLM baselines, whole node
    half_concurrency: int = 1  # the same with half a node
    load_s: float = 0.0  # bringing the weights onto the device
    disk_s: float = 0.0  # for so much of it the disk or network of the machine is busy, which its devices share
    weights_in_place: bool = False  # served from host memory: no load, no share of the ledger
    max_kv_tokens: int | None = None  # its KV pool is never made larger
    # Layers of it are read from the disk with every iteration: whoever else has work goes before each of its layers,
    # which take so long to compute. None = all of it is in memory.
    layer_s: float | None = None
    keep_alive_s: float | None = None  # of its own; None = the policy's, infinite = never unloaded


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What of a node stays as it is while the node is there: one record from where it is known to where nodes are
    ranked."""

    name: str
    kind: DeviceKind
    host: str = ""  # its machine; empty = one of its own

    @property
    def machine(self) -> str:
        """What is read from its disk for one of its devices, those for the others wait for."""
        return self.host or self.name


class NodeLoad(Protocol):
    """What packing needs to know of a node."""

    @property
    def facts(self) -> NodeFacts: ...

    @property
    def in_use(self) -> bool: ...

    @property
    def fullness(self) -> float: ...


def can_ever_serve(hosting: Hosting, input_tokens: int, ttft_s: float, tpot_s: float) -> bool:
    """S11: the profile check on an otherwise empty node."""
    latency = hosting.latency
    return latency.prefill_s(input_tokens) <= ttft_s and latency.decode_s(1, input_tokens) <= tpot_s


def is_hopeless(deadline_s: float, now: float) -> bool:
    """A request that still queues when its token is due is dropped."""
    return now > deadline_s
