"""Requests whose worker died: who goes on, who is to blame, how long anybody waits, and that storms play all of it."""

from __future__ import annotations

from collections import Counter

import pytest
from driver_builders import Rig
from fleet_builders import Fleet
from sim_builders import make_work

from dovetail.cluster.decisions import NoNode
from dovetail.cluster.request import RequestState
from dovetail.cluster.retry import Loss, Retries, RetryRule
from dovetail.errors import Overloaded, RequestError, WorkerLost
from dovetail.sim.metrics import Fate
from dovetail.sim.storm import run_one
from dovetail.types import ISOLATED_TOKENS

RULE = RetryRule(max_attempts=2, place_s=4.0, no_node_s=30.0)


def work_with(tokens: int, id: int = 0) -> RequestState:
    work = make_work(id)
    work.produced = tokens
    return work


def suspect(*ids: int) -> Loss:
    return Loss("the worker 'A' died", frozenset(ids))


def test_a_request_that_ends_a_second_worker_alone_is_to_blame() -> None:
    retries, work = Retries(RULE), work_with(5)
    assert retries.judge(work, suspect(0, 1), 0.0) is None
    assert work.is_isolated
    failed = retries.judge(work, suspect(0), 1.0)
    assert failed is not None
    assert (failed.reason, failed.retry_after_s) == ("worker_lost", None)
    assert "twice on this request" in failed.message


def test_a_request_that_is_beyond_the_place_where_a_worker_died_is_not_on_trial_any_more() -> None:
    retries, work = Retries(RULE), work_with(5)
    retries.judge(work, suspect(0), 0.0)
    work.produced += ISOLATED_TOKENS
    assert retries.judge(work, suspect(0), 1.0) is None
    assert work.attempts == 2


def test_a_request_is_tried_again_so_often_and_only_losses_that_it_may_be_to_blame_for_count() -> None:
    retries, work = Retries(RULE), work_with(5)
    for _ in range(5):
        assert retries.judge(work, suspect(7), 0.0) is None, "others were in the iteration"
        assert retries.judge(work, Loss("cut off", is_cut=True), 0.0) is None
    assert not work.attempts
    for _ in range(2):
        assert retries.judge(work, Loss("it died"), 0.0) is None, "between two iterations: anybody may be to blame"
    failed = retries.judge(work, Loss("it died"), 0.0)
    assert failed is not None
    assert failed.message == "it died again, after 2 attempts to go on"


def test_by_default_a_request_is_tried_again_for_ever() -> None:
    retries, work = Retries(RetryRule()), work_with(5)
    assert all(retries.judge(work, Loss(), float(at)) is None for at in range(50))
    assert retries.next_s({0: work}) is None


def fleet_that_dies(tokens: int) -> Fleet:
    """An answer with so many tokens, whose only worker has died."""
    fleet = Fleet("A")
    fleet.controller.retries.rule = RULE
    fleet.submit("r", tokens=30)
    count = 0
    while len(fleet.text["r"]) < tokens:
        steps = fleet.steps()
        fleet.do(steps[count % len(steps)])
        count += 1
    fleet.kill("A")
    return fleet


def failure_after(fleet: Fleet, seconds: float) -> tuple[RequestError, float] | None:
    until_s = fleet.clock.now + seconds
    began_s = fleet.clock.now
    while fleet.clock.now < until_s and not fleet.listener.failed and fleet.advance():
        pass
    return (fleet.listener.failed[0], fleet.clock.now - began_s) if fleet.listener.failed else None


def test_an_answer_keeps_its_record_when_its_worker_dies_and_goes_on_with_the_next_one() -> None:
    fleet = fleet_that_dies(tokens=5)
    (work,) = fleet.controller.works.values()
    assert (work.id, work.produced, work.attempts) == (0, 5, 1)
    fleet.join("A")
    fleet.run()
    fleet.check_end()


def test_an_answer_that_was_begun_waits_for_a_place_no_longer_than_the_limit() -> None:
    fleet = fleet_that_dies(tokens=5)
    found = failure_after(fleet, 20.0)
    assert found is not None
    error, waited_s = found
    assert isinstance(error, Overloaded)
    assert (error.code, waited_s) == ("worker_restarting", pytest.approx(4.0, abs=0.1))
    assert not fleet.controller.works


def test_a_request_without_tokens_waits_until_no_worker_has_come_up_for_too_long() -> None:
    fleet = fleet_that_dies(tokens=0)
    found = failure_after(fleet, 60.0)
    assert found is not None
    error, waited_s = found
    assert (error.code, waited_s) == ("no_worker", pytest.approx(30.0, abs=0.1))
    assert [type(one) for one in fleet.cluster.outbox] == [NoNode], "who waits for a model hears of it too"


def test_choices_of_a_request_follow_its_first_one_again_and_end_with_it() -> None:
    rig = Rig("a")
    rig.controller.retries.rule = RULE
    rig.submit("r", tokens=40, num_choices=3)
    rig.finish_load()
    while not rig.events.get(("r", 2)):
        assert rig.step()
    rig.link.cluster.lost("node", rig.clock.now, WorkerLost("it died"))
    assert rig.link.listener.num_resumed == 1, "one request, with three choices"
    leader = rig.controller.works[0]
    assert [one.id for one in leader.followers] == [1, 2], "the prompt is computed once"
    rig.link.cluster.wake(rig.clock.now + RULE.place_s + 0.1)
    assert [error.code for error in rig.link.listener.failed] == ["worker_restarting"]
    assert rig.link.listener.num_closed == 1
    assert not rig.controller.works
    assert not rig.controller.queued


def test_storms_of_a_server_play_retry_giving_up_and_requests_that_end_their_workers() -> None:
    reasons: Counter[str] = Counter()
    attempts = 0
    for seed in range(24):
        simulation = run_one(seed, of_server=True)
        reasons.update(record.reason for record in simulation.records if record.fate is Fate.FAILED)
        attempts += sum(record.moves > 0 for record in simulation.records if record.fate is Fate.FINISHED)
    assert reasons.keys() >= {"worker_lost", "worker_restarting", "no_worker"}
    assert attempts, "others go on"
