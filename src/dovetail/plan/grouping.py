"""Which applications share a function: the two-phase merge (P5), HarmonyBatch as its baseline, and the exact answer.

Applications of different models never share. Within a model they are sorted by SLO; the merge joins neighbours only,
the oracle tries every partition of the set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.errors import ConfigError
from dovetail.plan.batching import App, demand_of
from dovetail.plan.options import Mode
from dovetail.plan.provision import Config, Provisioner

# How many neighbours phase I looks past one that does not pay: all of them would make a plan quadratic in applications.
LOOK_AHEAD = 3
HARMONY_BATCH = (Mode.CPU, Mode.GPU)
LARGEST_EXACT = 12
MOST_CUTS = 16  # applications of a model up to which every run of neighbours is tried


@dataclass(frozen=True)
class Group:
    apps: tuple[App, ...]  # by rising SLO
    config: Config

    @property
    def rate(self) -> float:
        return sum(app.rate for app in self.apps)

    @property
    def uses_gpu(self) -> bool:
        return self.config.option.mode is Mode.GPU


class Infeasible(ConfigError):
    pass


def plan_groups(apps: Sequence[App], provisioners: Mapping[str, Provisioner]) -> list[Group]:
    groups: list[Group] = []
    for model, provisioner in provisioners.items():
        own = sorted((app for app in apps if app.model == model), key=lambda app: app.slo_s)
        merged = merged_groups(own, provisioner)
        if 2 < len(own) <= MOST_CUTS:
            merged = min(merged, _best_cuts(own, provisioner), key=total_cost_per_s)
        groups += merged
    return groups


def merged_groups(apps: Sequence[App], provisioner: Provisioner) -> list[Group]:
    """The two phases alone, of one model, as published."""
    singles = [_single(app, provisioner) for app in sorted(apps, key=lambda app: app.slo_s)]
    return _merge_gpu(_merge_cpu(singles, provisioner), provisioner)


def _best_cuts(apps: Sequence[App], provisioner: Provisioner) -> list[Group]:
    """The cheapest cut of the sorted list into runs of neighbours: quadratic, where merging pair by pair stops at the
    first step that does not pay."""
    best: list[tuple[float, list[Group]]] = [(0.0, [])]
    for end in range(1, len(apps) + 1):
        found: tuple[float, list[Group]] = (float("inf"), [])
        for first in range(end):
            cost, groups = best[first]
            config = provisioner.best(demand_of(apps[first:end])) if cost < found[0] else None
            if config is not None and cost + config.cost_per_s < found[0]:
                found = cost + config.cost_per_s, [*groups, Group(tuple(apps[first:end]), config)]
        best.append(found)
    return best[-1][1]


def total_cost_per_s(groups: Sequence[Group]) -> float:
    return sum(group.config.cost_per_s for group in groups)


def _single(app: App, provisioner: Provisioner) -> Group:
    config = provisioner.best(demand_of((app,)))
    if config is None:
        fastest = min((r.fastest_s for r in provisioner.explain(demand_of((app,))).values()), default=float("inf"))
        raise Infeasible(
            f"apps.{app.name}.slo: {app.model} cannot be answered within {app.slo_s:g} s at {app.rate:g} requests/s; "
            f"the fastest configuration for sale takes {fastest:.3g} s (99th percentile, without a cold start)"
        )
    return Group((app,), config)


def _merge_cpu(groups: list[Group], provisioner: Provisioner) -> list[Group]:
    """Phase I: neighbours that run on CPUs, whole or partitioned."""
    merged = list(groups)
    first = 0
    while first < len(merged):
        last = first + 1
        while last < min(len(merged), first + 1 + LOOK_AHEAD) and not any(g.uses_gpu for g in merged[first : last + 1]):
            joined = _join(merged[first : last + 1], provisioner)
            if joined is None:
                last += 1
            else:
                merged[first : last + 1] = [joined]
                last = first + 1
        first += 1
    return merged


def _merge_gpu(groups: list[Group], provisioner: Provisioner) -> list[Group]:
    """Phase II: adjacent pairs of which at least one has a GPU, if together they have one."""
    merged = list(groups)
    place = 0
    while place < len(merged) - 1:
        pair = merged[place : place + 2]
        joined = _join(pair, provisioner) if any(group.uses_gpu for group in pair) else None
        if joined is not None and joined.uses_gpu:
            merged[place : place + 2] = [joined]
            place = max(place - 1, 0)
        else:
            place += 1
    return merged


def _join(groups: Sequence[Group], provisioner: Provisioner) -> Group | None:
    """None unless one group costs less than all of them apart."""
    apps = tuple(app for group in groups for app in group.apps)
    config = provisioner.best(demand_of(apps))
    if config is None or config.cost_per_s >= sum(group.config.cost_per_s for group in groups):
        return None
    return Group(apps, config)


def exact_groups(apps: Sequence[App], provisioners: Mapping[str, Provisioner]) -> list[Group]:
    """The cheapest of all partitions, by dynamic programming over subsets: 3^n steps, for small cases only."""
    groups: list[Group] = []
    for model, provisioner in provisioners.items():
        own = sorted((app for app in apps if app.model == model), key=lambda app: app.slo_s)
        if len(own) > LARGEST_EXACT:
            raise ConfigError(
                f"the exact answer is for at most {LARGEST_EXACT} applications of a model, not {len(own)}"
            )
        groups += _exact(own, provisioner)
    return groups


def _exact(apps: Sequence[App], provisioner: Provisioner) -> list[Group]:
    size = 1 << len(apps)
    whole: list[Group | None] = [None] * size
    for subset in range(1, size):
        members = tuple(app for place, app in enumerate(apps) if subset >> place & 1)
        config = provisioner.best(demand_of(members))
        whole[subset] = Group(members, config) if config is not None else None
    cost, chosen = [0.0] + [float("inf")] * (size - 1), [0] * size
    for subset in range(1, size):
        lowest = subset & -subset
        part = subset
        while part:  # every part of the subset that has its first member
            group = whole[part] if part & lowest else None
            if group is not None and (total := group.config.cost_per_s + cost[subset ^ part]) < cost[subset]:
                cost[subset], chosen[subset] = total, part
            part = (part - 1) & subset
    if cost[-1] == float("inf"):
        raise Infeasible("no partition of the applications keeps every SLO")
    return list(_chosen(whole, chosen, size - 1))


def _chosen(whole: Sequence[Group | None], chosen: Sequence[int], subset: int) -> Sequence[Group]:
    groups = []
    while subset:
        group = whole[chosen[subset]]
        assert group is not None
        groups.append(group)
        subset ^= chosen[subset]
    return groups
