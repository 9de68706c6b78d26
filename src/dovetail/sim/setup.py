"""From options to a simulation: nodes of the paper's test bed, models of one shape, a trace, a policy, a seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from dovetail.errors import ConfigError
from dovetail.node.node import Node
from dovetail.policy.knobs import Knobs
from dovetail.policy.latency import GIB, IN_PLACE_RESIZE, TransferModel
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.sim.device import Device, Noise
from dovetail.sim.driver import Simulation
from dovetail.sim.faults import draw_faults
from dovetail.sim.hardware import PRESETS, hosting_of
from dovetail.sim.log import EventLog
from dovetail.sim.metrics import Result
from dovetail.sim.profile import Profile, read_profile
from dovetail.sim.trace import Arrival, keep_models, read_trace

GPU_MEMORY_GIB = 78.0
CPU_MEMORY_GIB = 256.0
RESERVED_PER_SLOT_GIB = 1.5  # runtime of one instance
INSTANCE_IDS = 1_000_000  # each node numbers its instances from a range of its own


@dataclass(frozen=True)
class Setup:
    """One run. Everything that decides its outcome is here."""

    trace: Path
    profile: Path
    knobs: Knobs
    shape: str = "llama-2-7b"
    models: int | None = None
    cpu_nodes: int = 4
    gpu_nodes: int = 4
    seed: int = 0
    noise: float = 0.05
    cpu_hardware: str | None = None
    gpu_hardware: str | None = None
    limit_s: float | None = None  # arrivals after this are left out
    faults: int = 0  # this many, drawn from the seed


def build(setup: Setup, log: EventLog | None = None) -> Simulation:
    arrivals = read_trace(setup.trace)
    if setup.models is not None:
        arrivals = keep_models(arrivals, setup.models)
    if setup.limit_s is not None:
        arrivals = [arrival for arrival in arrivals if arrival.arrival_s < setup.limit_s]
    if not arrivals:
        raise ConfigError(f"{setup.trace}: no request is left after --models and --limit")
    profile = read_profile(setup.profile)
    hostings: dict[DeviceKind, Hosting] = {}
    if setup.cpu_nodes:
        hostings[DeviceKind.CPU] = _hosting(profile, setup.shape, DeviceKind.CPU, setup.cpu_hardware)
    if setup.gpu_nodes:
        hostings[DeviceKind.GPU] = _hosting(profile, setup.shape, DeviceKind.GPU, setup.gpu_hardware)
    horizon_s = math.ceil(arrivals[-1].arrival_s / 60) * 60.0
    return assemble(setup, arrivals, hostings, horizon_s, log)


def _hosting(profile: Profile, shape: str, kind: DeviceKind, hardware: str | None) -> Hosting:
    """Measured where the profile has it, by roofline where the name is a preset's."""
    if hardware in PRESETS and hardware not in profile.hardware_of(shape):
        return hosting_of(PRESETS[hardware], profile.shape(shape))
    return profile.hosting(shape, kind, hardware)


def assemble(
    setup: Setup,
    arrivals: list[Arrival],
    hostings: dict[DeviceKind, Hosting],
    horizon_s: float,
    log: EventLog | None = None,
) -> Simulation:
    noise = Noise(Random(setup.seed), setup.noise)
    counts = {DeviceKind.CPU: setup.cpu_nodes, DeviceKind.GPU: setup.gpu_nodes}
    hardware = {DeviceKind.CPU: setup.cpu_hardware, DeviceKind.GPU: setup.gpu_hardware}
    devices = make_devices(counts, hostings, arrivals, setup.knobs, noise, hardware)
    if not devices:
        raise ConfigError("--cpu-nodes and --gpu-nodes are both 0")
    check_fit(devices, sorted({arrival.model for arrival in arrivals}))
    faults = draw_faults(Random(setup.seed + 1), setup.faults, len(devices), horizon_s)
    return Simulation(devices, setup.knobs, arrivals, horizon_s=horizon_s, log=log, faults=faults)


def make_devices(
    counts: Mapping[DeviceKind, int],
    hostings: Mapping[DeviceKind, Hosting],
    arrivals: Sequence[Arrival],
    knobs: Knobs,
    noise: Noise,
    hardware: Mapping[DeviceKind, str | None] | None = None,
    node_type: type[Node] = Node,
) -> list[Device]:
    """CPU nodes, then GPU nodes; every model of the arrivals has the one shape of its kind's hosting."""
    outputs = {index: arrival.output_tokens for index, arrival in enumerate(arrivals)}
    names = sorted({arrival.model for arrival in arrivals})
    transfer = IN_PLACE_RESIZE if knobs.free_resize else TransferModel()
    devices: list[Device] = []
    for kind in DeviceKind:
        if not counts[kind]:
            continue
        catalogue = {str(model): hostings[kind] for model in names}
        memory = int(memory_gib(kind, hostings[kind], knobs, (hardware or {}).get(kind)) * GIB)
        for index in range(counts[kind]):
            first = len(devices) * INSTANCE_IDS
            node = node_type(f"{kind.value}-{index}", kind, memory, catalogue, knobs, first_instance=first)
            devices.append(Device(node, outputs, transfer, noise))
    return devices


def memory_gib(kind: DeviceKind, hosting: Hosting, knobs: Knobs, hardware: str | None = None) -> float:
    total = CPU_MEMORY_GIB if kind is DeviceKind.CPU else GPU_MEMORY_GIB
    if hardware in PRESETS:
        total = PRESETS[hardware].memory_gib
    return total - RESERVED_PER_SLOT_GIB * (hosting.slots if knobs.slots_limited else 1)


def check_fit(devices: list[Device], names: list[int]) -> None:
    """A model that fits no node is an error of the set-up, not a request to drop."""
    for name in names:
        for device in devices:
            hosting = device.node.admit.hostings[str(name)]
            need = 0 if hosting.weights_in_place else hosting.weight_bytes
            need += device.node.admit.required(hosting, [(1, 0)]) * hosting.kv_bytes_per_token
            if need <= device.node.residency.ledger.capacity:
                break
        else:
            raise ConfigError(f"model {name} fits nowhere: it needs {need / GIB:.1f} GiB, more than any node has")


def run(setup: Setup, log: EventLog | None = None) -> Result:
    return build(setup, log).timed_run()
