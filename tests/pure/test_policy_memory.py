"""KV demand, watermark, compromise, and a ledger that no order of operations overruns or deadlocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.policy.memory import (
    Account,
    Ledger,
    Op,
    OpKind,
    OutputMean,
    Part,
    granted_tokens,
    recommended_tokens,
    required_tokens,
    should_shrink,
)


def test_demand_counts_each_request_at_least_at_the_mean_output() -> None:
    assert required_tokens([(100, 10), (100, 500)], mean_output=200.0, floor_tokens=0) == 100 + 200 + 100 + 500
    assert required_tokens([(100, 10)], mean_output=200.0, floor_tokens=4096) == 4096


def test_the_mean_output_starts_from_a_guess_and_follows_the_log() -> None:
    mean = OutputMean(guess=100, weight=1)
    mean.add(300)
    assert mean.value == 200
    for _ in range(1000):
        mean.add(50)
    assert mean.value == pytest.approx(50, abs=1)


def test_the_watermark_grows_early_and_shrinks_late() -> None:
    assert recommended_tokens(1000, 0.25) == 1250
    assert not should_shrink(1250, 1000, 0.25)
    assert not should_shrink(1500, 1000, 0.25)
    assert should_shrink(1600, 1000, 0.25)


def test_without_room_for_the_recommendation_the_requirement_is_enough() -> None:
    assert granted_tokens(1000, 1250, 5000) == 1250
    assert granted_tokens(1000, 1250, 1100) == 1100
    assert granted_tokens(1000, 1250, 999) is None


def test_a_shrink_frees_budget_at_once_but_memory_only_when_done() -> None:
    ledger = Ledger(100)
    assert ledger.issue(Account(Part.KV, 1), 100) == [Op(Account(Part.KV, 1), OpKind.GROW, 0, 100)]
    ledger.done(Account(Part.KV, 1))
    assert ledger.issue(Account(Part.KV, 1), 40) == [Op(Account(Part.KV, 1), OpKind.SHRINK, 100, 40)]
    assert ledger.available == 60
    assert ledger.issue(Account(Part.KV, 2), 60) == []  # waits in the reservation station
    assert ledger.waiting == 1
    assert ledger.done(Account(Part.KV, 1)) == [Op(Account(Part.KV, 2), OpKind.GROW, 0, 60)]
    assert ledger.held == 100


def test_a_small_growth_need_not_wait_for_a_large_one() -> None:
    ledger = Ledger(100)
    for account, size in ((Account(Part.KV, 1), 60), (Account(Part.KV, 2), 30)):
        ledger.issue(account, size)
        ledger.done(account)
    ledger.issue(Account(Part.KV, 1), 10)
    assert ledger.issue(Account(Part.KV, 3), 50) == []
    assert ledger.issue(Account(Part.KV, 4), 5) == [Op(Account(Part.KV, 4), OpKind.GROW, 0, 5)]


def test_a_failed_load_gives_everything_back() -> None:
    ledger = Ledger(100)
    ledger.issue(Account(Part.WEIGHTS, 1), 80)
    ledger.failed(Account(Part.WEIGHTS, 1))
    assert (ledger.planned, ledger.held) == (0, 0)
    assert ledger.issue(Account(Part.WEIGHTS, 2), 100)


def test_issuing_beyond_the_budget_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="over capacity"):
        Ledger(100).issue(Account(Part.KV, 1), 101)


STEP = st.tuples(st.integers(0, 11), st.integers(0, 5), st.integers(0, 600))  # what, which, how much


@settings(max_examples=2000, deadline=None)
@given(st.lists(STEP, max_size=25))
def test_no_order_of_operations_overruns_memory_or_waits_forever(steps: list[tuple[int, int, int]]) -> None:
    ledger = Ledger(1000)
    running: list[tuple[int, str]] = []
    for what, which, size in steps:
        if running and what < 6:
            account = running.pop(which % len(running))
            ops = ledger.failed(account) if what == 0 else ledger.done(account)
        else:
            account = Account(Part.KV, which)
            if size - ledger.planned_of(account) > ledger.available:
                continue
            ops = ledger.issue(account, size)
        running += [op.account for op in ops]
        ledger.check()
        assert len(running) == len(set(running)), "two operations of one account at once"
    while running:
        running += [op.account for op in ledger.done(running.pop())]
    assert ledger.waiting == 0
    assert ledger.held == ledger.planned


def test_an_account_that_waited_to_grow_and_will_not_is_closed() -> None:
    ledger, first, second = Ledger(10), Account(Part.WEIGHTS, 1), Account(Part.WEIGHTS, 2)
    ledger.issue(first, 10)
    ledger.done(first)
    ledger.issue(first, 0)
    assert ledger.issue(second, 8) == []
    assert ledger.waiting == 1
    assert ledger.issue(second, 0) == []
    assert ledger.waiting == 0
    ledger.done(first)
    assert not ledger._accounts
