"""Latency formulas against their definitions, and fits at points that they have not seen."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from dovetail.plan.latency import ExpCurve, GpuLatency, mean_billed_s, share_above, spread_of

scipy = pytest.importorskip("scipy", reason="fits need dovetail[plan]")

from dovetail.errors import ConfigError  # noqa: E402
from dovetail.plan.fits import Point, fit_exponential, fit_line, fit_transfer, mape, percentile_99  # noqa: E402
from dovetail.plan.function_profile import cpu_latency  # noqa: E402
from dovetail.plan.profiling import fit_curve  # noqa: E402


def test_a_part_of_a_card_waits_for_the_others_turns() -> None:
    """(4.4): L = 30 ms on 6 of 24 GB with turns of 1 ms per GB: 5 rounds, each waiting for the other 18 ms."""
    latency = GpuLatency(0.01, 0.02, 1.0, 0.0, 8)
    assert latency.longest_s(1, 6, 24, 0.001) == pytest.approx(5 * 0.018 + 0.03)
    assert latency.longest_s(1, 24, 24, 0.001) == pytest.approx(0.03)
    assert latency.p99_s(1, 24, 24, 0.0) == pytest.approx(0.03)


def test_a_spread_gives_back_the_99th_percentile() -> None:
    sigma = spread_of(1.0, 1.4)
    assert share_above(1.4, 1.0, sigma) == pytest.approx(0.01, abs=1e-6)
    assert spread_of(1.0, 1.0) == 0.0


def test_billed_time_is_the_mean_of_rounded_runs() -> None:
    random = Random(3)
    sigma = spread_of(0.34, 0.5)
    runs = [0.34 * random.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(40_000)]
    billed = sum(-(-run // 0.1) * 0.1 for run in runs) / len(runs)
    assert mean_billed_s(0.34, 0.5, 0.1) == pytest.approx(billed, rel=0.005)
    assert mean_billed_s(0.02, 0.02, 0.1) == pytest.approx(0.1)


def test_an_exponential_is_found_again_from_its_points() -> None:
    truth = ExpCurve(3.0, 1.7, 0.4)
    xs = (0.5, 1.0, 2.0, 4.0, 8.0)
    fitted = fit_exponential(xs, [truth(x) for x in xs])
    assert mape(fitted, [(x, truth(x)) for x in (0.75, 1.5, 3.0, 6.0)]) < 0.001


def test_a_run_that_scales_with_cores_is_fitted_within_the_published_error() -> None:
    """Amdahl's law is no exponential; the thesis reports 9 % for its networks."""

    def law(vcpus: float) -> float:
        return 4.0 * (0.08 + 0.92 / vcpus)

    xs = (1.0, 2.0, 4.0, 8.0, 16.0)
    fitted = fit_exponential(xs, [law(x) for x in xs])
    assert mape(fitted, [(x, law(x)) for x in (1.5, 3.0, 6.0, 12.0)]) < 0.09


def test_a_further_thread_is_a_step_that_is_fitted_apart() -> None:
    """Two threads lose 15 % by waiting for each other: at 1.1 vCPUs a run gains little, and no exponential tells."""

    def law(vcpus: float) -> float:
        return 1 / vcpus if vcpus <= 1 else 1 / (0.85 * vcpus)

    def points(sizes: Sequence[float]) -> list[Point]:
        return [Point(size, law(size), 1.1 * law(size), 1) for size in sizes]

    held_out = [(size, law(size)) for size in (0.6, 0.9, 1.4, 1.8)]
    stepped = cpu_latency({1: fit_curve(points((0.5, 0.75, 1, 1.2, 1.6, 2)))})
    assert mape(lambda c: stepped.mean_s(1, c), held_out) < 0.005
    assert mape(lambda c: stepped.p99_s(1, c) / 1.1, held_out) < 0.005
    assert fit_curve(points((0.5, 1, 1.5, 2))).steps == ()  # too few for two curves


def test_a_line_is_found_again() -> None:
    assert fit_line([1, 4, 16], [0.03, 0.06, 0.18]) == pytest.approx((0.01, 0.02), rel=1e-3)
    assert fit_line([1, 2, 3], [0.3, 0.2, 0.1])[0] == 0.0  # neither slope nor intercept is below zero
    assert fit_line([1, 2, 3], [0.1, 0.3, 0.5])[1] == 0.0
    assert fit_transfer([1, 1], [0.02, 0.04]).theta0 == pytest.approx(0.03)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 3 different vCPU settings"):
        fit_exponential([1, 2], [2.0, 1.0])


def test_the_99th_percentile_of_few_runs_is_the_slowest() -> None:
    assert percentile_99([3.0, 1.0, 2.0]) == 3.0
    assert percentile_99([float(n) for n in range(200)]) == 198.0


def test_a_measured_card_is_followed_from_batch_to_batch_and_straight_beyond() -> None:
    latency = GpuLatency(0.01, 0.02, 1.0, 0.0, 8, ((1, 0.05), (2, 0.05), (8, 0.11)))
    assert [latency.mean_s(batch) for batch in (1, 2, 5, 8)] == pytest.approx([0.05, 0.05, 0.08, 0.11])
    assert latency.mean_s(10) == pytest.approx(latency.line_s(10)) == pytest.approx(0.12)
