"""What decisions cost in processor time: admission in the controller, choice of turn in a node, by cluster size."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from dovetail.cluster.controller import Controller
from dovetail.node.events import Turn
from dovetail.node.node import Node
from dovetail.node.work import Work
from dovetail.policy.knobs import Knobs
from dovetail.policy.placement import DeviceKind
from dovetail.policy.presets import DOVETAIL
from dovetail.profiles.files import read_profile
from dovetail.sim.device import Device
from dovetail.sim.driver import Simulation
from dovetail.sim.durations import Noise
from dovetail.sim.metrics import percentile
from dovetail.sim.setup import make_devices, uniform_groups
from dovetail.sim.trace import Arrival
from dovetail.sim.workload import Workload, generate

REQUESTS_PER_NODE = 40
MODELS_PER_NODE = 16
RATE_PER_NODE = 0.65  # requests/s: the load of the 128-model trace on 8 nodes


class TimedNode(Node):
    turn_times_s: list[float]

    def next_turn(self, now: float) -> Turn | None:
        started = time.thread_time()
        turn = super().next_turn(now)
        if turn is not None:
            self.turn_times_s.append(time.thread_time() - started)
        return turn


class TimedController(Controller):
    admission_times_s: list[float]
    queues: list[int]  # who waited when a request came

    def submit(self, works: Sequence[Work], now: float) -> None:
        self.queues.append(len(self.room))
        started = time.thread_time()
        super().submit(works, now)
        self.admission_times_s.append(time.thread_time() - started)


def measure_decisions(
    profile: Path, nodes: int, shape: str = "llama-2-7b", seed: int = 0, load: float = 1.0
) -> dict[str, Any]:
    """At `load` times the usual rate."""
    requests = max(REQUESTS_PER_NODE * nodes, 2000)
    rate_per_s = RATE_PER_NODE * nodes * load
    arrivals = generate(Workload(requests, MODELS_PER_NODE * nodes, rate_per_s, zipf=1.0, cv=2.0), seed)
    devices = cluster(profile, nodes, arrivals, DOVETAIL, shape, seed, TimedNode)
    turn_times_s: list[float] = []
    for device in devices:
        assert isinstance(device.node, TimedNode)
        device.node.turn_times_s = turn_times_s
    simulation = Simulation(devices, DOVETAIL, arrivals)
    controller = TimedController(list(simulation.cluster.handles.values()), DOVETAIL)
    controller.admission_times_s, controller.queues = [], []
    simulation.cluster.runtime.controller = controller
    gc.collect()
    gc.freeze()  # as a server does when it is up: what lies there already is not looked through again and again
    simulation.run()
    gc.unfreeze()
    admissions = sorted(controller.admission_times_s)
    turns = sorted(turn_times_s)
    return {
        "nodes": nodes,
        "requests": requests,
        "queued_mean": round(sum(controller.queues) / len(controller.queues), 1),
        "admission_p50_us": round(1e6 * percentile(admissions, 0.50), 1),
        "admission_p99_us": round(1e6 * percentile(admissions, 0.99), 1),
        "turn_p50_us": round(1e6 * percentile(turns, 0.50), 2),
        "turn_p99_us": round(1e6 * percentile(turns, 0.99), 2),
    }


def cluster(
    profile: Path,
    nodes: int,
    arrivals: list[Arrival],
    knobs: Knobs,
    shape: str,
    seed: int,
    node_type: type[Node] = Node,
) -> list[Device]:
    """Half CPU nodes, half GPU nodes, all models of one shape."""
    measured = read_profile(profile)
    hostings = {kind: measured.hosting(shape, kind) for kind in DeviceKind}
    counts = {DeviceKind.CPU: nodes // 2, DeviceKind.GPU: nodes - nodes // 2}
    groups = uniform_groups(counts, hostings, arrivals, knobs)
    return make_devices(groups, arrivals, knobs, Noise(Random(seed), 0.05), node_type=node_type)
