"""One large run: many nodes, models and requests, with its wall time and peak memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.policy.compositions import Composition
from dovetail.sim.compositions import DOVETAIL
from dovetail.sim.cost import cluster
from dovetail.sim.driver import Simulation
from dovetail.sim.workload import Workload, generate

LENGTHS = ((128, 8), (256, 16), (512, 16), (1024, 32))
RATE_PER_NODE = 1.0  # requests/s


def run_scale(
    profile: Path,
    nodes: int,
    models: int,
    requests: int,
    seed: int,
    composition: Composition = DOVETAIL,
    progress: Callable[[float], None] = lambda share: None,
) -> dict[str, Any]:
    started = time.perf_counter()
    workload = Workload(requests, models, RATE_PER_NODE * nodes, zipf=0.9, cv=2.0)
    arrivals = generate(workload, seed, LENGTHS)
    simulation = Simulation(cluster(profile, nodes, arrivals, composition, "llama-2-7b", seed), composition, arrivals)
    simulation.keep_samples = False
    simulation.on_sample = lambda now: progress(min(now / simulation.horizon_s, 1.0))
    result = simulation.timed_run()
    return {
        **result.summary(),
        "nodes": nodes,
        "models": models,
        "virtual_s": round(simulation.now, 1),
        "total_wall_s": round(time.perf_counter() - started, 1),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
