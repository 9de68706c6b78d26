"""What a runtime must not do to the requests in its care, each as it was once seen: in virtual time, over executors."""

from __future__ import annotations

import pytest
from driver_builders import KV_BYTES, WEIGHT_BYTES, Rig, expected
from sim_builders import make_latency

from dovetail.node.admission import Grant
from dovetail.policy.knobs import Knobs
from dovetail.policy.presets import policy
from dovetail.profiles.concurrency import concurrency_of
from dovetail.types import ServiceClass
from dovetail.worker.policy import real_knobs


def told(rig: Rig, id: str) -> int:
    return len(rig.events.get((id, 0), []))


def step_until(rig: Rig, tokens: int, id: str) -> None:
    for _ in range(20_000):
        if told(rig, id) >= tokens:
            return
        if rig.commands:
            rig.finish_load()
        elif not rig.step() and not rig.commands:
            due_s = rig.driver.next_due_s()
            assert due_s is not None, "nothing is left that could bring it about"
            rig.clock.now = max(rig.clock.now, due_s)
    raise AssertionError(f"{id} never had {tokens} tokens")


# Paused work


def make_paused() -> Rig:
    """A best-effort answer of a is swapped out for a crowd of b."""
    rig = Rig("ab", memory=WEIGHT_BYTES * 2 + 900 * KV_BYTES)
    rig.submit("patient", "a", prompt=20, tokens=60, service_class=ServiceClass.BEST_EFFORT)
    step_until(rig, 20, "patient")
    for number in range(8):
        rig.submit(f"crowd{number}", "b", prompt=60, tokens=30)
    for _ in range(400):
        if rig.driver.runtime.controller.parked:
            return rig
        if rig.commands:
            rig.finish_load()
        rig.step()
    raise AssertionError("it was never swapped out")


def test_paused_work_comes_back_when_the_node_is_idle() -> None:
    rig = make_paused()
    paused_at = rig.clock.now
    rig.run()
    assert rig.tokens("patient") == expected("patient", 20, 60)
    assert rig.clock.now - paused_at < 10.0, "it waited until it was due, beside an idle node"


# Resumed work


def test_an_answer_that_goes_on_after_a_loss_is_as_urgent_as_a_new_one() -> None:
    rig = Rig("a")
    said = tuple(expected("r", 20, 200))
    rig.submit("r", "a", prompt=20, tokens=210, generated=(said,))
    (work,) = rig.driver.runtime.works.values()
    assert work.due_s - rig.clock.now == pytest.approx(work.ttft_s)
    rig.run()
    assert rig.tokens("r") == expected("r", 20, 210)[200:]


def test_choices_that_go_on_after_a_loss_do_not_wait_for_the_first_to_end() -> None:
    rig = Rig("a")
    said = tuple(expected("r", 20, 10))
    rig.submit("r", "a", prompt=20, tokens=100, num_choices=3, generated=(said, said, said))
    step_until(rig, 20, "r")
    assert all(len(rig.events.get(("r", choice), [])) > 0 for choice in range(3))
    rig.run()
    assert all(rig.tokens("r", choice) == expected("r", 20, 100)[10:] for choice in range(3))


# Grace


def test_the_first_token_says_what_cold_start_it_waited_for_and_nothing_else() -> None:
    rig = Rig("ab", memory=WEIGHT_BYTES + 200 * KV_BYTES)
    rig.submit("first", "a", tokens=100)
    rig.finish_load()
    rig.submit("second", "b", tokens=3)
    rig.run()  # the second waits for memory, then for its load of 0.01 s
    first, second = rig.events["second", 0][:2]
    waited_s = rig.clock.now - 100.0
    assert waited_s > 0.3
    assert first.grace_s == pytest.approx(0.01)
    assert second.grace_s == 0.0


# Baselines


def test_a_concurrency_limit_is_what_decodes_within_the_token_pace() -> None:
    latency = make_latency(decode_s=0.1)  # 64 at once take three times as long
    limit = concurrency_of(latency, 0.25)
    assert latency.decode_s(limit, limit * 1024) <= 0.25 < latency.decode_s(limit + 1, (limit + 1) * 1024)
    assert 1 <= concurrency_of(latency, 0.25, share=2) < limit
    assert concurrency_of(make_latency(decode_s=9.0), 0.25) == 1


@pytest.mark.parametrize("name", ["sllm+c", "sllm+c+s"])
def test_a_static_share_is_no_larger_than_the_pool_may_be(name: str) -> None:
    knobs = real_knobs(name)
    rig = Rig("a", memory=WEIGHT_BYTES * 40, max_kv_tokens=400, **{n: getattr(knobs, n) for n in Knobs.__slots__})
    grant = rig.driver.home.node.admit._share(rig.driver.hostings["a"])
    assert grant == Grant(400)
    for number in range(3):
        rig.submit(f"r{number}", "a", tokens=5)
    rig.run()
    assert all(rig.tokens(f"r{number}") == expected(f"r{number}", 5, 5) for number in range(3))
    assert policy(name).whole_node_kv
