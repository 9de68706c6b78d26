"""A plan beside others: HarmonyBatch (no partitions), the published two phases alone, and the exact answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.plan.apps import Inputs
from dovetail.plan.batching import App, demand_of
from dovetail.plan.function_profile import FunctionProfile
from dovetail.plan.grouping import (
    HARMONY_BATCH,
    LARGEST_EXACT,
    Group,
    exact_groups,
    merged_groups,
    plan_groups,
    total_cost_per_s,
)
from dovetail.plan.options import ALL_MODES, Mode
from dovetail.plan.prices import PriceSheet
from dovetail.plan.provision import Provisioner


@dataclass(frozen=True)
class Alternative:
    name: str
    groups: tuple[Group, ...]

    @property
    def cost_per_s(self) -> float:
        return total_cost_per_s(self.groups)


def provisioners_of(
    profiles: Mapping[str, FunctionProfile],
    sheet: PriceSheet,
    modes: Sequence[Mode] = ALL_MODES,
    cold_starts: bool = True,
    reserve: float | None = None,
) -> dict[str, Provisioner]:
    return {model: Provisioner(profile, sheet, modes, cold_starts, reserve) for model, profile in profiles.items()}


def alternatives(inputs: Inputs) -> list[Alternative]:
    """Ours first. The exact answer is left out where it would take too long."""
    apps, cold, reserve = inputs.file.applications(), inputs.file.cold_starts, inputs.file.reserve
    ours = provisioners_of(inputs.profiles, inputs.sheet, cold_starts=cold, reserve=reserve)
    harmony = provisioners_of(inputs.profiles, inputs.sheet, HARMONY_BATCH, cold, reserve)
    found = [
        Alternative("plan", tuple(plan_groups(apps, ours))),
        Alternative("two phases alone", tuple(_two_phases(apps, ours))),
        Alternative("HarmonyBatch", tuple(_two_phases(apps, harmony))),
    ]
    if max(sum(app.model == model for app in apps) for model in ours) <= LARGEST_EXACT:
        found.append(Alternative("exact", tuple(exact_groups(apps, ours))))
    return found


def _two_phases(apps: Sequence[App], provisioners: Mapping[str, Provisioner]) -> list[Group]:
    merged: list[Group] = []
    for model, provisioner in provisioners.items():
        merged += merged_groups([app for app in apps if app.model == model], provisioner)
    return merged


def explain(group: Group, provisioner: Provisioner) -> list[str]:
    """Why a group is what it is, in sentences."""
    config, option = group.config, group.config.option
    names = ", ".join(app.name for app in group.apps)
    strictest = group.apps[0]
    lines = [f"{names}: {describe(group)}"]
    lines.append(
        f"  the strictest SLO is {strictest.name}'s {strictest.slo_s:g} s; a full batch runs for {option.p99_s:.3g} s "
        f"(99th percentile), so a batch waits {config.timeout_s:.3g} s in the mean and has {config.expected_batch:.2f} "
        f"of at most {option.batch} requests"
    )
    if config.warm:
        lines.append(f"  {config.warm} function(s) kept warm: a start of {option.cold_s:.3g} s would come too late")
    elif config.cold_share:
        kept = f", for which {config.start_s:.3g} s are kept free" if config.start_s else ""
        lines.append(f"  {config.cold_share:.3%} of batches wait for a start of {option.cold_s:.3g} s{kept}")
    for mode, other in provisioner.explain(demand_of(group.apps)).items():
        if mode is option.mode:
            continue
        if other.config is None:
            lines.append(f"  {mode}: no size keeps the SLO (the fastest takes {other.fastest_s:.3g} s)")
        else:
            more = other.config.cost_per_s / config.cost_per_s - 1
            lines.append(f"  {mode}: {more:+.0%} cost with {_sizes(other.config.option.vcpus)} vCPUs")
    if len(group.apps) > 1:
        apart = [provisioner.best(demand_of((app,))) for app in group.apps]
        total = sum(single.cost_per_s for single in apart if single is not None)
        lines.append(f"  apart, the {len(group.apps)} applications would cost {total / config.cost_per_s - 1:+.0%}")
    return lines


def describe(group: Group) -> str:
    option = group.config.option
    if option.mode is Mode.GPU:
        return f"GPU with {option.gpu_gb:g} GB, batches up to {option.batch}"
    batches = f", batches up to {option.batch}" if option.batch > 1 else ""
    if option.mode is Mode.CPU:
        return f"one CPU function with {option.vcpus[0]:g} vCPUs and {option.memory_gb[0]:.3g} GB{batches}"
    return f"{len(option.vcpus)} stages with {_sizes(option.vcpus)} vCPUs (template {option.template}){batches}"


def _sizes(vcpus: Sequence[float]) -> str:
    return " + ".join(f"{size:g}" for size in vcpus)
