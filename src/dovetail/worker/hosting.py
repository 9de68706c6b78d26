"""What a model takes on this device and how fast it runs: from a stored profile, else by roofline, then learnt live.

Profiles are kept one file per device in the layout that `profiles.files` reads, so that a measured machine can be
simulated as it is. Models of one shape share a profile, and what is learnt about one of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dovetail.engine.devices import Device, Peaks
from dovetail.layouts import CELLS, packed_bytes
from dovetail.machine import slug
from dovetail.modelspec import DTYPE_BYTES, FP8, KvKind, activation_dtype, is_fp8_matrix
from dovetail.policy.latency import GIB, LatencyModel
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.policy.streaming import ResidentLayers, StreamedWeights, residency, with_link
from dovetail.profiles.files import read_profile
from dovetail.profiles.hardware import Hardware, Shape, latency_of
from dovetail.profiles.live import LiveLatency
from dovetail.store.format.manifest import is_stored
from dovetail.store.loading.loader import LoaderConfig
from dovetail.store.loading.streamed import disk_speed
from dovetail.types import ModelCard

UNKNOWN_DISK = 100e6  # bytes per second, of one that cannot be measured
USUAL_TOKENS = 1024  # of a context
MIN_NEWS = 0.2  # a disk that is this much faster than was known is news
RESIDENT = "-resident"  # ends the names of shapes of which not all layers stay


def shape_name(card: ModelCard, dtype: str, kept: str, kv: KvKind = "auto") -> str:
    """Readable, and different for any two shapes that could differ in speed."""
    spec = card.spec
    digest = hashlib.sha256(msgspec.json.encode(spec)).hexdigest()[:8]
    form = dtype if kept == dtype else f"{kept}-in-{dtype}"
    cache = "" if kv == "auto" else f"-kv-{kv}"
    return f"{slug(spec.family)}-{spec.num_parameters() / 1e6:.0f}m-{form}{cache}-{digest}"


def shape_of(card: ModelCard, dtype: str, kept: str, kv: KvKind = "auto") -> Shape:
    spec = card.spec
    return Shape(weight_bytes(card, dtype, kept) / GIB, spec.kv_bytes_per_token(dtype, kv) / 1024, spec.num_layers)


def kept_as(card: ModelCard, dtype: str, device: Device) -> str:
    """How the weights lie in memory when the model is served: as they are stored where the kernels read them so, else
    in the type that is computed in."""
    stored = card.dtype if card.layout == "plain" else card.layout
    if card.spec.encoder is not None:  # torch's own operations read no other
        return dtype
    return stored if device.serves_as_stored(dtype, stored) else dtype


def weight_bytes(card: ModelCard, dtype: str, kept: str) -> int:
    return card.spec.weight_bytes(dtype) if kept == dtype else card.size_bytes


def streamed_weights(card: ModelCard, dtype: str, kept: str) -> StreamedWeights:
    """The same by layer."""
    spec = card.spec
    total, share = weight_bytes(card, dtype, kept), card.size_bytes / spec.num_parameters()
    by_layer, stored = [0] * spec.num_layers, [0] * spec.num_layers
    for name, shape in spec.tensors():
        if not name.startswith("layers.") or len(shape) < 2 or "norm." in name:
            continue
        layer, size = int(name.split(".")[1]), math.prod(shape)
        plain = size * DTYPE_BYTES[activation_dtype(dtype)]
        if kept != dtype:
            packed = packed_bytes(CELLS[kept], "f32", shape) if kept in CELLS else int(size * share)
            by_layer[layer], stored[layer] = by_layer[layer] + packed, stored[layer] + packed
        else:
            rounded = math.prod(shape[:-1]) * (shape[-1] + 4) if dtype == FP8 and is_fp8_matrix(name, shape) else plain
            by_layer[layer], stored[layer] = by_layer[layer] + rounded, stored[layer] + plain
    return StreamedWeights(total, tuple(by_layer), tuple(stored), is_unpacked=kept != dtype or dtype == FP8)


def may_be_streamed(card: ModelCard, dtype: str, kept: str) -> bool:
    """Whether a CPU can read layers of it with every iteration: they are computed with as they are stored."""
    stored = card.dtype if card.layout == "plain" else card.layout
    folder = Path(card.path)
    return kept == stored and card.partitions == 1 and card.spec.encoder is None and is_stored(folder)


class Profiles:
    """Latency models by shape."""

    def __init__(self, folder: Path | None, device: Device, files: LoaderConfig | None = None) -> None:
        self.device = device.label
        self.path = folder / f"{self.device}.json" if folder is not None else None
        self._device = device
        self._live: dict[str, LiveLatency] = {}
        self._peaks: dict[tuple[str, str], Peaks] = {}
        self.files = files or LoaderConfig()
        self._disks: dict[int, float] = {}  # by number: bytes per second, measured

    def hosting(
        self,
        card: ModelCard,
        dtype: str,
        kv: KvKind = "auto",
        *,
        block_size: int,
        max_kv_tokens: int,
        keep_alive_s: float,
        load_s: float,
        residency: ResidentLayers | None = None,
    ) -> Hosting:
        latency = self.latency(card, dtype, kv, residency)
        return Hosting(
            weight_bytes=self.weight_bytes(card, dtype, residency),
            kv_bytes_per_token=card.spec.kv_bytes_per_token(dtype, kv),
            latency=latency,
            block_tokens=block_size,
            load_s=load_s,
            max_kv_tokens=max_kv_tokens,
            keep_alive_s=keep_alive_s,
            layer_s=self._layer_s(card, dtype, kv) if self._reads_disk(residency) else None,
        )

    def latency(
        self, card: ModelCard, dtype: str, kv: KvKind = "auto", residency: ResidentLayers | None = None
    ) -> LiveLatency:
        """`residency`: None = all of its layers stay on the device."""
        name = self.shape_name(card, dtype, kv)
        if residency is not None:
            name = f"{name}-{residency.layers}{RESIDENT}"
        live = self._live.get(name)
        if live is None:
            base, link_s = self._base(card, dtype, kv), self.link_s(card, dtype, residency)
            least_s = link_s if self._reads_disk(residency) else 0.0
            live = self._live[name] = LiveLatency(with_link(base, link_s) if link_s else base, least_s)
        return live

    def _base(self, card: ModelCard, dtype: str, kv: KvKind) -> LatencyModel:
        """With all layers in memory."""
        return self.measured(card, dtype, kv) or self._estimated(card, dtype, kv)

    def link_s(self, card: ModelCard, dtype: str, residency: ResidentLayers | None) -> float:
        """What the layers that do not stay take on their way, in every iteration: over a GPU's link, or from the
        disk."""
        if residency is None:
            return 0.0
        kept = kept_as(card, dtype, self._device)
        link = self.disk_speed(card) if self._reads_disk(residency) else self.prepare(dtype, kept).link
        return streamed_weights(card, dtype, kept).link_bytes(residency.layers) / link

    def explain_streaming(self, card: ModelCard, dtype: str, residency: ResidentLayers | None) -> str:
        """Of a model that reads layers from the disk: how much of it, and what that makes of its tokens."""
        kept_gb = self.weight_bytes(card, dtype, residency) / 1e9
        read_s, speed = self.link_s(card, dtype, residency), self.disk_speed(card)
        return (
            f"{card.name} is larger than the node: of its {card.size_bytes / 1e9:.2f} GB {kept_gb:.2f} stay in memory, "
            f"{read_s * speed / 1e9:.2f} are read from the disk with every iteration, at {speed / 1e9:.2f} GB/s: no "
            f"token takes less than {read_s:.2f} s"
        )

    def disk_speed(self, card: ModelCard) -> float:
        """Bytes per second at which layers of this model come from its disk, measured once for each disk."""
        number = os.stat(card.path).st_dev
        if number not in self._disks:
            self._disks[number] = disk_speed(Path(card.path), self.files) or UNKNOWN_DISK
        return self._disks[number]

    def heard_speed(self, card: ModelCard, speed: float | None) -> bool:
        """The disk gave so many bytes per second. True if it is faster than was known: no token is expected sooner
        than it could be read."""
        if speed is None or speed <= (1.0 + MIN_NEWS) * self.disk_speed(card):
            return False
        self._disks[os.stat(card.path).st_dev] = speed
        for name in [name for name in self._live if name.endswith(RESIDENT)]:
            del self._live[name]
        return True

    def _reads_disk(self, residency: ResidentLayers | None) -> bool:
        return residency is not None and self._device.kind is DeviceKind.CPU

    def _layer_s(self, card: ModelCard, dtype: str, kv: KvKind) -> float:
        return self._base(card, dtype, kv).decode_s(1, USUAL_TOKENS) / card.spec.num_layers

    @property
    def exist(self) -> bool:
        return self.path is not None and self.path.exists()

    def measured(self, card: ModelCard, dtype: str, kv: KvKind = "auto") -> LatencyModel | None:
        if self.path is None or not self.exist:
            return None
        profile = read_profile(self.path)
        name = self.shape_name(card, dtype, kv)
        if name not in profile.models:
            return None
        latency = profile.hosting(name, self._device.kind, self.device).latency
        assert isinstance(latency, LatencyModel)
        return latency

    def prepare(self, dtype: str, kept: str | None = None) -> Peaks:
        """Look at the device before the first request waits for it."""
        form = dtype, kept or dtype
        if form not in self._peaks:
            self._peaks[form] = self._device.peaks(*form)
        return self._peaks[form]

    def shape_name(self, card: ModelCard, dtype: str, kv: KvKind = "auto") -> str:
        return shape_name(card, dtype, kept_as(card, dtype, self._device), kv)

    def shape_of(self, card: ModelCard, dtype: str, kv: KvKind = "auto") -> Shape:
        return shape_of(card, dtype, kept_as(card, dtype, self._device), kv)

    def weight_bytes(self, card: ModelCard, dtype: str, residency: ResidentLayers | None = None) -> int:
        kept = kept_as(card, dtype, self._device)
        if residency is not None:
            weights = streamed_weights(card, dtype, kept)
            if self._reads_disk(residency):
                weights = replace(weights, is_unpacked=False)
            return weights.device_bytes(residency.layers, in_place=residency.in_place)
        return weight_bytes(card, dtype, kept)

    def residency(
        self, card: ModelCard, dtype: str, capacity: int, kv_bytes: int, share: float | None
    ) -> ResidentLayers | None:
        """Which layers stay on this device, which has so much memory; None = all of them. A CPU computes with weights
        where they lie, and reads from the disk what does not fit: there `share` is not for it."""
        kept = kept_as(card, dtype, self._device)
        weights = streamed_weights(card, dtype, kept)
        if self._device.kind is not DeviceKind.CPU:
            return residency(weights, capacity, kv_bytes, share)
        if not may_be_streamed(card, dtype, kept):
            return None
        found = residency(replace(weights, is_unpacked=False), capacity, kv_bytes, None)
        return None if found is None or found.in_place else found

    def store(
        self, card: ModelCard, dtype: str, prefill_ms: list[Any], decode_ms: list[Any], kv: KvKind = "auto"
    ) -> None:
        """Add or replace one shape; the file is replaced as a whole, so that a reader never sees half of it."""
        path = self.path
        assert path is not None, "there is a folder of profiles"
        content: dict[str, Any] = {"models": {}}
        if path.exists():
            read_profile(path)  # a damaged file is an error, not something to overwrite
            content = json.loads(path.read_text())
        shape = self.shape_of(card, dtype, kv)
        entry = content["models"].setdefault(self.shape_name(card, dtype, kv), {})
        entry["shape"] = {
            "weight_gib": shape.weight_gib,
            "kv_kib_per_token": shape.kv_kib_per_token,
            "layers": shape.layers,
        }
        measured = {"kind": self._device.kind.value, "prefill_ms": prefill_ms, "decode_ms": decode_ms}
        entry.setdefault("hardware", {})[self.device] = measured
        path.parent.mkdir(parents=True, exist_ok=True)
        building = path.with_name(f".{path.name}.new")
        building.write_text(json.dumps(content, indent=1))
        building.replace(path)

    def _estimated(self, card: ModelCard, dtype: str, kv: KvKind) -> LatencyModel:
        kept = kept_as(card, dtype, self._device)
        peaks = self.prepare(dtype, kept)
        bytes_each = weight_bytes(card, dtype, kept) / card.spec.num_parameters()
        hardware = Hardware(
            name=self.device,
            kind=self._device.kind,
            flops=peaks.flops * bytes_each / 2,  # the roofline counts parameters as 16 bits
            bandwidth=peaks.bandwidth,
            memory_gib=0.0,
            load_gib_per_s=1.0,
            prefill_efficiency=peaks.efficiency,
            weight_efficiency=peaks.efficiency,
            kv_efficiency=peaks.efficiency,
            floor_s=peaks.floor_s,
            layer_s=peaks.layer_s,
        )
        return latency_of(hardware, shape_of(card, dtype, kept, kv))
