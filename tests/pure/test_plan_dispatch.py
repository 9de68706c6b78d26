"""The dispatcher as a state machine, and plans as files."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_builders import make_app, make_profile, make_sheet

from dovetail.plan.dispatch import Batch, Batcher, Placement, Pool, Waiting
from dovetail.plan.grouping import plan_groups
from dovetail.plan.plan_file import make_plan, read_plan, write_plan
from dovetail.plan.provision import Provisioner


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


def started(pool: Pool, count: int, now: float = 0.0) -> list[int]:
    """Functions that are ready."""
    functions = [pool.start_ahead() for _ in range(count)]
    for function in functions:
        pool.ready(function, now)
    return functions


def placed(pool: Pool) -> Placement:
    found = pool.place()
    assert found is not None
    return found


def test_the_last_used_function_runs_next_and_the_others_expire() -> None:
    pool = Pool(None, keep_alive_s=10.0)
    started(pool, 2)
    pool.add(make_batch(0))
    pool.add(make_batch(1))
    first, second = placed(pool), placed(pool)
    pool.release(first.function, 1.0)
    pool.release(second.function, 2.0)
    pool.add(make_batch(2))
    assert placed(pool).function == second.function
    assert pool.expire(11.5) == [first.function]


def test_one_function_is_started_for_each_batch_that_waits_within_the_limit() -> None:
    pool = Pool(2, keep_alive_s=10.0)
    assert pool.start_wanted() is None
    for request in range(3):
        pool.add(make_batch(request))
    assert pool.place() is None
    assert (pool.start_wanted(), pool.start_wanted(), pool.start_wanted()) == (1, 2, None)


def test_a_batch_that_waits_for_a_start_goes_to_the_function_that_is_free_first() -> None:
    pool = Pool(None, keep_alive_s=10.0)
    (old,) = started(pool, 1)
    pool.add(make_batch(0))
    placed(pool)
    pool.add(make_batch(1))
    new = pool.start_wanted()
    assert new is not None
    pool.release(old, 1.0)
    assert (placed(pool).function, len(pool._queue)) == (old, 0)
    pool.ready(new, 2.0)
    pool.add(make_batch(2))
    assert placed(pool).function == new


def test_what_a_dead_function_ran_is_run_again_first() -> None:
    pool = Pool(1, keep_alive_s=10.0)
    started(pool, 1)
    pool.add(make_batch(0))
    running = placed(pool)
    pool.add(make_batch(1))
    pool.lose(running.function)
    again = pool.start_wanted()
    assert again is not None
    pool.ready(again, 1.0)
    assert placed(pool).batch.requests[0].request == 0
    assert len(pool._queue) == 1


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_no_request_is_lost_or_run_twice_whatever_dies(data: st.DataObject) -> None:
    limit = data.draw(st.sampled_from([None, 1, 3]))
    pool = Pool(limit, keep_alive_s=2.0, keep=data.draw(st.integers(0, 2)))
    running: dict[int, int] = {}
    starting: set[int] = set()
    waiting, done, now = 0, [], 0.0
    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.sampled_from([0.0, 0.5, 3.0]))
        step = data.draw(st.sampled_from(["add", "release", "lose", "place", "start", "ready", "expire"]))
        if step == "add":
            pool.add(make_batch(waiting, now))
            waiting += 1
        elif step == "place" and (found := pool.place()) is not None:
            assert found.function not in running
            running[found.function] = found.batch.requests[0].request
        elif step == "start" and (function := pool.start_wanted()) is not None:
            starting.add(function)
        elif step == "expire":
            assert not set(pool.expire(now)) & {*running, *starting}
        elif step == "ready" and starting:
            pool.ready(starting.pop(), now)
        elif step == "release" and running:
            function = data.draw(st.sampled_from(sorted(running)))
            done.append(running.pop(function))
            pool.release(function, now)
        elif step == "lose" and (running or starting):
            function = data.draw(st.sampled_from(sorted([*running, *starting])))
            running.pop(function, None)
            starting.discard(function)
            pool.lose(function)
        held = sorted([*done, *running.values()])
        assert len(set(held)) == len(held)
        assert len(held) + len(pool._queue) == waiting
        assert limit is None or pool.num_started <= limit


def test_a_plan_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    provisioners = {"toy": Provisioner(make_profile(), make_sheet())}
    plan = make_plan(plan_groups([make_app("a"), make_app("b", slo_s=3.0)], provisioners), provisioners)
    path = tmp_path / "plan.yaml"
    write_plan(path, plan)
    assert read_plan(path) == plan
