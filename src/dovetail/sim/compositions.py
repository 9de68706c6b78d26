"""Compositions by name: faithful SLINFER and its ablations, the baselines of two papers (S12), and Dovetail."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from dovetail.errors import ConfigError
from dovetail.policy.compositions import KINDS, SERVED, Composition, parsed
from dovetail.policy.consolidate import Consolidating, ConsolidatingOnBoth
from dovetail.policy.displace import Migrating
from dovetail.policy.headroom import INFINITY
from dovetail.policy.lateness import ServeLate
from dovetail.policy.memory import DemandByModel
from dovetail.policy.parameters import AdmissionParameters, TurnOrder, TurnParameters
from dovetail.policy.placement import AllNodes
from dovetail.policy.queueing import Queueing
from dovetail.policy.reclaiming import ReclaimIdle
from dovetail.policy.relief import LiveRelief
from dovetail.policy.resizing import InPlace
from dovetail.policy.sharing import OneOfEach
from dovetail.policy.startup import CountLoads, SoonestStart
from dovetail.policy.work import Together
from dovetail.sim.baselines import (
    Alone,
    Copying,
    DemandByMean,
    Disaggregated,
    Evicting,
    FinishingBegun,
    GivingUp,
    GpusOnly,
    IgnoreLoads,
    KeepIdle,
    Packing,
    RandomStart,
    ReclaimAlike,
    RoundRobin,
    Slots,
    SoonestOnly,
    Spreading,
    SpreadStart,
    StaticShares,
    Staying,
    Unlimited,
)
from dovetail.sim.memory_order import QueueingByMemory
from dovetail.sim.relief import NoRelief, Recomputing

SLINFER = Composition(
    "slinfer",
    memory=DemandByMean(),
    resizing=Copying(),
    sharing=Slots(),
    reclaiming=KeepIdle(),
    loads=IgnoreLoads(),
    starts=Packing(),
    making_way=Staying(),
    relief=Recomputing(),
    queueing=Queueing(change_s=INFINITY),
    lateness=GivingUp(),
)
SLLM_C = SLINFER.named("sllm+c").having(sharing=StaticShares(), instances=RoundRobin())
SLLM = SLLM_C.named("sllm").having(nodes=GpusOnly())
SLLM_CS = SLLM_C.named("sllm+c+s").having(num_shares=2)
# ServerlessLLM's own evaluation: a model has a GPU to itself, and the schedulers differ in where one starts (L6, L7).
SERVERLESSLLM = SLLM.named("serverlessllm").having(
    slo_scale=1.0,
    instances=Consolidating(num_victims=0),
    resizing=InPlace(),
    queueing=Queueing(),
    starts=SoonestStart(),
    making_way=Migrating(),
)
SHEPHERD = SERVERLESSLLM.named("shepherd*").having(making_way=Evicting())
LOCALITY = SERVERLESSLLM.named("locality").having(making_way=Staying(), starts=SoonestOnly())
RANDOM = SERVERLESSLLM.named("random").having(making_way=Staying(), starts=RandomStart())
# Each improvement over SLINFER by name, so that its share can be shown.
IMPROVEMENTS: dict[str, dict[str, object]] = {
    "in-place resize": {"resizing": InPlace()},
    "memory decides, not slots": {"sharing": Unlimited(), "weights_share": 0.75},
    "run what frees most": {"turn_order": TurnOrder.DRAIN},
    "memory by the model's answers": {"memory": DemandByModel},
    "answers go on": {"max_silence_s": 2.0, "guard_decodes": True, "lateness": FinishingBegun()},
    "ask again on change": {"queueing": Queueing()},
    "more weights where requests are short": {"short_requests": 5},
}
DOVETAIL = SLINFER.named("dovetail")
for _changes in IMPROVEMENTS.values():
    DOVETAIL = DOVETAIL.having(**_changes)

# What a server runs for requests that bring targets: a late one is given up, as SLINFER gives up all of its own.
SERVED_ON_TIME = SERVED.named("served").having(lateness=FinishingBegun())

POLICIES = {
    one.name: one
    for one in (
        *(SLINFER, SLLM, SLLM_C, SLLM_CS, DOVETAIL, SERVED_ON_TIME),
        *(SERVERLESSLLM, SHEPHERD, LOCALITY, RANDOM),
    )
}

# Parts that --without switches off.
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-cpu": {"nodes": GpusOnly()},
    "no-sharing": {"sharing": Alone()},
    "no-consolidation": {"instances": Spreading(), "starts": SpreadStart()},
    "watermark-0": {"watermark": 0.0},
    "pd": {"phases": Disaggregated(), "num_victims": 0, "relief": NoRelief()},
}


def policy(name: str, ablations: tuple[str, ...] = (), **parameters: object) -> Composition:
    if name not in POLICIES:
        raise ConfigError(f"--policy {name}: unknown, expected one of {', '.join(POLICIES)}")
    composition = POLICIES[name]
    for ablation in ablations:
        if ablation not in ABLATIONS:
            raise ConfigError(f"--without {ablation}: unknown, expected one of {', '.join(ABLATIONS)}")
        composition = composition.having(**ABLATIONS[ablation])
    return composition.having(**parameters)


# By kind: what there is to choose from, by name
STRATEGIES: dict[str, dict[str, type[Any]]] = {
    kind: {one.__name__: one for one in classes}
    for kind, classes in (
        ("turns", (TurnParameters,)),
        ("admission", (AdmissionParameters,)),
        ("instances", (Consolidating, ConsolidatingOnBoth, Spreading, RoundRobin)),
        ("starts", (SoonestStart, SoonestOnly, Packing, SpreadStart, RandomStart)),
        ("making_way", (Migrating, Evicting, Staying)),
        ("sharing", (OneOfEach, Unlimited, Slots, Alone, StaticShares)),
        ("memory", (DemandByModel, DemandByMean)),
        ("resizing", (InPlace, Copying)),
        ("reclaiming", (ReclaimIdle, KeepIdle, ReclaimAlike)),
        ("loads", (CountLoads, IgnoreLoads)),
        ("nodes", (AllNodes, GpusOnly)),
        ("relief", (LiveRelief, Recomputing, NoRelief)),
        ("phases", (Together, Disaggregated)),
        ("queueing", (Queueing, QueueingByMemory)),
        ("lateness", (ServeLate, FinishingBegun, GivingUp)),
    )
}


def strategy_of(kind: str, name: str) -> type[Any]:
    if name not in STRATEGIES[kind]:
        raise ConfigError(f"{kind}: no strategy is called {name!r}; there are {', '.join(STRATEGIES[kind])}")
    return STRATEGIES[kind][name]


def with_text(composition: Composition, name: str, text: str) -> Composition:
    """With a strategy of a kind, or the value of a parameter, as a command line writes it."""
    if name in KINDS and name not in composition.parameters():
        return composition.having(**{name: strategy_of(name, text)})
    return composition.having(**{name: parsed(name, text, composition.parameters().get(name))})


def from_values(values: Mapping[str, Any]) -> Composition:
    """What `Composition.values` was written of. JSON has no infinity."""
    strategies = {kind: strategy_of(kind, values[kind]["strategy"])() for kind in KINDS}
    base = Composition(values["name"], **strategies)
    known = base.parameters()
    there = {name: value for kind in KINDS for name, value in values[kind].items() if name != "strategy"}
    return base.having(**{name: _as(known[name], value) for name, value in there.items()})


def _as(example: object, value: Any) -> Any:
    if value is None:
        return float("inf")
    return type(example)(value) if isinstance(example, Enum) else value
