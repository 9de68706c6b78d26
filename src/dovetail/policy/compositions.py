"""A policy as a composition of strategies, each with its own parameters, and the one composition that a server runs.

A strategy decides one kind of question (how long a turn may be, whether a late request is served, ...) and is an object
that node and controller ask; they know neither a composition's name nor which strategy they have. The compositions of
papers, and strategies with which nobody serves, are in `sim/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from typing import Any

from dovetail.errors import ConfigError
from dovetail.policy.consolidate import Consolidating, ConsolidatingOnBoth, InstanceOrder
from dovetail.policy.displace import MakingWay, Migrating
from dovetail.policy.lateness import Lateness, ServeLate
from dovetail.policy.memory import DemandByModel, MemoryDemand
from dovetail.policy.parameters import AdmissionParameters, TurnOrder, TurnParameters
from dovetail.policy.placement import AllNodes, ServingNodes
from dovetail.policy.queueing import Queueing
from dovetail.policy.reclaiming import ReclaimIdle, Reclaiming
from dovetail.policy.relief import LiveRelief, Relief
from dovetail.policy.resizing import InPlace, Resizing
from dovetail.policy.sharing import OneOfEach, Sharing
from dovetail.policy.startup import CountLoads, Loads, SoonestStart, StartRanking
from dovetail.policy.work import Phases, Together


@dataclass(frozen=True, slots=True)
class Composition:
    """The strategies of a server, unless others are given."""

    name: str = "dovetail"
    # Turns and admission of one device
    turns: TurnParameters = field(default_factory=TurnParameters)  # whose iteration is next, of which tokens
    admission: AdmissionParameters = field(default_factory=AdmissionParameters)  # would every request still be in time
    memory: MemoryDemand = field(default_factory=DemandByModel)  # how much requests should have
    resizing: Resizing = field(default_factory=InPlace)  # what a pool's growth takes
    sharing: Sharing = field(default_factory=OneOfEach)  # which instances are on one device together
    reclaiming: Reclaiming = field(default_factory=ReclaimIdle)  # when idle ones go
    loads: Loads = field(default_factory=CountLoads)  # whether a start waits too long for its weights
    # Placement
    nodes: ServingNodes = field(default_factory=AllNodes)  # which nodes serve
    instances: InstanceOrder = field(default_factory=Consolidating)  # which of a model is asked first
    starts: StartRanking = field(default_factory=SoonestStart)  # which nodes are asked to start one
    making_way: MakingWay = field(default_factory=Migrating)  # what may be done to those who run there
    relief: Relief = field(default_factory=LiveRelief)  # what is done for a node that its requests outgrow
    phases: Phases = field(default_factory=Together)  # whether prefill and decode are apart
    # Requests without a place
    queueing: Queueing = field(default_factory=Queueing)  # when they ask again, and in which order
    lateness: Lateness = field(default_factory=ServeLate)  # what becomes of one whose token is due

    def named(self, name: str) -> Composition:
        return replace(self, name=name)

    def having(self, **changes: object) -> Composition:
        """The same with other strategies of these kinds (a class takes over the parameters that it shares with the one
        before), and other values of these parameters, whichever strategy has them."""
        changed = {kind: self._made(kind, value) for kind, value in changes.items() if kind in KINDS}
        strategies: dict[str, Any] = {kind: changed.get(kind, getattr(self, kind)) for kind in KINDS}
        for name in changes.keys() - changed.keys():
            kind = self._kind_of(name, strategies)
            strategies[kind] = replace(strategies[kind], **{name: changes[name]})
        return Composition(self.name, **strategies)

    def _made(self, kind: str, strategy: Any) -> Any:
        if not isinstance(strategy, type):
            return strategy
        before = getattr(self, kind)
        names = {one.name for one in fields(before)}
        return strategy(**{one.name: getattr(before, one.name) for one in fields(strategy) if one.name in names})

    def _kind_of(self, parameter: str, strategies: Mapping[str, Any]) -> str:
        for kind, strategy in strategies.items():
            if any(one.name == parameter for one in fields(strategy)):
                return kind
        there = ", ".join([*KINDS, *sorted(self.parameters())])
        raise ConfigError(f"{parameter}: the policy {self.name} has no such parameter; there are {there}")

    def parameters(self) -> dict[str, object]:
        """Of all strategies, by name."""
        strategies: list[Any] = [getattr(self, kind) for kind in KINDS]
        return {one.name: getattr(strategy, one.name) for strategy in strategies for one in fields(strategy)}

    def values(self) -> dict[str, Any]:
        """For the header of a log: the strategy of each kind and its parameters."""
        strategies: dict[str, Any] = {kind: getattr(self, kind) for kind in KINDS}
        return {"name": self.name} | {
            kind: {"strategy": type(one).__name__, **asdict(one)} for kind, one in strategies.items()
        }


KINDS = tuple(one.name for one in fields(Composition) if one.name != "name")


def parsed(name: str, text: str, example: object) -> Any:
    """The value of a parameter that is written so, of the type of another value of it; None: it has none."""
    if example is None:
        return text
    try:
        if isinstance(example, bool):
            return {"true": True, "false": False}[text.lower()]
        return type(example)(text)  # type: ignore[call-arg]
    except (ValueError, KeyError) as error:
        kinds = [one.value for one in type(example)] if isinstance(example, Enum) else [type(example).__name__]
        raise ConfigError(f"{name}: expected {' or '.join(kinds)}, not {text!r}") from error


# What a server runs.
SERVED = Composition().having(
    turn_order=TurnOrder.DRAIN,
    max_silence_s=2.0,
    guard_decodes=True,
    part_s=0.1,
    pack_prompts=True,
    smooth_answers=True,
    split_decodes=True,
    mix_decodes=True,
    max_stall=2.0,
    instances=ConsolidatingOnBoth,
)
