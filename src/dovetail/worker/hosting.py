"""What a model takes on this device and how fast it runs: from a stored profile, else by roofline, then learnt live.

Profiles are kept one file per device in the layout that `sim.profile` reads, so that a measured machine can be
simulated as it is. Models of one shape share a profile, and what is learnt about one of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dovetail.layouts import shape_of_codes
from dovetail.machine import read_cpu
from dovetail.modelspec import KvKind
from dovetail.policy.headroom import SloRule
from dovetail.policy.latency import GIB, Latency
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.profiles.concurrency import concurrency_of
from dovetail.profiles.files import read_profile
from dovetail.profiles.hardware import Hardware, Shape, latency_of
from dovetail.profiles.live import LiveLatency
from dovetail.types import ModelCard

# Shares of the measured peaks that whole iterations reach, and their fixed costs: a first guess, corrected by the first
# iterations.
PREFILL_EFFICIENCY, READ_EFFICIENCY = 0.6, 0.6
FLOOR_S, LAYER_S = 0.002, 0.0003
QUANTISED = ("int8", "int4")
SLOTS = 2  # instances that a policy of static shares puts on this node


def device_name(threads: int) -> str:
    cpu = read_cpu()
    return f"{_slug(cpu.model)}-{threads}c"


def shape_name(card: ModelCard, dtype: str, kv: KvKind = "auto") -> str:
    """Readable, and different for any two shapes that could differ in speed."""
    spec, kept = card.spec, kept_as(card, dtype)
    digest = hashlib.sha256(msgspec.json.encode(spec)).hexdigest()[:8]
    form = dtype if kept == dtype else f"{kept}-in-{dtype}"
    cache = "" if kv == "auto" else f"-kv-{kv}"
    return f"{_slug(spec.family)}-{spec.num_parameters() / 1e6:.0f}m-{form}{cache}-{digest}"


def shape_of(card: ModelCard, dtype: str, kv: KvKind = "auto") -> Shape:
    spec = card.spec
    return Shape(weight_bytes(card, dtype) / GIB, spec.kv_bytes_per_token(dtype, kv) / 1024, spec.num_layers)


def kept_as(card: ModelCard, dtype: str) -> str:
    """How the weights lie in memory when the model is served: as they are stored where the kernels read them so, else
    in the type that is computed in."""
    from dovetail.engine.executor import serves_as_stored

    stored = card.dtype if card.layout == "plain" else card.layout
    return stored if serves_as_stored(dtype, stored) else dtype


def weight_bytes(card: ModelCard, dtype: str) -> int:
    kept = kept_as(card, dtype)
    return card.spec.weight_bytes(dtype) if kept == dtype else card.size_bytes


@dataclass(frozen=True)
class Peaks:
    """Measured on this device in a few hundredths of a second."""

    flops: float
    bandwidth: float  # bytes/s


def measure_peaks(dtype: str, kept: str) -> Peaks:
    """Of products with weights that are kept in this form and computed in this type."""
    import time

    import numpy as np
    import torch

    from dovetail.engine.dtypes import TORCH_DTYPES
    from dovetail.engine.native_model import can_run
    from dovetail.native import select

    def best(function: Any, repeat: int = 3) -> float:
        times = []
        for _ in range(repeat):
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
        return min(times)

    tokens, size = 128, 1024
    ops = select()
    if kept in QUANTISED:
        assert ops.kernels is not None, "codes are multiplied by the kernels alone"
        rows, out = torch.rand(tokens, size), torch.empty(tokens, size)
        in_cells = shape_of_codes("int8-cells", (size, size))
        codes, scales = torch.randint(-127, 128, in_cells, dtype=torch.int8), torch.rand(size)
        multiply = partial(ops.kernels.linear_quantised, ops.level, torch.get_num_threads(), rows, codes, scales, out)
    elif ops.kernels is not None and can_run(TORCH_DTYPES[dtype]):
        rows, matrix, out = torch.rand(tokens, size), torch.rand(size, size), torch.empty(tokens, size)
        kind = matrix.to(TORCH_DTYPES[dtype])
        multiply = partial(ops.kernels.linear, ops.level, torch.get_num_threads(), dtype, rows, kind, out)
    else:
        rows, matrix = (torch.rand(count, size).to(TORCH_DTYPES[dtype]) for count in (tokens, size))
        multiply = partial(torch.nn.functional.linear, rows, matrix)
    # More than the caches hold. numpy's, because torch's allocator may keep what it is given back.
    large = torch.from_numpy(np.ones(64 * 2**20 // 8, np.int64))
    product_s = best(multiply)
    read_s = best(large.sum)
    return Peaks(2 * tokens * size * size / product_s, large.numel() * large.itemsize / read_s)


class Profiles:
    """Latency models by shape."""

    def __init__(self, folder: Path | None, threads: int) -> None:
        self.device = device_name(threads)
        self.path = folder / f"{self.device}.json" if folder is not None else None
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
    ) -> Hosting:
        latency = self.latency(card, dtype, kv)
        tpot_s = SloRule().tpot_s
        return Hosting(
            weight_bytes=weight_bytes(card, dtype),
            kv_bytes_per_token=card.spec.kv_bytes_per_token(dtype, kv),
            latency=latency,
            slots=SLOTS,
            concurrency=concurrency_of(latency, tpot_s),
            half_concurrency=concurrency_of(latency, tpot_s, share=2),
            block_tokens=block_size,
            load_s=load_s,
            max_kv_tokens=max_kv_tokens,
            keep_alive_s=keep_alive_s,
        )

    def latency(self, card: ModelCard, dtype: str, kv: KvKind = "auto") -> LiveLatency:
        name = shape_name(card, dtype, kv)
        live = self._live.get(name)
        if live is None:
            live = self._live[name] = LiveLatency(self.measured(card, dtype, kv) or self._estimated(card, dtype, kv))
        return live

    @property
    def exist(self) -> bool:
        return self.path is not None and self.path.exists()

    def measured(self, card: ModelCard, dtype: str, kv: KvKind = "auto") -> Latency | None:
        if self.path is None or not self.exist:
            return None
        profile = read_profile(self.path)
        name = shape_name(card, dtype, kv)
        if name not in profile.models:
            return None
        return profile.hosting(name, DeviceKind.CPU, self.device).latency

    def prepare(self, dtype: str, kept: str | None = None) -> Peaks:
        """Look at the device before the first request waits for it."""
        form = dtype, kept or dtype
        if form not in self._peaks:
            self._peaks[form] = measure_peaks(*form)
        return self._peaks[form]

    def _estimated(self, card: ModelCard, dtype: str, kv: KvKind) -> Latency:
        peaks = self.prepare(dtype, kept_as(card, dtype))
        shape = shape_of(card, dtype, kv)
        bytes_each = weight_bytes(card, dtype) / card.spec.num_parameters()
        hardware = Hardware(
            name=self.device,
            kind=DeviceKind.CPU,
            flops=peaks.flops * bytes_each / 2,  # the roofline counts parameters as 16 bits
            bandwidth=peaks.bandwidth,
            memory_gib=0.0,
            load_gib_per_s=1.0,
            prefill_efficiency=PREFILL_EFFICIENCY,
            weight_efficiency=READ_EFFICIENCY,
            kv_efficiency=READ_EFFICIENCY,
            floor_s=FLOOR_S,
            layer_s=LAYER_S,
        )
        return latency_of(hardware, shape)


def store_profile(
    path: Path,
    device: str,
    card: ModelCard,
    dtype: str,
    prefill_ms: list[Any],
    decode_ms: list[Any],
    kv: KvKind = "auto",
    **facts: Any,
) -> None:
    """Add or replace one shape; the file is replaced as a whole, so that a reader never sees half of it."""
    content: dict[str, Any] = {"models": {}}
    if path.exists():
        read_profile(path)  # a damaged file is an error, not something to overwrite
        content = json.loads(path.read_text())
    shape = shape_of(card, dtype, kv)
    entry = content["models"].setdefault(shape_name(card, dtype, kv), {})
    entry["shape"] = {
        "weight_gib": shape.weight_gib,
        "kv_kib_per_token": shape.kv_kib_per_token,
        "layers": shape.layers,
    }
    entry.setdefault("hardware", {})[device] = {
        "kind": "cpu",
        "prefill_ms": prefill_ms,
        "decode_ms": decode_ms,
        **facts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.new")
    building.write_text(json.dumps(content, indent=1))
    building.replace(path)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unknown"
