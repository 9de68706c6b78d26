"""A bound on any policy: no run beats it, and it says no where nobody can be served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from sim_builders import GIB, make_hosting
from typer.testing import CliRunner

from dovetail.cli.sim import app
from dovetail.node.node import Node
from dovetail.policy.compositions import SERVED, Composition
from dovetail.policy.headroom import SloRule
from dovetail.policy.latency import Curve, LatencyModel, Surface, TransferModel
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.sim.bound import Terms, bound
from dovetail.sim.compositions import POLICIES
from dovetail.sim.device import Device
from dovetail.sim.driver import Simulation
from dovetail.sim.durations import Noise, PredictedDurations
from dovetail.sim.linear import LinearProgram
from dovetail.sim.metrics import percentile
from dovetail.sim.pools import pools_of
from dovetail.sim.static_shares import node_type
from dovetail.sim.trace import Arrival, write_trace
from dovetail.sim.workload import Workload, generate

LENGTHS = ((60, 3), (300, 40), (900, 120), (2500, 30), (200, 400))


def hosting_for(rng: Random, kind: DeviceKind) -> Hosting:
    weight_gib = rng.choice((8.0, 16.0, 24.0))
    on_cpu = kind is DeviceKind.CPU
    hosting = make_hosting(weight_gib, decode_s=rng.uniform(0.05, 0.15) if on_cpu else rng.uniform(0.01, 0.08))
    load_s = 0.0 if on_cpu else TransferModel().load_s(hosting.weight_bytes)
    return replace(hosting, load_s=load_s, weights_in_place=on_cpu)


def simulated(seed: int, composition: Composition) -> Simulation:
    """A few nodes of one or two kinds with more requests than they can serve, without noise."""
    rng = Random(seed)
    models = rng.randrange(3, 9)
    workload = Workload(40, models, rng.uniform(1.0, 8.0), zipf=rng.uniform(0.0, 1.2), cv=rng.choice((1.0, 3.0)))
    arrivals = generate(workload, seed, LENGTHS)
    kinds = [DeviceKind.GPU, *([DeviceKind.CPU] if rng.random() < 0.5 else []), *([DeviceKind.GPU] * rng.randrange(2))]
    hostings = {kind: hosting_for(Random(seed), kind) for kind in DeviceKind}
    outputs = {number: arrival.output_tokens for number, arrival in enumerate(arrivals)}
    durations = PredictedDurations(TransferModel(), Noise(Random(seed), 0.0))
    devices = []
    for number, kind in enumerate(kinds):
        catalogue = dict.fromkeys(map(str, range(models)), hostings[kind])
        memory = int(rng.choice((30.0, 60.0)) * GIB)
        node = node_type(composition)(
            f"{kind}-{number}", kind, memory, catalogue, composition, first_instance=number * 1000
        )
        devices.append(Device(node, outputs, durations))
    return Simulation(devices, composition, arrivals)


@pytest.mark.parametrize("seed", range(4))
def test_no_policy_beats_the_bound(seed: int) -> None:
    policies = [POLICIES["dovetail"], POLICIES["slinfer"], POLICIES["sllm+c+s"], SERVED]
    first = simulated(seed, policies[0])
    terms = Terms(noise=0.0, slot_s=3.0)
    with_grace = bound(first.devices, first.arrivals, SloRule(), terms).met
    without = bound(first.devices, first.arrivals, SloRule(), replace(terms, grace=False)).met
    smooth = bound(first.devices, first.arrivals, SloRule(), replace(terms, silence_s=2.0)).met
    strict = bound(first.devices, first.arrivals, SloRule(), replace(terms, every_token=True)).met
    assert without <= with_grace <= 40
    assert max(smooth, strict) <= with_grace
    for composition in policies:
        result = simulated(seed, composition).run()
        assert result.met() <= with_grace, composition.name
        assert result.met_without_grace() <= without, composition.name
        assert result.met_strictly() <= strict, composition.name
        if percentile(result.silences(), 0.99) <= 2.0:
            assert result.met() <= smooth, composition.name


def overloaded(decode_s: float = 0.2, memory_gib: float = 30.0, models: int = 1) -> Simulation:
    """Twenty requests at once to one node, of 101 tokens each, due within 25 s and half a second."""
    hosting = replace(make_hosting(20.0, decode_s=decode_s), load_s=TransferModel().load_s(20 * GIB))
    arrivals = [Arrival(0.001 * number, number % models, 100, 101) for number in range(20)]
    composition = POLICIES["slinfer"]
    node = Node(
        "gpu-0", DeviceKind.GPU, int(memory_gib * GIB), dict.fromkeys(map(str, range(models)), hosting), composition
    )
    outputs = dict.fromkeys(range(20), 101)
    return Simulation(
        [Device(node, outputs, PredictedDurations(TransferModel(), Noise(Random(0), 0.0)))], composition, arrivals
    )


def bounded(simulation: Simulation, **terms: float) -> int:
    return bound(simulation.devices, simulation.arrivals, SloRule(), Terms(noise=0.0, grace=False, **terms)).met


def test_a_device_that_is_too_slow_for_one_serves_nobody() -> None:
    assert bounded(overloaded(decode_s=0.3)) == 0


def test_requests_of_one_model_share_iterations_and_those_of_many_do_not() -> None:
    assert bounded(overloaded(decode_s=0.02, models=1)) == 20
    alone_s, window_s = 0.2 * 100, 25.5 + 2 * 5.0  # what a request takes by itself; the slots that its time touches
    assert bounded(overloaded(models=20)) <= window_s / alone_s + 1


def test_who_may_not_fall_silent_holds_memory() -> None:
    """Twenty models of which one fits: with pauses they may take turns at it, without hardly."""
    crowd = overloaded(decode_s=0.01, models=20)
    assert bounded(crowd, silence_s=0.5, slot_s=1.0) < bounded(crowd)


def test_planes_lie_under_the_surface_everywhere() -> None:
    rows = [(512, Curve([(1, 0.02), (8, 0.03), (64, 0.05)])), (2048, Curve([(1, 0.021), (4, 0.024), (16, 0.09)]))]
    latency = LatencyModel(Curve([(1, 0.02), (1024, 0.1)]), Surface(rows))
    simulation = overloaded()
    node = simulation.devices[0].node
    node.device.hostings = {"0": replace(node.device.hostings["0"], latency=latency)}
    pool = pools_of(simulation.devices, 700)[0]
    for batch in (1, 2, 3, 7, 16, 40, 200):
        for tokens in (1, 300, 512, 1000, 2048, 9000):
            least = max(plane.turn_s + batch * (plane.request_s + tokens * plane.token_s) for plane in pool.planes["0"])
            assert least <= latency.decode_s(batch, batch * tokens) * (1 + 1e-9)
    assert pool.decode_s("0", 700) > 0.9 * latency.decode_s(1, 700)


def test_a_program_says_what_its_dual_certifies() -> None:
    program = LinearProgram()
    x, y = program.variable(4.0, gain=3.0), program.variable(10.0, gain=2.0)
    program.at_most([(x, 1.0), (y, 1.0)], 6.0)
    values, certified = program.solve()
    assert values == pytest.approx([4.0, 2.0])
    assert certified == pytest.approx(16.0)
    assert certified >= 16.0 - 1e-9


def test_the_command_prints_a_row_for_each_setting(tmp_path: Path) -> None:
    trace, profile = tmp_path / "t.csv", tmp_path / "p.json"
    write_trace(trace, generate(Workload(20, 4, 2.0), 0))
    point = {"prefill_ms": [[1, 15], [1024, 90]], "decode_ms": [{"mean_length": 512, "batch_ms": [[1, 14], [32, 30]]}]}
    shape = {"shape": {"weight_gib": 10.0, "kv_kib_per_token": 512}}
    hardware = {"fast": {"kind": "gpu", **point}, "slow": {"kind": "cpu", **point}}
    profile.write_text(json.dumps({"models": {"tiny": {**shape, "hardware": hardware}}}))
    options = ["--trace", str(trace), "--profile", str(profile), "--shape", "tiny", "--json"]
    result = CliRunner().invoke(app, ["bound", *options])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert [row["labels"] for row in rows] == [[]]  # policies differ, the setting does not
    assert rows[0]["requests"] == rows[0]["met_at_most"] == 20
    assert 0 < rows[0]["without_grace_at_most"] <= 20
