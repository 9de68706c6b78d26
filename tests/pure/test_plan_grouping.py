"""Provisioning and grouping: equivalent timeouts and cold starts against simulation, plans against the oracle."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_builders import make_app, make_profile, make_sheet, random_apps, shipped

from dovetail.plan.batching import App, batch_shares, cold_share, demand_of, exact_batch_shares
from dovetail.plan.dispatch import Batcher, Pool
from dovetail.plan.function_profile import ColdStarts, read_function_profile
from dovetail.plan.grouping import (
    HARMONY_BATCH,
    Infeasible,
    exact_groups,
    merged_groups,
    plan_groups,
    total_cost_per_s,
)
from dovetail.plan.options import Mode, build_tables
from dovetail.plan.prices import read_sheet
from dovetail.plan.provision import Config, Provisioner


def best_config(provisioner: Provisioner, apps: list[App]) -> Config | None:
    return provisioner.best(demand_of(sorted(apps, key=lambda app: app.slo_s)))


def test_the_equivalent_timeout_is_what_batches_wait_in_the_mean() -> None:
    apps = (make_app("a", rate=0.4, slo_s=1.0), make_app("b", rate=0.7, slo_s=2.5), make_app("c", rate=0.2, slo_s=6.0))
    run_s, random = 0.3, Random(1)
    waits = []
    for _ in range(10_000):
        first = random.choices(apps, [app.rate for app in apps])[0]
        later = [random.expovariate(app.rate) + app.slo_s - run_s for app in apps]
        waits.append(min(first.slo_s - run_s, *later))
    assert demand_of(apps).timeout_s(run_s) == pytest.approx(sum(waits) / len(waits), rel=0.02)


def test_a_strict_busy_application_decides_alone_when_a_batch_starts() -> None:
    apps = [make_app("strict", rate=100, slo_s=0.5), *(make_app(f"b{n}", rate=1, slo_s=5 + n) for n in range(50))]
    assert demand_of(apps).timeout_s(0.1) == pytest.approx(0.4, abs=0.02)


def test_exact_batch_sizes_are_those_of_a_simulated_dispatcher() -> None:
    apps = (make_app("a", rate=0.5, slo_s=1.5), make_app("b", rate=2.0, slo_s=4.0), make_app("c", rate=1.0, slo_s=9.0))
    run_s, random, sizes, now = 0.5, Random(2), [0] * 6, 0.0
    batcher = Batcher(6, {app.name: app.slo_s - run_s for app in apps})
    for number in range(20_000):
        gap_s = random.expovariate(3.5)
        due_s = batcher.due_s()
        if due_s is not None and due_s <= now + gap_s and (batch := batcher.flush(due_s)) is not None:
            sizes[len(batch) - 1] += 1
        now += gap_s
        app = random.choices(apps, [app.rate for app in apps])[0]
        if (batch := batcher.add(number, app.name, now, now)) is not None:
            sizes[len(batch) - 1] += 1
    shares = exact_batch_shares(apps, run_s, 6)
    assert sum(shares) == pytest.approx(1.0)
    assert shares == pytest.approx([size / sum(sizes) for size in sizes], abs=0.015)


def test_batch_sizes_are_a_distribution() -> None:
    shares = batch_shares(2.5, 4)
    assert len(shares) == 4
    assert sum(shares) == pytest.approx(1.0)
    assert batch_shares(0.0, 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("rate", "busy_s"), [(0.02, 2.0), (0.2, 2.0), (1.0, 3.0)])
def test_the_share_of_cold_starts_is_that_of_a_simulated_platform(rate: float, busy_s: float) -> None:
    random, pool, batcher = Random(5), Pool(None, 60.0), Batcher(1, {"a": 0.0})
    now, cold, runs, ends = 0.0, 0, 8_000, []
    for number in range(runs):
        now += random.expovariate(rate)
        for end_s, function in sorted(ends):
            if end_s <= now:
                pool.release(function, end_s)
                ends.remove((end_s, function))
        batch = batcher.add(number, "a", now, now)
        assert batch is not None
        pool.expire(now)
        pool.add(batch)
        placed = pool.place()
        if placed is None:
            cold += 1
            started = pool.start_wanted()
            assert started is not None
            pool.ready(started, now)
            placed = pool.place()
            assert placed is not None
        ends.append((now + busy_s, placed.function))
    simulated, predicted = cold / runs, cold_share(rate, busy_s, 60.0)
    assert simulated / 3 - 0.002 < predicted < simulated * 3 + 0.002


def test_joined_stages_are_the_best_of_all_choices() -> None:
    """Against every combination of sizes of a two-stage template."""
    profile, sheet = make_profile(), make_sheet()
    table = next(s for s in build_tables(profile, sheet) if s.mode is Mode.PARTITIONED and s.batch == 1)
    stages = profile.partitions[0].stages
    for limit_s in (0.5, 0.7, 1.0, 2.0):
        sums = [
            sum(stage.latency.p99_s(1, vcpus) for stage, vcpus in zip(stages, sizes, strict=True)) + 0.025
            for sizes in product(sheet.cpu.vcpus, repeat=2)
        ]
        assert any(option.p99_s <= limit_s for option in table.options) == any(total <= limit_s for total in sums)
    costs = [option.costs[-1] for option in table.options]
    assert costs == sorted(costs, reverse=True)


def test_the_cheapest_feasible_configuration_wins() -> None:
    """Against every option for sale, one by one."""
    provisioner = Provisioner(make_profile(), make_sheet(), cold_starts=False)
    for rate, slo_s in product((0.05, 1.0, 20.0), (0.2, 0.5, 1.0, 3.0)):
        demand = demand_of((make_app(rate=rate, slo_s=slo_s),))
        found = provisioner.best(demand)
        tables = build_tables(make_profile(), make_sheet())
        singles = [o.costs[0] for s in tables if s.batch == 1 for o in s.options if o.p99_s <= slo_s]
        assert found is not None
        assert found.option.p99_s <= slo_s
        assert found.cost_per_request <= min(singles) * (1 + 1e-9)


def test_rare_requests_with_a_strict_slo_get_a_function_that_stays_warm() -> None:
    profile = make_profile(cold_start_s=ColdStarts(cpu=5.0, gpu=8.0, stage=4.0))
    rare = make_app(rate=0.002, slo_s=1.0)
    config = best_config(Provisioner(profile, make_sheet()), [rare])
    assert config is not None
    assert config.warm == 1
    unsold = make_sheet(rates=make_sheet().rates.model_copy(update={"idle_share": None}))
    assert best_config(Provisioner(profile, unsold), [rare]) is None
    patient = best_config(Provisioner(profile, unsold), [replace(rare, slo_s=8.0)])
    assert patient is not None
    assert patient.start_s > 0


def test_an_impossible_slo_names_the_application_and_the_fastest_there_is() -> None:
    with pytest.raises(Infeasible, match=r"apps\.a\.slo: toy cannot be answered within 0\.001 s"):
        plan_groups([make_app(slo_s=0.001)], {"toy": Provisioner(make_profile(), make_sheet())})


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 6))
def test_every_application_is_in_one_group_that_keeps_its_slo(seed: int, count: int) -> None:
    provisioners = shipped()
    apps = random_apps(seed, count)
    groups = plan_groups(apps, provisioners)
    assert sorted(app.name for group in groups for app in group.apps) == sorted(app.name for app in apps)
    for group in groups:
        assert group.config.option.p99_s + group.config.start_s <= group.apps[0].slo_s
        assert len({app.model for app in group.apps}) == 1
    apart = sum(best.cost_per_s for app in apps if (best := best_config(provisioners[app.model], [app])) is not None)
    assert total_cost_per_s(groups) <= apart * (1 + 1e-9)


def test_plans_come_within_three_percent_of_the_exact_answer_in_the_mean() -> None:
    provisioners = shipped()
    gaps = []
    for seed in range(20):
        apps = random_apps(seed, 7)
        exact = total_cost_per_s(exact_groups(apps, provisioners))
        gaps.append(total_cost_per_s(plan_groups(apps, provisioners)) / exact - 1)
    assert min(gaps) > -1e-9
    assert sum(gaps) / len(gaps) < 0.03


def test_partitions_make_plans_cheaper_than_harmonybatch_at_loose_slos() -> None:
    profile, sheet = read_function_profile("wrn50-4"), read_sheet("alibaba-fc")
    apps = [App(f"a{n}", "wrn50-4", 0.02, 4.0 + 2 * n) for n in range(4)]
    ours = plan_groups(apps, {"wrn50-4": Provisioner(profile, sheet, cold_starts=False)})
    harmony = merged_groups(apps, Provisioner(profile, sheet, HARMONY_BATCH, cold_starts=False))
    assert total_cost_per_s(ours) < total_cost_per_s(harmony)
    assert {group.config.option.mode for group in ours} == {Mode.PARTITIONED}
