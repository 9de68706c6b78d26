"""What decisions cost in processor time: admission in the controller, choice of turn in a node, by cluster size."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from dovetail.cluster.request import RequestState
from dovetail.machine import spare_collector
from dovetail.node.events import Turn
from dovetail.node.node import Node
from dovetail.policy.compositions import Composition
from dovetail.policy.latency import GIB, Curve, LatencyModel, Surface
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.profiles.files import read_profile
from dovetail.profiles.storage import SLLM_CLUSTER
from dovetail.sim.compositions import DOVETAIL, SERVERLESSLLM
from dovetail.sim.device import Device
from dovetail.sim.driver import Simulation
from dovetail.sim.durations import Noise
from dovetail.sim.metrics import percentile
from dovetail.sim.setup import NodeGroup, make_devices, uniform_groups
from dovetail.sim.trace import Arrival
from dovetail.sim.workload import Workload, generate

REQUESTS_PER_NODE = 40
MODELS_PER_NODE = 16
PLACEMENTS_PER_SERVER = 3
RATE_PER_SERVER = 0.5  # requests/s
RATE_PER_NODE = 0.65  # requests/s: the load of the 128-model trace on 8 nodes


class TimedNode(Node):
    turn_times_s: list[float]

    def next_turn(self, now: float) -> Turn | None:
        started = time.thread_time()
        turn = super().next_turn(now)
        if turn is not None:
            self.turn_times_s.append(time.thread_time() - started)
        return turn


def time_submissions(simulation: Simulation) -> tuple[list[float], list[int]]:
    """Seconds of each request's admission, and how many were queued when it came; filled while it runs."""
    controller = simulation.cluster.controller
    times_s: list[float] = []
    queues: list[int] = []
    begin = controller.queued.begin

    def timed(works: Sequence[RequestState], now: float) -> None:
        queues.append(len(controller.seeker.room))
        started = time.thread_time()
        begin(works, now)
        times_s.append(time.thread_time() - started)

    controller.queued.begin = timed  # type: ignore[method-assign]
    return times_s, queues


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
    times_s, queues = time_submissions(simulation)
    run_as_served(simulation)
    admissions = sorted(times_s)
    turns = sorted(turn_times_s)
    return {
        "nodes": nodes,
        "requests": requests,
        "queued_mean": round(sum(queues) / len(queues), 1),
        "admission_p50_us": round(1e6 * percentile(admissions, 0.50), 1),
        "admission_p99_us": round(1e6 * percentile(admissions, 0.99), 1),
        "turn_p50_us": round(1e6 * percentile(turns, 0.50), 2),
        "turn_p99_us": round(1e6 * percentile(turns, 0.99), 2),
    }


def run_as_served(simulation: Simulation) -> None:
    """With the collector of garbage as a server has it when it is up."""
    before = gc.get_threshold()
    spare_collector()
    simulation.run()
    gc.unfreeze()
    gc.set_threshold(*before)


def measure_placement(servers: int, seed: int = 0) -> dict[str, Any]:
    """L6, L7 on machines of four GPUs each, of which three quarters are taken in the end. Tokens take long, so that
    there are few of them beside the decisions."""
    count, models = PLACEMENTS_PER_SERVER * servers, 2 * servers
    arrivals = [
        arrival._replace(ttft_s=300.0, tpot_s=60.0)
        for arrival in generate(Workload(count, models, RATE_PER_SERVER * servers, zipf=0.9, cv=2.0), seed, ((128, 4),))
    ]
    slow = LatencyModel(Curve([(1, 1.0), (2048, 2.0)]), Surface([(512, Curve([(1, 1.0), (2, 1.0)]))]))
    hosting = Hosting(int(12.4 * GIB), 512 * 1024, slow, load_s=1.0, keep_alive_s=2.0)
    catalogue = dict.fromkeys(map(str, range(models)), hosting)
    composition = SERVERLESSLLM
    group = NodeGroup("gpu", DeviceKind.GPU, 4 * servers, catalogue, 44.0, "a40-48g", SLLM_CLUSTER, per_machine=4)
    devices = make_devices([group], arrivals, composition, Noise(Random(seed), 0.05))
    simulation = Simulation(devices, composition, arrivals)
    simulation.keep_samples = False
    times_s, queues = time_submissions(simulation)
    run_as_served(simulation)
    ranked = sorted(times_s)
    controller = simulation.cluster.controller
    return {
        "servers": servers,
        "GPUs": 4 * servers,
        "models": models,
        "decisions": len(ranked),
        "queued_mean": round(sum(queues) / len(queues), 1),
        "made_way": controller.displacements.completed,
        "decision_p50_us": round(1e6 * percentile(ranked, 0.50), 1),
        "decision_p99_us": round(1e6 * percentile(ranked, 0.99), 1),
        "decisions_per_s": round(len(ranked) / sum(ranked)),
    }


def cluster(
    profile: Path,
    nodes: int,
    arrivals: list[Arrival],
    composition: Composition,
    shape: str,
    seed: int,
    make_node: type[Node] | None = None,
) -> list[Device]:
    """Half CPU nodes, half GPU nodes, all models of one shape."""
    measured = read_profile(profile)
    hostings = {kind: measured.hosting(shape, kind) for kind in DeviceKind}
    counts = {DeviceKind.CPU: nodes // 2, DeviceKind.GPU: nodes - nodes // 2}
    groups = uniform_groups(counts, hostings, arrivals, composition)
    return make_devices(groups, arrivals, composition, Noise(Random(seed), 0.05), make_node)
