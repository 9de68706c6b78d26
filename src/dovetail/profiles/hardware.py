"""Hardware presets by roofline: iteration times of any model shape from a device's arithmetic and bandwidth.

    prefill(n) = floor + max(2·P·n / flops, weights / bandwidth) + attention(n)
    decode(b, l) = floor + max(weights / bandwidth, 2·P·b / flops) + b·l·kv / bandwidth

with P parameters, b requests of mean length l, and the efficiencies below. They are set once per kind of device from
the A100 and Xeon rows of measured profiles; `roofline_error` states how far the model then is from such a profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.policy.latency import GIB, Curve, Latency, LatencyModel, Surface
from dovetail.policy.placement import DeviceKind, Hosting

LENGTHS = (1, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Hardware:
    name: str
    kind: DeviceKind
    flops: float  # dense bf16, peak
    bandwidth: float  # bytes/s, peak
    memory_gib: float
    load_gib_per_s: float  # host to device
    prefill_efficiency: float
    weight_efficiency: float  # of bandwidth, reading weights
    kv_efficiency: float  # of bandwidth, reading the KV cache
    floor_s: float  # launch and sampling of one iteration
    layer_s: float = 0.0  # per layer on top


GPU = Hardware("a100-80g", DeviceKind.GPU, 312e12, 2.039e12, 78.0, 13.0, 0.64, 0.85, 0.55, 0.004, 0.00010)
XEON = Hardware("xeon-32c-amx", DeviceKind.CPU, 105e12, 307e9, 256.0, 40.0, 0.24, 0.85, 0.50, 0.006, 0.00035)
PRESETS = {
    hardware.name: hardware
    for hardware in (
        GPU,
        replace(GPU, name="h100-80g", flops=989e12, bandwidth=3.35e12, load_gib_per_s=25.0),
        # From our own engine on that card (docs/design/gpu.md), where the others have the paper's: peaks as measured.
        Hardware("h200-141g", DeviceKind.GPU, 790e12, 4.24e12, 139.0, 48.0, 0.74, 1.0, 0.82, 0.00057, 0.000006),
        replace(GPU, name="gh200-96g", flops=989e12, bandwidth=4.0e12, memory_gib=94.0, load_gib_per_s=380.0),
        *(
            replace(
                GPU,
                name=f"gh200-mig-{part}g",
                flops=989e12 * part / 7,
                bandwidth=4.0e12 * slices / 8,
                memory_gib=94.0 * slices / 8,
                load_gib_per_s=380.0 * part / 7,
            )
            for part, slices in ((1, 1), (2, 2), (3, 4), (4, 4))
        ),
        # ServerlessLLM's two test beds, by data sheet with the A100's efficiencies; memory less what the runtime takes.
        replace(GPU, name="a40-48g", flops=149.7e12, bandwidth=696e9, memory_gib=44.0, load_gib_per_s=23.3),
        # Two of them as one device: its evaluation splits what is too large for one (OPT-30B).
        replace(GPU, name="a40-48g-pair", flops=299.4e12, bandwidth=1.392e12, memory_gib=88.0, load_gib_per_s=46.6),
        replace(GPU, name="a5000-24g", flops=111e12, bandwidth=768e9, memory_gib=22.5, load_gib_per_s=23.3),
        replace(XEON, name="xeon-8c-amx", flops=105e12 / 4, bandwidth=200e9, memory_gib=64.0),
        replace(XEON, name="xeon-16c-amx", flops=105e12 / 2, bandwidth=290e9, memory_gib=128.0),
        XEON,
        replace(XEON, name="xeon-96c-amx", flops=297e12, bandwidth=614e9, memory_gib=768.0),
    )
}


@dataclass(frozen=True)
class Shape:
    """What the roofline needs of a model."""

    weight_gib: float
    kv_kib_per_token: float
    layers: int

    @property
    def parameters(self) -> float:
        return self.weight_gib * GIB / 2  # 16-bit weights


def latency_of(hardware: Hardware, shape: Shape) -> LatencyModel:
    weights_s = shape.weight_gib * GIB / (hardware.bandwidth * hardware.weight_efficiency)
    flops = hardware.flops * hardware.prefill_efficiency
    floor_s = hardware.floor_s + shape.layers * hardware.layer_s
    kv_s = shape.kv_kib_per_token * 1024 / (hardware.bandwidth * hardware.kv_efficiency)  # one token's cache, read once

    def prefill(tokens: int) -> float:
        attention_s = tokens * tokens * kv_s / 2 / 128  # rows are shared by blocks of queries
        return floor_s + max(2 * shape.parameters * tokens / flops, weights_s) + attention_s

    def decode(batch: int, length: int) -> float:
        return floor_s + max(weights_s, 2 * shape.parameters * batch / flops) + batch * length * kv_s

    curve = Curve([(tokens, prefill(tokens)) for tokens in LENGTHS])
    rows = [(length, Curve([(batch, decode(batch, length)) for batch in BATCHES])) for length in LENGTHS[3:]]
    return LatencyModel(curve, Surface(rows))


def hosting_of(hardware: Hardware, shape: Shape) -> Hosting:
    on_cpu = hardware.kind is DeviceKind.CPU
    fits = max(int(hardware.memory_gib / (shape.weight_gib + 2.0)), 1)
    return Hosting(
        weight_bytes=int(shape.weight_gib * GIB),
        kv_bytes_per_token=int(shape.kv_kib_per_token * 1024),
        latency=latency_of(hardware, shape),
        block_tokens=32 if on_cpu else 16,
        slots=min(fits, 8),
        load_s=0.0 if on_cpu else shape.weight_gib / hardware.load_gib_per_s,
        weights_in_place=on_cpu,
    )


@dataclass(frozen=True)
class RooflineError:
    prefill_mean: float
    prefill_worst: float
    decode_mean: float
    decode_worst: float


def roofline_error(hardware: Hardware, shape: Shape, measured: Latency) -> RooflineError:
    """Relative deviation at measured points: prefill from 128 tokens, decode of 1 to 32 requests of 512 to 2,048."""
    predicted = latency_of(hardware, shape)
    prefill = [abs(predicted.prefill_s(n) / measured.prefill_s(n) - 1) for n in (128, 256, 512, 1024, 2048, 4096)]
    decode = [
        abs(predicted.decode_s(batch, batch * length) / measured.decode_s(batch, batch * length) - 1)
        for batch in (1, 2, 4, 8, 16, 32)
        for length in (512, 1024, 2048)
    ]
    return RooflineError(sum(prefill) / len(prefill), max(prefill), sum(decode) / len(decode), max(decode))
