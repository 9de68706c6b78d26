"""Load for a plan that runs: planned arrivals, changes of rate and deaths at set times, and the report. In real time or
in virtual time, by the loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np

from dovetail.errors import RequestError
from dovetail.plan.billing import Totals
from dovetail.plan.instances import Array
from dovetail.plan.runtime import PlanRuntime
from dovetail.sim.metrics import percentile

DEATH_S = 10.0  # after a death, in which its requests and those that found no function may be late


@dataclass(frozen=True)
class RateChange:
    app: str
    times: float  # of the planned rate
    at_s: float


@dataclass(frozen=True)
class Load:
    """Planned rates for so long, and what disturbs them."""

    duration_s: float
    seed: int = 0
    cv: float = 1.0  # coefficient of variation of the gaps, which are Gamma; 1 = Poisson
    changes: tuple[RateChange, ...] = ()
    kills_s: tuple[float, ...] = ()  # when a function is killed

    def arrivals(self, app: str, rate: float) -> Iterator[float]:
        random, shape = Random(f"{self.seed}/{app}"), 1.0 / (self.cv * self.cv)
        changes = sorted((change for change in self.changes if change.app == app), key=lambda change: change.at_s)
        due_s = random.random() * random.gammavariate(shape, 1 / (shape * rate))
        while due_s < self.duration_s:
            yield due_s
            times = next((change.times for change in reversed(changes) if change.at_s <= due_s), 1.0)
            due_s += random.gammavariate(shape, 1 / (shape * rate * times))


@dataclass
class Driven:
    """Requests sent and what came back."""

    sent: int = 0
    answered: int = 0
    failed: int = 0
    began_s: float = 0.0  # by the loop's clock, like all that follows
    sent_s: list[float] = field(default_factory=list)
    killed_s: list[float] = field(default_factory=list)
    changed_s: tuple[float, ...] = ()


def sample_inputs(runtime: PlanRuntime, seed: int) -> dict[str, Array]:
    """Random ones, by application."""
    chance = np.random.default_rng(seed)
    shapes = runtime.input_shapes()
    return {app: chance.standard_normal((1, *shape), dtype=np.float32) for app, shape in shapes.items()}


async def drive(runtime: PlanRuntime, load: Load, payloads: Mapping[str, Array]) -> Driven:
    """Returns when every request has its answer."""
    began_s = asyncio.get_running_loop().time()
    driven = Driven(began_s=began_s, changed_s=tuple(began_s + change.at_s for change in load.changes))
    senders = [
        _send(runtime, name, load.arrivals(name, app.rate), payloads[name], driven)
        for name, app in runtime.apps.items()
    ]
    await asyncio.gather(*senders, *(_kill(runtime, at_s, driven) for at_s in load.kills_s))
    return driven


async def _send(runtime: PlanRuntime, app: str, arrivals: Iterator[float], payload: Array, driven: Driven) -> None:
    loop = asyncio.get_running_loop()
    waiting: set[asyncio.Task[None]] = set()
    for due_s in arrivals:
        await asyncio.sleep(max(driven.began_s + due_s - loop.time(), 0.0))
        task = loop.create_task(_ask(runtime, app, payload, driven))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
    await asyncio.gather(*waiting)


async def _ask(runtime: PlanRuntime, app: str, payload: Array, driven: Driven) -> None:
    driven.sent += 1
    driven.sent_s.append(asyncio.get_running_loop().time())
    try:
        await runtime.submit(app, payload)
        driven.answered += 1
    except RequestError:
        driven.failed += 1


async def _kill(runtime: PlanRuntime, at_s: float, driven: Driven) -> None:
    """kill -9 of a function of the busiest group."""
    await asyncio.sleep(at_s)
    busiest = max(runtime.groups(), key=lambda group: group.account.requests)
    for instance in busiest.instances[:1]:
        instance.kill()
        driven.killed_s.append(asyncio.get_running_loop().time())


def report(runtime: PlanRuntime, driven: Driven) -> dict[str, Any]:
    totals = Totals(tuple(runtime.accounts()))
    ranked = totals.latencies_s
    return {
        "sent": driven.sent,
        "answered": driven.answered,
        "failed": driven.failed,
        "lost": driven.sent - driven.answered - driven.failed,
        "killed": len(driven.killed_s),
        "late": totals.late,
        "late_share": totals.late_share,
        **_undisturbed(runtime, driven, totals),
        "billed": totals.cost,
        "billed_starts": totals.start_cost,
        "forecast": totals.forecast,
        "forecast_error": totals.forecast_error(totals.cost),
        "latency_p50_s": percentile(ranked, 0.5),
        "latency_p99_s": percentile(ranked, 0.99),
        "changes": [_plain(change) for change in runtime.changes],
        "groups": [_account(account) for account in totals.groups],
        "late_requests": [
            {**asdict(late), "arrival_s": late.arrival_s - driven.began_s} for late in totals.late_requests
        ],
    }


def _undisturbed(runtime: PlanRuntime, driven: Driven, totals: Totals) -> dict[str, Any]:
    """Late requests but those that came while a killed function was replaced, or after a change of rate before the plan
    for it was in force."""
    spans = [(at_s, at_s + DEATH_S) for at_s in driven.killed_s]
    ready = [runtime.started_s + change.at_s + change.seconds for change in runtime.changes]
    spans += [(at_s, min((end for end in ready if end > at_s), default=at_s)) for at_s in driven.changed_s]

    def is_disturbed(at_s: float) -> bool:
        return any(first <= at_s <= last for first, last in spans)

    sent = sum(not is_disturbed(at_s) for at_s in driven.sent_s)
    late = sum(not is_disturbed(request.arrival_s) for request in totals.late_requests)
    return {"undisturbed": sent, "undisturbed_late": late, "undisturbed_late_share": late / max(sent, 1)}


def _account(account: Any) -> Mapping[str, Any]:
    return {key: value for key, value in vars(account).items() if key not in ("latencies_s", "late_requests")}


def _plain(change: Any) -> Mapping[str, Any]:
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in vars(change).items()}
