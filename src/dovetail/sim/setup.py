"""From options to a simulation: nodes of the paper's test bed or of a layout, a trace, a policy, a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from dovetail.errors import ConfigError
from dovetail.eventlog import EventLog
from dovetail.node.node import Node
from dovetail.policy.compositions import Composition
from dovetail.policy.latency import GIB, TransferModel
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.profiles.files import DEFAULT_PRESETS, MEASURED, Profile, read_profile
from dovetail.profiles.hardware import PRESETS, Shape, hosting_of
from dovetail.profiles.storage import STORAGES, Storage, Tier
from dovetail.sim.baselines import Alone, Slots, StaticShares
from dovetail.sim.device import Device
from dovetail.sim.driver import Simulation
from dovetail.sim.durations import Noise, PredictedDurations
from dovetail.sim.faults import draw_faults
from dovetail.sim.layout import Layout, ModelSection, NodeSection, line_of
from dovetail.sim.metrics import Result
from dovetail.sim.static_shares import node_type
from dovetail.sim.tiers import Machine
from dovetail.sim.trace import Arrival, first_line_of, keep_models, read_trace
from dovetail.sim.workload import (
    read_clients,
    read_lengths,
    rearrange,
    with_best_effort,
    with_clients,
    with_lengths,
    with_priority,
)

GPU_MEMORY_GIB = 78.0
CPU_MEMORY_GIB = 256.0
RESERVED_PER_SLOT_GIB = 1.5  # runtime of one instance
INSTANCE_IDS = 1_000_000  # each node numbers its instances from a range of its own


@dataclass(frozen=True)
class Setup:
    """One run. Everything that decides its outcome is here."""

    trace: Path
    profile: Path
    composition: Composition
    shape: str = "llama-2-7b"
    models: int | None = None
    cpu_nodes: int = 4
    gpu_nodes: int = 4
    seed: int = 0
    noise: float = 0.05
    cpu_hardware: str | None = None
    gpu_hardware: str | None = None
    limit_s: float | None = None  # arrivals after this are left out
    varied: bool = False  # the seed varies the trace as well: where it begins, and which model is which
    lengths: Path | None = None  # a table to draw lengths from, instead of the trace's
    clients: Path | None = None  # a table of clients, one for each model, whose lengths are drawn
    faults: int = 0  # this many, drawn from the seed
    best_effort_per_s: float = 0.0  # requests of best effort beside the trace's, drawn from the seed
    priority: float = 0.0  # share of the trace's that go first, likewise
    layout: Layout | None = None  # instead of shape, models and the four about nodes
    config: Path | None = None  # where the layout was read, for messages


@dataclass(frozen=True)
class NodeGroup:
    """`count` nodes alike, and what each can host."""

    name: str
    kind: DeviceKind
    count: int
    catalogue: Mapping[str, Hosting]  # by the trace's number of the model
    memory_gib: float
    hardware: str | None = None
    storage: Storage | None = None  # where weights lie; None = a load takes the same wherever they are
    per_machine: int = 1  # with `storage`: nodes that share one
    is_stocked: bool = True  # with `storage`: its disk has the models from the start


def build(setup: Setup, log: EventLog | None = None) -> Simulation:
    arrivals = read_trace(setup.trace)
    if setup.models is not None:
        arrivals = keep_models(arrivals, setup.models)
    arrivals = _vary(setup, arrivals)
    if setup.limit_s is not None:
        arrivals = [arrival for arrival in arrivals if arrival.arrival_s < setup.limit_s]
    profile = read_profile(setup.profile)
    if setup.layout is not None:
        groups, arrivals = _groups_of_layout(setup, setup.layout, profile, arrivals)
    else:
        groups = _groups_of_options(setup, profile, arrivals)
    if not arrivals:
        raise ConfigError(f"{setup.trace}: no request is left after --models, --limit and --config")
    if setup.best_effort_per_s:
        arrivals = with_best_effort(arrivals, setup.best_effort_per_s, setup.seed)
    if setup.priority:
        arrivals = with_priority(arrivals, setup.priority, setup.seed)
    return assemble(setup, arrivals, groups, log)


def _vary(setup: Setup, arrivals: list[Arrival]) -> list[Arrival]:
    if setup.varied:
        arrivals = rearrange(arrivals, setup.seed)
    if setup.lengths is not None:
        arrivals = with_lengths(arrivals, read_lengths(setup.lengths), setup.seed)
    if setup.clients is not None:
        arrivals = with_clients(arrivals, read_clients(setup.clients), setup.seed)
    return arrivals


def _groups_of_options(setup: Setup, profile: Profile, arrivals: Sequence[Arrival]) -> list[NodeGroup]:
    """All models of one shape on CPU nodes and GPU nodes of one hardware each."""
    counts = {DeviceKind.CPU: setup.cpu_nodes, DeviceKind.GPU: setup.gpu_nodes}
    hardware = {DeviceKind.CPU: setup.cpu_hardware, DeviceKind.GPU: setup.gpu_hardware}
    if not any(counts.values()):
        raise ConfigError("--cpu-nodes and --gpu-nodes are both 0")
    hostings = {kind: _hosting(profile, setup.shape, kind, hardware[kind]) for kind in DeviceKind if counts[kind]}
    return uniform_groups(counts, hostings, arrivals, setup.composition, hardware)


def uniform_groups(
    counts: Mapping[DeviceKind, int],
    hostings: Mapping[DeviceKind, Hosting],
    arrivals: Sequence[Arrival],
    composition: Composition,
    hardware: Mapping[DeviceKind, str | None] | None = None,
) -> list[NodeGroup]:
    """CPU nodes, then GPU nodes; every model of the arrivals has the one shape of its kind's hosting."""
    names = [str(model) for model in sorted({arrival.model for arrival in arrivals})]
    groups = []
    for kind in DeviceKind:
        if counts[kind]:
            name = (hardware or {}).get(kind)
            memory = memory_gib(kind, hostings[kind].slots, composition, name)
            groups.append(NodeGroup(kind.value, kind, counts[kind], dict.fromkeys(names, hostings[kind]), memory, name))
    return groups


def _groups_of_layout(
    setup: Setup, layout: Layout, profile: Profile, arrivals: Sequence[Arrival]
) -> tuple[list[NodeGroup], list[Arrival]]:
    """What the file asks for, and the arrivals of the models that it asks for."""
    sections = layout.assign(sorted({arrival.model for arrival in arrivals}))
    groups = []
    for index, node in enumerate(layout.nodes):
        kind = DeviceKind(node.device)
        hostings = {
            name: _section_hosting(setup, index, node, name, model, profile)
            for name, model in layout.models.items()
            if node.device in model.devices
        }
        catalogue = {str(model): hostings[name] for model, name in sections.items() if name in hostings}
        slots = max((hosting.slots for hosting in hostings.values()), default=1)
        total_gib = None if node.memory is None else node.memory / GIB
        memory = memory_gib(kind, slots, setup.composition, node.hardware, total_gib)
        storage = None if node.storage is None else STORAGES[node.storage]
        groups.append(
            NodeGroup(node.name, kind, node.count, catalogue, memory, node.hardware, storage, node.per_machine)
        )
    return groups, [arrival for arrival in arrivals if arrival.model in sections]


def _section_hosting(
    setup: Setup, index: int, node: NodeSection, name: str, model: ModelSection, profile: Profile
) -> Hosting:
    kind = DeviceKind(node.device)
    where = line_of(setup.config, "nodes", index, "hardware") + f"nodes.{index}.hardware"
    if model.shape is not None:
        if node.hardware is not None and node.hardware not in (*PRESETS, *profile.hardware_of(model.shape)):
            raise ConfigError(f"{where}: {node.hardware!r} is neither a preset nor in {setup.profile}")
        hosting = _hosting(profile, model.shape, kind, node.hardware)
    else:
        presets = {measured: preset for preset, measured in MEASURED.items()}
        preset = presets.get(node.hardware or "", node.hardware or DEFAULT_PRESETS[kind])
        if preset not in PRESETS:
            raise ConfigError(f"{where}: models.{name} needs a preset, and {preset!r} is none")
        weights, kv_per_token, layers = model.roofline
        hosting = hosting_of(PRESETS[preset], Shape(weights / GIB, kv_per_token / 1024, layers))
    if model.concurrency is None:
        return hosting
    return replace(hosting, concurrency=model.concurrency, half_concurrency=model.concurrency)


def _hosting(profile: Profile, shape: str, kind: DeviceKind, hardware: str | None) -> Hosting:
    """Measured where the profile has it, by roofline where the name is a preset's."""
    if hardware in PRESETS and hardware not in profile.hardware_of(shape):
        return hosting_of(PRESETS[hardware], profile.shape(shape))
    return profile.hosting(shape, kind, hardware)


def assemble(
    setup: Setup, arrivals: list[Arrival], groups: Sequence[NodeGroup], log: EventLog | None = None
) -> Simulation:
    devices = make_devices(groups, arrivals, setup.composition, Noise(Random(setup.seed), setup.noise))
    check_fit(setup, devices, sorted({arrival.model for arrival in arrivals}))
    horizon_s = math.ceil(arrivals[-1].arrival_s / 60) * 60.0
    faults = draw_faults(Random(setup.seed + 1), setup.faults, len(devices), horizon_s)
    return Simulation(devices, setup.composition, arrivals, horizon_s=horizon_s, log=log, faults=faults)


def make_devices(
    groups: Sequence[NodeGroup],
    arrivals: Sequence[Arrival],
    composition: Composition,
    noise: Noise,
    make_node: type[Node] | None = None,
) -> list[Device]:
    outputs = {index: arrival.output_tokens for index, arrival in enumerate(arrivals)}
    devices: list[Device] = []
    for group in groups:
        transfer = _transfer(group, composition)
        memory = int(group.memory_gib * GIB)
        machines = _machines(group)
        for index in range(group.count):
            machine = machines[index // group.per_machine] if machines else None
            catalogue = group.catalogue if machine is None else machine.hostings
            first = len(devices) * INSTANCE_IDS
            name = f"{group.name}-{index}"
            node = (make_node or node_type(composition))(
                name, group.kind, memory, catalogue, composition, first_instance=first
            )
            devices.append(Device(node, outputs, PredictedDurations(transfer, noise)))
            devices[-1].machine = machine
    return devices


def _machines(group: NodeGroup) -> list[Machine]:
    """Each of several devices, whose weights come from its tiers."""
    storage = group.storage
    if storage is None:
        return []
    variants = {id(hosting): _by_tier(storage, hosting) for hosting in group.catalogue.values()}
    by_tier = {model: variants[id(hosting)] for model, hosting in group.catalogue.items()}
    count = -(group.count // -group.per_machine)
    names = (f"{group.name}-machine-{index}" for index in range(count))
    return [Machine(name, storage, by_tier, is_stocked=group.is_stocked) for name in names]


def _by_tier(storage: Storage, hosting: Hosting) -> dict[Tier, Hosting]:
    size = hosting.weight_bytes
    loads = {tier: (storage.load_s(tier, size), storage.shared_s(tier, size)) for tier in Tier}
    return {tier: replace(hosting, load_s=load_s, disk_s=disk_s) for tier, (load_s, disk_s) in loads.items()}


def _transfer(group: NodeGroup, composition: Composition) -> TransferModel:
    transfer = composition.resizing.transfer(DeviceKind.GPU)
    if group.hardware in PRESETS:
        return replace(transfer, load_bytes_per_s=PRESETS[group.hardware].load_gib_per_s * GIB)
    return transfer


def memory_gib(
    kind: DeviceKind, slots: int, composition: Composition, hardware: str | None = None, total_gib: float | None = None
) -> float:
    """What instances may take of a node: without the runtime of as many as it may hold."""
    if total_gib is None:
        total_gib = CPU_MEMORY_GIB if kind is DeviceKind.CPU else GPU_MEMORY_GIB
        if hardware in PRESETS:
            total_gib = PRESETS[hardware].memory_gib
    return total_gib - RESERVED_PER_SLOT_GIB * (
        slots if isinstance(composition.sharing, Slots | Alone | StaticShares) else 1
    )


def check_fit(setup: Setup, devices: list[Device], models: list[int]) -> None:
    """A model that fits no node is an error of the set-up, not a request to drop."""
    for model in models:
        hosts = [device.node for device in devices if str(model) in device.node.device.hostings]
        if not any(_need_bytes(node, model) <= node.device.ledger.capacity for node in hosts):
            need_gib = min((_need_bytes(node, model) for node in hosts), default=0) / GIB
            largest_gib = max((node.device.ledger.capacity for node in hosts), default=0) / GIB
            reason = f"it needs {need_gib:.1f} GiB, more than any node has ({largest_gib:.1f} GiB)"
            raise ConfigError(_where(setup, model) + (reason if hosts else "no node is of a device that it names"))


def _need_bytes(node: Node, model: int) -> int:
    hosting = node.device.hostings[str(model)]
    weights = 0 if hosting.weights_in_place else hosting.weight_bytes
    return weights + node.admit.required(hosting, str(model), [(1, 0)]) * hosting.kv_bytes_per_token


def _where(setup: Setup, model: int) -> str:
    if setup.layout is not None and setup.config is not None:
        name = setup.layout.assign([model])[model]
        return f"{line_of(setup.config, 'models', name)}models.{name}: model {model} of the trace fits nowhere: "
    line = first_line_of(setup.trace, model)
    return f"{setup.trace}: line {line}: model {model} ({setup.shape}) fits nowhere: "


def run(setup: Setup, log: EventLog | None = None) -> Result:
    return build(setup, log).timed_run()
