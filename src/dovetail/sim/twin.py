"""The simulated twin of a real node: the node of its log, asked the same in virtual time.

It takes from the log what belongs to the physics: how long turns and loads took, and what lay between turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import median
from typing import Any

from dovetail.eventlog import EventLog
from dovetail.node.events import StartLoad, StartResize, Turn
from dovetail.node.instance import State
from dovetail.node.node import Node
from dovetail.policy.placement import DeviceKind
from dovetail.profiles.live import LiveLatency
from dovetail.profiles.timings import kind_of
from dovetail.sim import real_log
from dovetail.sim.compositions import from_values
from dovetail.sim.device import Device
from dovetail.sim.driver import Simulation
from dovetail.sim.durations import NOISE_TABLE, Noise
from dovetail.sim.metrics import Result
from dovetail.sim.real_log import RealLog


def simulate(stored: RealLog, real: Result, seed: int = 0, noise: float = 0.05, log: EventLog | None = None) -> Result:
    """The same requests on the same node in virtual time."""
    arrivals = real_log.arrivals(stored, real)
    composition = from_values(stored.header["composition"])
    header = stored.header
    node = Node(header["node"], DeviceKind.CPU, header["memory_bytes"], real_log.hostings(stored), composition)
    outputs = {record.id: record.output_tokens for record in real.records}
    device = Device(node, outputs, MeasuredDurations(stored, Random(seed), noise))
    return Simulation([device], composition, arrivals, log=log, on_one_thread=True).timed_run()


class MeasuredDurations:
    """Turns of the same kind and loads take as long as they did on the real node on the whole. The node on it begins
    with what was known at first and learns as well."""

    def __init__(self, log: RealLog, rng: Random, noise: float) -> None:
        self._rng = rng
        self._noise = Noise(rng, noise)
        self._draw = self._noise.start()
        self._loads = real_log.load_times_s(log)
        self._timings = real_log.timings(log)
        self.gap_s = self._timings.mean_gap_s

    def turn_s(self, node: Node, turn: Turn) -> float:
        latency = turn.instance.hosting.latency
        assert isinstance(latency, LiveLatency)
        is_beside_load = any(one.state is State.LOADING for one in node.instances.values())
        amount = sum(share.tokens for share in turn.prompts) or len(turn.decoding)
        return turn.seconds(latency.base) * self._factor(is_beside_load, bool(turn.prompts), amount)

    def _factor(self, is_beside_load: bool, is_prefill: bool, amount: int) -> float:
        self._draw = draw = (self._draw + 1) % NOISE_TABLE
        return self._timings.factor(kind_of(is_prefill, is_beside_load, amount)) * self._noise.factors[draw]

    def load_s(self, node: Node, command: StartLoad) -> float:
        is_busy = any(one.state is not State.LOADING and any(one.works()) for one in node.instances.values())
        times = self._loads[is_busy] or self._loads[not is_busy]
        return self._rng.choice(times) if times else 0.0

    def resize_s(self, node: Node, command: StartResize) -> float:
        return 0.0

    def unload_s(self, node: Node) -> float:
        return 0.0


def side_by_side(real: Result, simulated: Sequence[Result]) -> list[dict[str, float | int | str]]:
    """What really happened, and the median of each figure over the simulations."""
    rows = [_row(result) for result in simulated]
    middle = {name: median(row[name] for row in rows) for name in rows[0]}
    return [{"run": "real", **_row(real)}, {"run": "simulated", **middle}]


def _row(result: Result) -> dict[str, float]:
    summary: dict[str, Any] = result.summary()
    row = {"requests": summary["requests"], "attainment": round(result.met() / len(result.waited_for), 4)}
    return row | {name: summary[name] for name in ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "cold_starts")}
