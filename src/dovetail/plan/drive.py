"""Load for a plan that runs: planned arrivals in real time, changes of rate and deaths at set times, and the report."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from dovetail.errors import RequestError
from dovetail.plan.billing import Totals
from dovetail.plan.chains import IMAGE
from dovetail.plan.runtime import PlanRuntime
from dovetail.sim.metrics import percentile


@dataclass(frozen=True)
class RateChange:
    app: str
    times: float  # of the planned rate
    at_s: float


@dataclass
class Driven:
    """Requests sent and what came back."""

    sent: int = 0
    answered: int = 0
    failed: int = 0
    killed: int = 0


async def drive(
    runtime: PlanRuntime,
    duration_s: float,
    seed: int,
    changes: Sequence[RateChange] = (),
    kill_at_s: Sequence[float] = (),
) -> Driven:
    """Poisson arrivals for so long; returns when every request has its answer."""
    driven = Driven()
    image = np.random.default_rng(seed).standard_normal((1, 3, IMAGE, IMAGE), dtype=np.float32)
    rates = {name: app.rate for name, app in runtime.apps.items()}
    senders = [
        _send(runtime, name, rate, duration_s, Random(f"{seed}/{name}"), [c for c in changes if c.app == name], image,
              driven)
        for name, rate in rates.items()
    ]  # fmt: skip
    killers = [_kill(runtime, at_s, driven) for at_s in kill_at_s]
    await asyncio.gather(*senders, *killers)
    return driven


async def _send(
    runtime: PlanRuntime,
    app: str,
    rate: float,
    duration_s: float,
    random: Random,
    changes: Sequence[RateChange],
    image: Any,
    driven: Driven,
) -> None:
    started = time.monotonic()
    waiting: set[asyncio.Task[None]] = set()
    due_s = random.expovariate(rate)
    while due_s < duration_s:
        await asyncio.sleep(max(started + due_s - time.monotonic(), 0.0))
        task = asyncio.get_running_loop().create_task(_ask(runtime, app, image, driven))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        times = next((change.times for change in reversed(changes) if change.at_s <= due_s), 1.0)
        due_s += random.expovariate(rate * times)
    await asyncio.gather(*waiting)


async def _ask(runtime: PlanRuntime, app: str, image: Any, driven: Driven) -> None:
    driven.sent += 1
    try:
        await runtime.submit(app, image)
        driven.answered += 1
    except RequestError:
        driven.failed += 1


async def _kill(runtime: PlanRuntime, at_s: float, driven: Driven) -> None:
    """kill -9 of a function process of the busiest group."""
    await asyncio.sleep(at_s)
    busiest = max(runtime.groups(), key=lambda group: group.account.requests)
    for pid in busiest.pids[:1]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            driven.killed += 1


def report(runtime: PlanRuntime, driven: Driven) -> dict[str, Any]:
    totals = Totals(tuple(runtime.accounts()))
    ranked = totals.latencies_s
    return {
        "sent": driven.sent,
        "answered": driven.answered,
        "failed": driven.failed,
        "lost": driven.sent - driven.answered - driven.failed,
        "killed": driven.killed,
        "late": totals.late,
        "late_share": totals.late_share,
        "billed": totals.cost,
        "billed_starts": totals.start_cost,
        "forecast": totals.forecast,
        "forecast_error": totals.forecast_error(totals.cost),
        "latency_p50_s": percentile(ranked, 0.5),
        "latency_p99_s": percentile(ranked, 0.99),
        "changes": [_plain(change) for change in runtime.changes],
        "groups": [
            {key: value for key, value in vars(account).items() if key != "latencies_s"} for account in totals.groups
        ],
    }


def _plain(change: Any) -> Mapping[str, Any]:
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in vars(change).items()}
