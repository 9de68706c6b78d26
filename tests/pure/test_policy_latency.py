"""Interpolation of iteration times, fitting, and the linear models of moving bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_builders import PROFILE, make_latency, needs_shared

from dovetail.policy.latency import (
    GIB,
    IN_PLACE_RESIZE,
    Curve,
    DecodeSample,
    LatencyModel,
    PrefillSample,
    Surface,
    TransferModel,
    fit,
)
from dovetail.policy.placement import DeviceKind
from dovetail.profiles.files import read_profile


def test_a_curve_passes_through_its_points_and_is_linear_between() -> None:
    curve = Curve([(1, 10.0), (101, 20.0), (201, 60.0)])
    assert [curve.at(x) for x in (1, 101, 201)] == [10.0, 20.0, 60.0]
    assert curve.at(51) == pytest.approx(15.0)
    assert curve.at(151) == pytest.approx(40.0)


def test_outside_its_points_a_curve_is_flat_below_and_proportional_above() -> None:
    curve = Curve([(10, 1.0), (100, 5.0)])
    assert curve.at(1) == 1.0
    assert curve.at(200) == pytest.approx(10.0)


@pytest.mark.parametrize("points", [[], [(1, 1.0), (1, 2.0)], [(2, 1.0), (1, 2.0)]])
def test_a_curve_refuses_points_that_do_not_rise(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(points)


def test_a_surface_interpolates_in_both_directions() -> None:
    surface = Surface([(512, Curve([(1, 10.0), (3, 14.0)])), (1024, Curve([(1, 20.0), (3, 24.0)]))])
    assert surface.at(2, 768) == pytest.approx(17.0)
    assert surface.at(1, 512) == 10.0
    assert surface.at(3, 2048) == pytest.approx(48.0)


@given(st.integers(1, 64), st.integers(1, 200_000))
def test_decode_time_is_positive_and_grows_with_the_tokens_held(batch: int, tokens: int) -> None:
    latency = make_latency()
    assert 0 < latency.decode_s(batch, tokens) <= latency.decode_s(batch, tokens + 1000)


def test_fitting_takes_the_median_of_repeated_points() -> None:
    prefill = [PrefillSample(128, 1.0), PrefillSample(128, 1.2), PrefillSample(128, 9.0), PrefillSample(256, 2.0)]
    decode = [
        DecodeSample(1, 512, 0.1),
        DecodeSample(2, 512, 0.2),
        DecodeSample(1, 1024, 0.3),
        DecodeSample(2, 1024, 0.4),
    ]
    model = fit(prefill, decode)
    assert model.prefill_s(128) == 1.2
    assert model.decode_s(2, 2 * 768) == pytest.approx(0.3)


def test_resizes_cost_what_the_paper_measured() -> None:
    """32→16 GB 0.3 s, 32→64 GB 1.9 s."""
    transfer = TransferModel()
    assert transfer.resize_s(32 * GIB, 16 * GIB) == pytest.approx(0.3, abs=0.05)
    assert transfer.resize_s(32 * GIB, 64 * GIB) == pytest.approx(1.9, abs=0.05)
    assert 0 < transfer.resize_s(32 * GIB, 0) < transfer.resize_s(32 * GIB, 1 * GIB)
    assert IN_PLACE_RESIZE.resize_s(32 * GIB, 64 * GIB) < 0.01


@needs_shared
def test_leaving_out_measured_points_the_interpolation_stays_within_the_papers_error() -> None:
    """S3: mean error 5.9 % (TTFT) and 3.9 % (TPOT); here every second point of the profile is predicted by the rest."""
    hosting = read_profile(PROFILE).hosting("llama-2-7b", DeviceKind.GPU)
    points = hosting.latency.prefill.points
    thinned = LatencyModel(Curve([points[0], *points[1::2]]), hosting.latency.decode)
    errors = [abs(thinned.prefill_s(int(x)) / y - 1) for x, y in points[2:-1:2]]
    assert sum(errors) / len(errors) < 0.059
