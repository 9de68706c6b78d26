"""Weights in the tiers of simulated machines, and ServerlessLLM's schedulers over them (L3, L6, L7)."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev
from typing import cast

import pytest
from fleet_builders import Fleet
from sim_builders import make_hosting, make_work
from typer.testing import CliRunner

from dovetail.cli.sim import app
from dovetail.cluster.asking import Asking
from dovetail.cluster.decisions import Displace
from dovetail.cluster.request import Search
from dovetail.cluster.starting import _displace
from dovetail.policy.placement import Hosting
from dovetail.profiles.storage import SLLM_CLUSTER, Storage, Tier
from dovetail.sim.baselines import GivingUp
from dovetail.sim.metrics import Fate
from dovetail.sim.serverlessllm import SCHEDULERS, Cell, arrivals_of, build_cell, run_cell
from dovetail.sim.setup import _by_tier
from dovetail.sim.tiers import Machine
from dovetail.sim.trace import Arrival

GIB = 2**30
STORAGE = Storage("test", 25 * GIB, 45 * GIB, 20.0 * GIB, 5.0 * GIB, 1.0 * GIB)


def make_machine(models: str = "abc", *, is_stocked: bool = True) -> Machine:
    hosting = make_hosting(10.0)
    return Machine("m", STORAGE, dict.fromkeys(models, _by_tier(STORAGE, hosting)), is_stocked=is_stocked)


def test_what_was_loaded_stays_in_memory_until_others_need_the_room() -> None:
    machine = make_machine()
    assert machine.loaded("a") == ["a"]
    machine.loaded("b")
    assert machine.tier("a") is machine.tier("b") is Tier.MEMORY
    assert sorted(machine.loaded("c")) == ["a", "c"], "what is offered of both is another thing now"
    assert machine.tier("a") is Tier.DISK
    assert machine.hostings["a"].load_s == 2.0
    assert machine.hostings["c"].load_s == 0.5


def test_a_disk_that_is_full_lets_the_least_recently_used_go() -> None:
    machine = make_machine("abcdef", is_stocked=False)
    for model in "abcdef":
        assert machine.tier(model) is Tier.REMOTE
        machine.loaded(model)
    assert [machine.tier(model) for model in "abcdef"] == [Tier.REMOTE] * 2 + [Tier.DISK] * 2 + [Tier.MEMORY] * 2


def test_loads_from_disk_wait_for_each_other_and_loads_from_memory_do_not() -> None:
    machine = make_machine()
    machine.loaded("c")
    assert machine.begin_load("a", 0.0, 0.0) == 2.0
    assert machine.begin_load("b", 0.0, 0.0) == 4.0
    assert machine.begin_load("c", 0.0, 0.0) == 0.5
    assert machine.begin_load("a", 0.0, 1.0) == 2.5, "it arrives for another device, and is not read twice"
    assert machine.loads == {Tier.MEMORY: 2, Tier.DISK: 2, Tier.REMOTE: 0}


def test_tiers_that_work_one_after_another_take_the_sum() -> None:
    assert SLLM_CLUSTER.load_s(Tier.REMOTE, 10**10) == 8.0
    slow = Storage("slow", 0, 0, 10e9, 5e9, 1e9, is_pipelined=False)
    assert slow.load_s(Tier.REMOTE, 10**10) == 11.0


def test_a_network_that_each_has_to_itself_makes_nobody_wait() -> None:
    alone = replace(STORAGE, is_queued=False)
    machine = Machine("m", alone, dict.fromkeys("ab", _by_tier(alone, make_hosting(10.0))), is_stocked=False)
    assert machine.begin_load("a", 0.0, 0.0) == machine.begin_load("b", 0.0, 0.0) == 10.0
    assert machine.hostings["a"].disk_s == 0.0


@pytest.mark.parametrize("system", ["serverlessllm", "shepherd*", "random", "locality"])
def test_every_scheduler_serves_everything_and_is_the_same_with_the_same_seed(system: str) -> None:
    cell = Cell("8", system, rps=1.4, cv=2.0)
    runs = [build_cell(cell, seed=3, span_s=20.0) for _ in range(2)]
    first, second = [run.run() for run in runs]
    assert first.count(Fate.FINISHED) == len(first.records)
    assert [record.started_s for record in first.records] == [record.started_s for record in second.records]
    assert not runs[0].cluster.controller.displacements
    assert not runs[0].cluster.controller.seeker.placer.leaving


def test_moving_away_beats_preemption_and_random_placement_where_the_paper_says_so() -> None:
    cells = {name: Cell("8", name, dataset="ShareGPT", rps=0.6, cv=2.0, servers=2) for name in SCHEDULERS[:3]}
    rows = {name: run_cell(cell, (0, 1), span_s=80.0) for name, cell in cells.items()}
    ours, preempting, at_random = rows.values()
    assert ours["moved"] > 0
    assert at_random["mean_s"] > 1.1 * ours["mean_s"]
    assert preempting["mean_s"] > 1.3 * ours["mean_s"]
    assert preempting["p99_s"] > 1.3 * ours["p99_s"]


def test_figures_are_printed_beside_the_papers_numbers() -> None:
    words = ["figures", "serverlessllm", "--figure", "12a", "--span", "5", "--cv", "1", "--json"]
    rows = json.loads(CliRunner().invoke(app, words).stdout)
    assert {row["GPUs"] for row in rows} == {1, 2, 3, 4}
    assert "mean 4 s" in {row["published"] for row in rows}


def test_bursts_are_of_all_models_or_of_each() -> None:
    burstiness = {}
    for is_per_model in (False, True):
        arrivals = arrivals_of(Cell("8", "random", rps=1.4, cv=8.0, is_per_model=is_per_model), seed=0)
        assert len(arrivals) == 924
        assert [one.arrival_s for one in arrivals] == sorted(one.arrival_s for one in arrivals)
        burstiness[is_per_model] = fmean(cv_of(arrivals, model) for model in range(3))
    assert burstiness[True] > 1.4 * burstiness[False], "of bursts of all of them each model gets a part"


def cv_of(arrivals: list[Arrival], model: int) -> float:
    gaps = [after.arrival_s - at.arrival_s for at, after in pairwise(one for one in arrivals if one.model == model)]
    return pstdev(gaps) / fmean(gaps)


# The same code between real workers


def set_load(fleet: Fleet, node: str, model: str, load_s: float) -> None:
    """The worker has found out what a load takes it."""
    peer = fleet.peers[node]
    hosting = peer.driver.hostings[model]
    values = {name: getattr(hosting, name) for name in Hosting.__dataclass_fields__}
    peer.driver.register(model, Hosting(**{**values, "load_s": load_s}))
    peer.tell()
    while peer.outbox:
        fleet.receive(node)


def make_full_fleet() -> Fleet:
    """Figure 3 of the paper: node A has the weights of n in memory and answers with m, whose weights are also at B."""
    fleet = Fleet("AB", "mn", memory=1_500_000, lateness=GivingUp)
    for node, model, load_s in (("A", "m", 0.1), ("A", "n", 0.1), ("B", "m", 0.2), ("B", "n", 9.0)):
        set_load(fleet, node, model, load_s)
    fleet.submit("r", "m", prompt=20, tokens=120)
    while len(fleet.text["r"]) < 5:
        fleet.do(fleet.steps()[0])
    assert fleet.place("r") == "A"
    return fleet


def test_an_answer_moves_away_so_that_another_model_starts_where_its_weights_are() -> None:
    fleet = make_full_fleet()
    fleet.submit("s", "n", prompt=20, tokens=10)
    fleet.run()
    assert fleet.migrations.completed == 1
    assert fleet.controller.displacements.completed == 1
    fleet.check_end()


def finish(asking: Asking[Displace | None], fleet: Fleet) -> Displace | None:
    """Its questions are answered at once."""
    ask = next(asking)
    while True:
        try:
            ask = asking.send(fleet.peers[ask.node.name].driver.ask(ask.question))
        except StopIteration as end:
            return cast(Displace | None, end.value)


@pytest.mark.parametrize(("ttft_s", "waits"), [(0.1, False), (5.0, True)])
def test_whoever_asked_for_targets_waits_for_others_only_within_them(ttft_s: float, waits: bool) -> None:
    fleet = make_full_fleet()
    search = Search(make_work(99, "n", 20, arrival_s=fleet.clock.now, ttft_s=ttft_s))
    placer = fleet.controller.seeker.placer
    placer.now_s = fleet.clock.now
    plan = finish(_displace(placer, search, placer.nodes[0], 0.1), fleet)
    assert (plan is not None) is waits
