"""Coefficients of the latency formulas from measured points, and their error at points that were not fitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.errors import ConfigError
from dovetail.plan.latency import ExpCurve, Transfer

_LEAST = 1e-9


@dataclass(frozen=True)
class Point:
    """Runs of one configuration."""

    x: float  # vCPUs, or batch size
    mean_s: float
    p99_s: float
    runs: int


def fit_exponential(xs: Sequence[float], seconds: Sequence[float]) -> ExpCurve:
    """Least squares of relative errors, so that fast and slow configurations count alike."""
    _need(len(set(xs)), 3, "vCPU settings")
    optimize = _scipy_optimize()
    slow, fast = max(seconds), min(seconds)
    start = [max(slow - fast, slow * 1e-3), max(xs) / 3, max(fast * 0.9, _LEAST)]

    def errors(values: Sequence[float]) -> list[float]:
        curve = ExpCurve(*values)
        return [(curve(x) - y) / y for x, y in zip(xs, seconds, strict=True)]

    # α at 0 vCPUs is what the slowest point is on the way to; β and γ are positive, so that the curve falls to a floor.
    found = optimize.least_squares(errors, start, bounds=([0, 1e-3, _LEAST], [slow * 1e3, 1e3, slow]), max_nfev=5000)
    return ExpCurve(*map(float, found.x))


def fit_line(xs: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept, neither negative, by relative errors."""
    _need(len(set(xs)), 2, "sizes")
    x, y = np.asarray(xs, float), np.asarray(seconds, float)
    slope, fixed = np.linalg.lstsq(np.stack([x / y, 1 / y], axis=1), np.ones(len(y)), rcond=None)[0]
    if slope < 0:  # the best constant
        return 0.0, float((1 / y).sum() / (1 / y**2).sum())
    if fixed < 0:  # the best line through zero
        return float((x / y).sum() / ((x / y) ** 2).sum()), 0.0
    return float(slope), float(fixed)


def fit_transfer(batches: Sequence[int], seconds: Sequence[float]) -> Transfer:
    if len(set(batches)) == 1:  # nothing says how it grows: all of it is the fixed part
        return Transfer(sum(seconds) / len(seconds), 0.0)
    slope, fixed = fit_line(batches, seconds)
    return Transfer(fixed, slope)


def mape(predicted: Callable[[float], float], points: Sequence[tuple[float, float]]) -> float:
    """Mean absolute percentage error, as a share."""
    return sum(abs(predicted(x) - seconds) / seconds for x, seconds in points) / len(points)


def percentile_99(values: Sequence[float]) -> float:
    """Nearest rank; of fewer than a hundred runs it is the slowest."""
    ranked = sorted(values)
    return ranked[min(int(0.99 * len(ranked)), len(ranked) - 1)]


def _need(count: int, least: int, what: str) -> None:
    if count < least:
        raise ConfigError(f"a fit needs at least {least} different {what}, got {count}")


def _scipy_optimize() -> Any:
    try:
        from scipy import optimize
    except ImportError as error:
        raise ConfigError("fitting needs scipy: pip install 'dovetail[plan]'") from error
    return optimize
