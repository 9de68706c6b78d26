"""When rates have left the plan, and when it was chance."""

from __future__ import annotations

from random import Random

from dovetail.plan.drift import RateWatch


def watched(rate: float, planned: float, seconds: float, seed: int = 0) -> RateWatch:
    random, now = Random(seed), 0.0
    watch = RateWatch({"a": planned, "quiet": 0.05}, window_s=30.0, threshold=0.5, now=0.0)
    while (now := now + random.expovariate(rate)) < seconds:
        watch.observe("a", now)
    return watch


def test_planned_rates_are_never_planned_again() -> None:
    for seed in range(200):
        assert watched(2.0, 2.0, 60.0, seed).drifted(60.0) is None


def test_a_rate_that_triples_is_seen_and_the_others_stay_as_planned() -> None:
    rates = watched(6.0, 2.0, 60.0).drifted(60.0)
    assert rates is not None
    assert 4.5 < rates["a"] < 7.5
    assert rates["quiet"] == 0.05


def test_the_new_rate_is_that_since_the_change_and_not_the_mean_of_the_window() -> None:
    watch, random, now = watched(2.0, 2.0, 60.0), Random(1), 60.0
    while (now := now + random.expovariate(6.0)) < 67.5:
        watch.observe("a", now)
    rates = watch.drifted(67.5)
    assert rates is not None
    assert rates["a"] > 4.0, "over all of the window it was 3 a second"


def test_nothing_is_said_before_a_whole_window_was_seen() -> None:
    assert watched(20.0, 2.0, 20.0).drifted(20.0) is None


def test_a_rate_that_falls_away_is_seen() -> None:
    watch = watched(2.0, 2.0, 30.0)
    rates = watch.drifted(90.0)
    assert rates is not None
    assert rates["a"] == 0.02


def test_one_request_of_a_rare_application_is_no_drift() -> None:
    watch = RateWatch({"rare": 0.001}, window_s=1.0, threshold=0.5, now=0.0)
    watch.observe("rare", 4.9)
    assert watch.drifted(5.0) is None
