"""A model that reads its layers from a disk, simulated: others compute meanwhile, as on a node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from sim_builders import make_hosting, make_latency, make_node
from test_worker_layers import LayerRig

from dovetail.eventlog import open_log
from dovetail.policy.compositions import SERVED
from dovetail.policy.latency import TransferModel
from dovetail.policy.placement import DeviceKind
from dovetail.policy.streaming import with_link
from dovetail.profiles.live import LiveLatency
from dovetail.sim import real_log, twin
from dovetail.sim.device import Device
from dovetail.sim.driver import Simulation
from dovetail.sim.durations import Noise, PredictedDurations
from dovetail.sim.metrics import Fate
from dovetail.sim.trace import Arrival

LINK_S, LAYER_S = 4.0, 0.02


def simulation(arrivals: list[Arrival]) -> Simulation:
    hosting = replace(make_hosting(1.0, kv_kib=16), latency=LiveLatency(make_latency(0.02)))
    latency = LiveLatency(with_link(make_latency(0.2), LINK_S), LINK_S)
    node = make_node((), kind=DeviceKind.CPU, composition=SERVED, hosting=hosting)
    node.device.hostings["0"] = hosting  # type: ignore[index]
    node.device.hostings["1"] = replace(hosting, latency=latency, layer_s=LAYER_S)  # type: ignore[index]
    outputs = {index: arrival.output_tokens for index, arrival in enumerate(arrivals)}
    device = Device(node, outputs, PredictedDurations(TransferModel(), Noise(Random(0), 0.0)))
    return Simulation([device], SERVED, arrivals)


def test_a_neighbour_is_in_time_beside_iterations_of_seconds() -> None:
    slow = [Arrival(0.0, 1, 100, 12), Arrival(20.0, 1, 50, 6)]
    fast = [Arrival(1.0 + 2.5 * at, 0, 64, 40) for at in range(20)]
    result = simulation(sorted([*slow, *fast])).run()
    assert all(record.fate is Fate.FINISHED for record in result.records)
    for record in result.records:
        if record.model == 0:
            assert record.first_token_s is not None
            assert record.first_token_s - record.arrival_s < 0.5 + record.grace_s
            assert record.silence_s < 0.1
        else:
            assert record.end_s - record.first_token_s >= (record.output_tokens - 1) * LINK_S * 0.999


@pytest.mark.parametrize("seed", range(3))
def test_the_twin_of_a_node_that_reads_layers_lets_the_same_requests_be_in_time(tmp_path: Path, seed: int) -> None:
    rig, rng = LayerRig("abl", latency=make_latency(0.01), log=open_log(tmp_path / "node.jsonl")), Random(seed)
    rig.submit("first", "l", tokens=6)
    for number in range(12):
        rig.submit(f"r{number}", "ab"[number % 2], prompt=20 + number, tokens=1 + rng.randrange(30))
        for _ in range(3):
            rig.finish_load() if rig.commands else rig.step()
    rig.submit("last", "l", tokens=3)
    rig.run()
    stored = real_log.read_real(tmp_path / "node.jsonl")
    real = real_log.real_result(stored)
    simulated = twin.simulate(stored, real)
    assert [one.fate for one in simulated.records] == [one.fate for one in real.records]
    for ours, theirs in zip(simulated.records, real.records, strict=True):
        took_s, real_s = (one.end_s - one.arrival_s for one in (ours, theirs))
        assert 0.5 < took_s / real_s < 2.0 if ours.model == 2 else max(took_s, real_s) < 1.0
