"""What a model takes on this device and how fast it runs: from a stored profile, else by roofline, then learnt live.

Profiles are kept one file per device in the layout that `profiles.files` reads, so that a measured machine can be
simulated as it is. Models of one shape share a profile, and what is learnt about one of them.
"""

from __future__ import annotations

import hashlib
import json
import math
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
from dovetail.types import ModelCard


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


class Profiles:
    """Latency models by shape."""

    def __init__(self, folder: Path | None, device: Device) -> None:
        self.device = device.label
        self.path = folder / f"{self.device}.json" if folder is not None else None
        self._device = device
        self._live: dict[str, LiveLatency] = {}
        self._peaks: dict[tuple[str, str], Peaks] = {}

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
        )

    def latency(
        self, card: ModelCard, dtype: str, kv: KvKind = "auto", residency: ResidentLayers | None = None
    ) -> LiveLatency:
        """`residency`: None = all of its layers stay on the device."""
        name = self.shape_name(card, dtype, kv)
        if residency is not None:
            name = f"{name}-{residency.layers}-resident"
        live = self._live.get(name)
        if live is None:
            base = self.measured(card, dtype, kv) or self._estimated(card, dtype, kv)
            live = self._live[name] = LiveLatency(
                base if residency is None else self._linked(base, card, dtype, residency)
            )
        return live

    def _linked(self, base: LatencyModel, card: ModelCard, dtype: str, residency: ResidentLayers) -> LatencyModel:
        kept = kept_as(card, dtype, self._device)
        link_bytes = streamed_weights(card, dtype, kept).link_bytes(residency.layers)
        return with_link(base, link_bytes / self.prepare(dtype, kept).link)

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
            return streamed_weights(card, dtype, kept).device_bytes(residency.layers, in_place=residency.in_place)
        return weight_bytes(card, dtype, kept)

    def residency(
        self, card: ModelCard, dtype: str, capacity: int, kv_bytes: int, share: float | None
    ) -> ResidentLayers | None:
        """Which layers stay on this device, which has so much memory; None = all of them."""
        if self._device.kind is DeviceKind.CPU:  # it computes with weights where they lie
            return None
        return residency(streamed_weights(card, dtype, kept_as(card, dtype, self._device)), capacity, kv_bytes, share)

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
