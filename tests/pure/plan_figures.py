"""The figures of docs/reference/plan.md about planning: `plan_figures.py [CASES]`. Time, distance from the exact
answer over so many random cases, and plans beside HarmonyBatch with what their replay bills."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

from plan_builders import MODELS, random_apps, shipped

from dovetail.plan.batching import App
from dovetail.plan.drive import Load
from dovetail.plan.function_profile import StageSection, read_function_profile
from dovetail.plan.grouping import HARMONY_BATCH, exact_groups, merged_groups, plan_groups, total_cost_per_s
from dovetail.plan.plan_file import make_plan
from dovetail.plan.prices import read_sheet
from dovetail.plan.provision import Provisioner
from dovetail.plan.replay import replay

SLOS = {"moderate": (2.0, 6.0), "loose": (8.0, 20.0)}  # s, least and most of eight applications
HOURS = 500.0


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    plan_times()
    distances(cases)
    for model in MODELS:
        for name, (least, most) in SLOS.items():
            beside_harmony_batch(model, name, least, most)


def plan_times() -> None:
    provisioners = shipped()
    for count, times in ((8, 20), (100, 5), (1000, 1)):
        taken = []
        for seed in range(times):
            apps = random_apps(seed, count)
            begun = time.process_time()
            plan_groups(apps, provisioners)
            taken.append(1e3 * (time.process_time() - begun))
        print(
            f"{count} applications: {statistics.median(taken):.1f} ms, at worst {max(taken):.1f} ms of processor time"
        )


def distances(cases: int) -> None:
    provisioners = shipped()
    ours, phases = [], []
    for seed in range(cases):
        apps = random_apps(seed, 7)
        exact = total_cost_per_s(exact_groups(apps, provisioners))
        ours.append(total_cost_per_s(plan_groups(apps, provisioners)) / exact - 1)
        merged = [merged_groups([app for app in apps if app.model == model], provisioners[model]) for model in MODELS]
        phases.append(sum(map(total_cost_per_s, merged)) / exact - 1)
    for name, found in (("plans", ours), ("two phases alone", phases)):
        print(
            f"{name}: {sum(found) / cases:.2%} over the exact answer in the mean of {cases}, {max(found):.1%} at worst"
        )


def beside_harmony_batch(model: str, name: str, least: float, most: float) -> None:
    """Without cold starts, as in the thesis."""
    profile, sheet = read_function_profile(model), read_sheet("alibaba-fc")
    slos = [least * (most / least) ** (place / 7) for place in range(8)]
    apps = [App(f"a{place}", model, 0.001 * (1 + place % 4), slo) for place, slo in enumerate(slos)]
    provisioners = {model: Provisioner(profile, sheet, cold_starts=False)}
    groups = plan_groups(apps, provisioners)
    cost = total_cost_per_s(groups)
    harmony = total_cost_per_s(merged_groups(apps, Provisioner(profile, sheet, HARMONY_BATCH, cold_starts=False)))
    exact = total_cost_per_s(exact_groups(apps, provisioners))
    plan = make_plan(groups, provisioners)
    found = replay(plan, Load(HOURS * 3600)).totals
    modes = ", ".join(sorted({str(group.config.option.mode) for group in groups}))
    memory = [profile.memory_gb, *(_peak_gb(profile.partitions[group.template].stages) for group in plan.groups
                                   if group.template is not None)]  # fmt: skip
    print(
        f"{model}, {name}: HarmonyBatch {harmony / cost - 1:+.1%}, exact {exact / cost - 1:+.1%}; {modes}; replayed: "
        f"{found.requests} requests, {found.late_share:.2%} late, forecast {found.forecast_error(found.billed):+.1%}; "
        f"GB per function: {', '.join(f'{gb:.2f}' for gb in memory)}"
    )


def _peak_gb(stages: Sequence[StageSection]) -> float:
    return max(stage.memory_gb for stage in stages)


if __name__ == "__main__":
    main()
