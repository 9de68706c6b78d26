"""Applications whose requests share batches: how long one waits, how large it becomes, how often a function is cold.

Requests come as Poisson streams. A request of application i waits at most t_i = S_i − L, where L is the 99th percentile
of a full batch's run; a batch starts when it is full or when the first of its requests has waited that long. A platform
starts a function when none is idle and warm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NEGLIGIBLE = 1e-9
_STEPS = 65  # of an integral, up to each application's longest wait
_CERTAIN = 30.0  # e^−30 is nothing


@dataclass(frozen=True)
class App:
    """One application: requests to a model, at a rate, each to be answered within the SLO."""

    name: str
    model: str
    rate: float  # requests/s
    slo_s: float


@dataclass(frozen=True)
class Demand:
    """What provisioning needs of a group of applications.

    With t_1 ≤ … ≤ t_n, a batch begun by k ends at the latest after D = min(t_k, arrival of j + t_j …), whose mean is
    F(t_k) = ∫ over [0, t_k] of Π_j e^(−r_j·max(x − t_j, 0)) dx. All t_i move together with L, and F with t_1 alone:

        T_eq = Σ (r_k/r)·F(t_k) = t_1 + spread_s
    """

    slo_s: float  # of the strictest
    rate: float
    spread_s: float  # how much longer than the strictest one's a batch waits in the mean

    def timeout_s(self, run_s: float) -> float:
        return self.slo_s - run_s + self.spread_s


def demand_of(apps: Sequence[App]) -> Demand:
    """`apps` by rising SLO."""
    rate = sum(app.rate for app in apps)
    first = apps[0]
    strict_rate, waited_s, survival, spread_s = first.rate, 0.0, 1.0, 0.0
    left = rate - first.rate
    before_s = first.slo_s
    for app in apps[1:]:
        gap_s = app.slo_s - before_s
        if survival > _NEGLIGIBLE:
            fall = math.exp(-strict_rate * gap_s)
            waited_s += survival * (1.0 - fall) / strict_rate
            survival *= fall
        else:  # later ones change nothing: the batch has gone by then
            return Demand(first.slo_s, rate, spread_s + left / rate * waited_s)
        spread_s += app.rate / rate * waited_s
        left -= app.rate
        strict_rate += app.rate
        before_s = app.slo_s
    return Demand(first.slo_s, rate, spread_s)


def batch_shares(expected: float, largest: int) -> list[float]:
    """P(a batch has n requests), n from 1, when `expected` more arrive in the mean after its first."""
    shares: list[float] = []
    term = math.exp(-expected)
    for more in range(largest - 1):
        shares.append(term)
        term *= expected / (more + 1)
    shares.append(max(1.0 - sum(shares), 0.0))
    return shares


def exact_batch_shares(apps: Sequence[App], run_s: float, largest: int) -> list[float]:
    """As `batch_shares`, with the waiting time as the distribution that it is. `apps` by rising SLO.

    A batch that is open at x has no request of j older than t_j, so it has Poisson(Σ r_j·min(t_j, x)) more than its
    first, and one joins at the rate r: P(N > n) = r·∫ P(open at x)·P(n − 1 more at x) dx.
    """
    if largest == 1:
        return [1.0]
    rates = np.array([app.rate for app in apps])
    waits = np.array([max(app.slo_s - run_s, 0.0) for app in apps])
    edges = np.unique(np.concatenate([np.linspace(0.0, wait, _STEPS) for wait in np.unique(waits)]))
    x, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)  # middles of intervals
    late = np.clip(x[:, None] - waits, 0.0, None)  # [x, app]
    is_open = np.exp(-(late * rates).sum(axis=1)) * ((waits > x[:, None]) * rates).sum(axis=1) / rates.sum()
    mean = (np.minimum(waits, x[:, None]) * rates).sum(axis=1)
    term = np.exp(-mean) * is_open * width * rates.sum()
    more: list[float] = []  # P(N > n), n from 1
    for count in range(1, largest):
        more.append(min(float(term.sum()), more[-1] if more else 1.0))
        term = term * mean / count
    return [a - b for a, b in zip([1.0, *more], [*more, 0.0], strict=True)]


def cold_share(rate: float, busy_s: float, keep_alive_s: float, batch: float = 1.0, warm: int = 0) -> float:
    """Of invocations at `rate` that run for `busy_s`, the share that finds no warm function; `warm` never fall idle.

    An invocation sees k running. It is cold if no earlier one within the keep-alive saw as many: then no more than k
    functions are warm, and all of them run. Invocations of single requests come as these do, and k is Poisson. Batches
    come at steadier intervals: one overlaps the one before if `batch` requests arrive within its run.
    """
    if keep_alive_s <= 0:
        return 1.0
    overlap = 1.0 - sum(batch_shares(rate * batch * busy_s, max(round(batch), 1) + 1)[:-1])
    load = -math.log(max(1.0 - overlap, _NEGLIGIBLE))
    seen = rate * keep_alive_s  # invocations whose functions would still be warm
    term = math.exp(-load)
    share, below = (term * math.exp(-seen) if warm == 0 else 0.0), term
    certain = 1.0 - _CERTAIN / seen  # below this, one within the keep-alive has certainly seen as many
    running = 0
    while True:
        running += 1
        term *= load / running
        if term < _NEGLIGIBLE and running > load:
            return min(share, 1.0)
        if below > certain and running >= warm:
            share += term * below**seen
        below += term
        if below > 1.0:
            below = 1.0
