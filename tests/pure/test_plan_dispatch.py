"""The dispatcher as a state machine, and plans replayed in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_builders import make_app, make_profile, make_sheet, random_apps, shipped

from dovetail.plan.dispatch import Batch, Batcher, Pool, Waiting
from dovetail.plan.grouping import plan_groups
from dovetail.plan.plan_file import FunctionPlan, make_plan, read_plan, write_plan
from dovetail.plan.provision import Provisioner
from dovetail.plan.replay import replay


def make_batch(request: int = 0, now: float = 0.0) -> Batch:
    return Batch((Waiting(request, "a", now, now),), now)


def test_a_batch_starts_when_it_is_full() -> None:
    batcher = Batcher(2, {"a": 1.0, "b": 5.0})
    assert batcher.add(0, "b", 0.0, 0.0) is None
    assert batcher.due_s() == 5.0
    batch = batcher.add(1, "a", 0.5, 0.5)
    assert batch is not None
    assert [waiting.request for waiting in batch.requests] == [0, 1]
    assert batcher.due_s() is None


def test_a_batch_starts_when_the_least_patient_has_waited_long_enough() -> None:
    batcher = Batcher(8, {"a": 1.0, "b": 5.0})
    batcher.add(0, "b", 0.0, 0.0)
    batcher.add(1, "a", 0.5, 0.5)
    assert batcher.due_s() == 1.5
    assert batcher.flush(1.4) is None
    assert batcher.flush(1.5) is not None
    assert len(batcher) == 0


def test_the_last_used_function_runs_next_and_the_others_expire() -> None:
    pool = Pool(None, keep_alive_s=10.0)
    first, second = pool.add(make_batch(0), 0.0), pool.add(make_batch(1), 0.0)
    assert first is not None
    assert second is not None
    assert first.is_cold
    assert second.is_cold
    pool.release(first.function, 1.0)
    pool.release(second.function, 2.0)
    again = pool.add(make_batch(2), 3.0)
    assert again is not None
    assert (again.function, again.is_cold) == (second.function, False)
    assert pool.expire(11.5) == [first.function]


def test_what_a_dead_function_ran_is_run_again_first() -> None:
    pool = Pool(1, keep_alive_s=10.0)
    running = pool.add(make_batch(0), 0.0)
    assert pool.add(make_batch(1), 0.0) is None
    assert running is not None
    pool.lose(running.function)
    again = pool.place(1.0)
    assert again is not None
    assert again.batch.requests[0].request == 0
    assert again.is_cold
    assert pool.num_queued == 1


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_no_request_is_lost_or_run_twice_whatever_dies(data: st.DataObject) -> None:
    pool = Pool(data.draw(st.sampled_from([None, 1, 3])), keep_alive_s=2.0, keep=data.draw(st.integers(0, 2)))
    running: dict[int, int] = {}
    waiting, done, now = 0, [], 0.0
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.5, 3.0]))
        step = data.draw(st.sampled_from(["add", "release", "lose", "place"]))
        placed = None
        if step == "add":
            placed = pool.add(make_batch(waiting, now), now)
            waiting += 1
        elif step == "place":
            placed = pool.place(now)
        elif running:
            function = data.draw(st.sampled_from(sorted(running)))
            if step == "release":
                done.append(running.pop(function))
                pool.release(function, now)
            else:
                running.pop(function)
                pool.lose(function)
        if placed is not None:
            assert placed.function not in running
            running[placed.function] = placed.batch.requests[0].request
        held = sorted([*done, *running.values()])
        assert len(set(held)) == len(held)
        assert len(held) + pool.num_queued == waiting


def shipped_plan(apps_seed: int, count: int) -> FunctionPlan:
    return make_plan(plan_groups(random_apps(apps_seed, count), shipped()), shipped())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_replayed_plan_keeps_its_slos_and_its_forecast(seed: int) -> None:
    result = replay(shipped_plan(seed, 8), 1800, seed=seed)
    assert result.requests > 1000
    assert result.late_share <= 0.011
    assert abs(result.forecast_error(result.billed)) < 0.05


def test_the_same_seed_gives_the_same_replay() -> None:
    plan = shipped_plan(4, 3)
    assert replay(plan, 600, seed=7) == replay(plan, 600, seed=7)
    assert replay(plan, 600, seed=7) != replay(plan, 600, seed=8)


def test_a_plan_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    provisioners = {"toy": Provisioner(make_profile(), make_sheet())}
    plan = make_plan(plan_groups([make_app("a"), make_app("b", slo_s=3.0)], provisioners), provisioners)
    path = tmp_path / "plan.yaml"
    write_plan(path, plan)
    assert read_plan(path) == plan
