"""Fault storms: small random clusters, models, composition and faults from one seed, with every invariant checked.

A violated invariant is reported with its seed; the same seed replays it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from random import Random

from dovetail.cluster.asking import SILENT_S
from dovetail.cluster.intake import Submission
from dovetail.eventlog import EventLog
from dovetail.node.node import Node
from dovetail.policy.compositions import SERVED, Composition
from dovetail.policy.displace import Migrating
from dovetail.policy.latency import GIB, Curve, LatencyModel, Surface
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.policy.relief import LiveRelief
from dovetail.policy.startup import SoonestStart
from dovetail.sim.baselines import Disaggregated, Evicting, Packing, StaticShares, Staying
from dovetail.sim.compositions import ABLATIONS, POLICIES, SERVED_ON_TIME
from dovetail.sim.device import Device
from dovetail.sim.driver import Simulation
from dovetail.sim.durations import Noise, PredictedDurations
from dovetail.sim.faults import draw_faults
from dovetail.sim.kv_blocks import KvBlocks
from dovetail.sim.relief import NoRelief, Recomputing
from dovetail.sim.server_storm import build_server_storm
from dovetail.sim.setup import INSTANCE_IDS
from dovetail.sim.static_shares import node_type
from dovetail.sim.workload import Workload, generate

PATIENCE_S = 600.0  # virtual time after the last arrival, and after the last end, by which a request must have ended
LENGTHS = ((64, 8), (300, 40), (900, 90), (1500, 200))
NEXT_S = 400.0  # longer than an idle instance is kept
VIOLATIONS = (AssertionError, LookupError, ValueError, ArithmeticError, AttributeError)


class Stuck(AssertionError):
    """A request neither ends nor moves."""


def run_storm(
    seeds: Iterable[int],
    tick: Callable[[], None] = lambda: None,
    limit: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    of_server: bool = False,
) -> list[tuple[int, str]]:
    """(seed, what was violated) for every seed that violates an invariant. `limit` raises Stuck in one whose virtual
    time stands still. `of_server`: of what a server runs, instead of the named policies."""
    failures = []
    for seed in seeds:
        try:
            with limit():
                run_one(seed, of_server=of_server)
        except VIOLATIONS as error:
            failures.append((seed, f"{type(error).__name__}: {error}"))
        tick()
    return failures


def run_one(seed: int, *, of_server: bool = False, log: EventLog | None = None) -> Simulation:
    simulation = (build_server_storm if of_server else build_storm)(seed, log)
    simulation.on_sample = lambda now: check(simulation, now)
    simulation.run()
    check_end(simulation)
    if of_server and log is None:
        check_newcomer(simulation)
    return simulation


def build_storm(seed: int, log: EventLog | None = None) -> Simulation:
    rng = Random(seed)
    composition = _draw_composition(rng)
    workload = Workload(
        requests=rng.randrange(30, 120),
        models=rng.randrange(2, 9),
        rate_per_s=rng.uniform(0.5, 8.0),
        zipf=rng.uniform(0.0, 1.5),
        cv=rng.choice((0.5, 1.0, 4.0)),
    )
    arrivals = generate(workload, seed, LENGTHS)
    outputs = {index: arrival.output_tokens for index, arrival in enumerate(arrivals)}
    transfer = composition.resizing.transfer(DeviceKind.GPU)
    noise = Noise(rng, 0.1)
    devices: list[Device] = []
    for index in range(rng.randrange(1, 5)):
        kind = (
            rng.choice((DeviceKind.CPU, DeviceKind.GPU))
            if index and composition.nodes.takes(DeviceKind.CPU)
            else DeviceKind.GPU
        )
        memory = int(rng.uniform(14, 60) * GIB)
        catalogue = {
            str(model): replace(_draw_hosting(Random(seed + model), kind), load_s=rng.uniform(0.0, 3.0))
            for model in range(workload.models)
        }
        first = index * INSTANCE_IDS
        make = node_type(composition)
        node = make(f"{kind.value}-{index}", kind, memory, catalogue, composition, first_instance=first)
        devices.append(Device(node, outputs, PredictedDurations(transfer, noise)))
        if not isinstance(composition.phases, Disaggregated):
            # Else an instance computes before it has room for blocks that were handed over.
            devices[-1].blocks = KvBlocks()
    horizon_s = arrivals[-1].arrival_s
    faults = draw_faults(rng, rng.randrange(0, 13), len(devices), horizon_s + 10)
    return Simulation(devices, composition, arrivals, horizon_s=horizon_s, log=log, faults=faults)


def _draw_composition(rng: Random) -> Composition:
    # What a server runs has storms of its own (`server_storm`).
    composition = POLICIES[rng.choice([name for name in POLICIES if name != SERVED_ON_TIME.name])]
    if composition.name in ("slinfer", "sllm+c+s") and rng.random() < 0.25:
        composition = composition.having(**ABLATIONS["pd"])
    elif rng.random() < 0.3:
        composition = SERVED
    if isinstance(composition.sharing, StaticShares):
        return composition
    is_apart = isinstance(composition.phases, Disaggregated)
    composition = composition.having(
        watermark=rng.choice((0.0, 0.25)),
        floor_tokens=rng.choice((0, 512, 4096)),
        num_victims=2 if rng.random() < 0.8 and not is_apart else 0,
        relief=_draw_relief(rng, is_apart=is_apart),
        starts=SoonestStart() if rng.random() < 0.5 else Packing(),
        making_way=rng.choice((Staying(), Migrating(), Evicting())),
        keep_alive_s=rng.choice((0.0, 1.0, 5.0)),
    )
    rng.choice(range(3)), rng.choice(range(2))  # what is drawn after this stays as it was with two more parameters
    return composition


def _draw_relief(rng: Random, *, is_apart: bool) -> LiveRelief | Recomputing | NoRelief:
    is_live = rng.random() < 0.5
    if is_apart:
        return NoRelief(ahead_s=0.0 if is_live else NoRelief().ahead_s)
    return LiveRelief() if is_live else Recomputing()


def _draw_hosting(rng: Random, kind: DeviceKind) -> Hosting:
    size = rng.choice((2.0, 6.0, 12.0))
    speed = size * (0.001 if kind is DeviceKind.GPU else 0.006)
    rows = [(length, Curve([(1, speed), (64, speed * (2 + length / 2048))])) for length in (512, 2048)]
    return Hosting(
        weight_bytes=int(size * GIB),
        kv_bytes_per_token=int(size * 2**16),
        latency=LatencyModel(Curve([(1, speed), (2048, speed * 20)]), Surface(rows)),
        slots=rng.choice((1, 2, 4)),
        concurrency=4,
        half_concurrency=2,
        weights_in_place=kind is DeviceKind.CPU,
    )


def check(simulation: Simulation, now: float) -> None:
    """Invariants that hold at any instant."""
    if now > simulation.horizon_s + PATIENCE_S and now > _last_end_s(simulation) + PATIENCE_S:
        stuck = [record.id for record in simulation.records if record.fate is None]
        raise Stuck(f"requests {stuck} have not ended by {now:.0f} s")
    for device in simulation.devices:
        check_node(device.node)
        if not (simulation.on_one_thread and device.node.turn is not None):  # else it carries things out at its end
            check_blocks(device)


def _last_end_s(simulation: Simulation) -> float:
    """A slow fleet takes long for a crowd; one that is stuck ends nothing any more."""
    return max((record.end_s for record in simulation.records if record.fate is not None), default=0.0)


def check_node(node: Node) -> None:
    node.device.ledger.check()
    for instance in node.instances.values():
        produced = {work.id: instance.produced(work) for work in instance.running.values()}
        held = sum(work.computed + instance.hosting.block_tokens for work in instance.works() if work.computed)
        assert instance.held_tokens == held, f"{node.name}: {instance.held_tokens} held tokens counted, {held} there"
        tokens = sum(work.input_tokens + produced[work.id] for work in instance.running.values())
        assert instance.tokens == tokens, f"{node.name}: {instance.tokens} tokens counted, {tokens} there"
        used = instance.used_blocks() * instance.hosting.block_tokens
        assert used <= instance.kv_tokens or instance.starved or not instance.can_run, (
            f"{node.name}: instance {instance.id} uses {used} of {instance.kv_tokens} tokens of KV"
        )


def check_blocks(device: Device) -> None:
    if device.blocks is not None:
        for instance in device.node.instances.values():
            device.blocks.check(instance)


def check_end(simulation: Simulation) -> None:
    """Every request ended exactly once (the driver asserts that none ends twice), and all memory came back."""
    open_requests = [record.id for record in simulation.records if record.fate is None]
    assert not open_requests, f"requests {open_requests} never ended"
    assert simulation.stories.open == 0, f"{simulation.stories.open} requests counted as open"
    controller = simulation.cluster.controller
    assert not controller.queued, "the controller still queues requests"
    assert not len(controller.migrations), "requests are still moving"
    assert not len(controller.displacements), "somebody still makes way"
    assert not controller.seeker.placer.leaving, "instances are still kept from others"
    assert not controller.seeker._owing, "a node still owes memory to somebody"
    assert not controller.works, "the controller still knows requests"
    assert controller.retries.next_s({}) is None or not any(node.up for node in controller.seeker.placer.nodes)
    assert not controller.retries._waiting, "lost requests still wait for a place"
    for device in simulation.devices:
        ledger = device.node.device.ledger
        assert ledger.waiting == 0, f"{device.node.name}: {ledger.waiting} operations wait in the reservation station"
        if device.blocks is not None:
            device.blocks.check_end()
        assert not device.node.instances, f"{device.node.name}: instances {list(device.node.instances)} remain"
        assert ledger.planned == ledger.held == 0, f"{device.node.name}: {ledger.held} bytes still held"


def check_newcomer(simulation: Simulation) -> None:
    """When all faults are over, and a while after the last request has ended, every model has a place at once."""
    cluster, now = simulation.cluster, simulation.now + SILENT_S
    for model in cluster.nodes[0].node.device.hostings:
        (id,) = cluster.submit(Submission(model, 1, now), now)
        assert cluster.controller.works[id].place is not None, f"an idle cluster does not take a request for {model}"
        cluster.cancel([id], now)
        now += NEXT_S
        cluster.wake(now)
