"""Measured profiles as JSON: model shapes and iteration times by hardware, turned into what nodes need (S3).

The layout: models → name → shape {weight_gib, kv_kib_per_token} and hardware → name → {kind,
prefill_ms: [[tokens, ms]], decode_ms: [{mean_length, batch_ms: [[batch, ms]]}], sllm_concurrency,
sllm_half_node_concurrency}.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.policy.latency import GIB, Curve, Latency, LatencyModel, Surface, TransferModel
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.profiles.hardware import PRESETS, RooflineError, Shape, roofline_error

KIB = 1024
# Presets and the names under which the profile has the same hardware.
MEASURED = {
    "a100-80g": "a100-80g",
    "xeon-8c-amx": "xeon-amx-8c",
    "xeon-16c-amx": "xeon-amx-16c",
    "xeon-32c-amx": "xeon-6462c-32c-amx",
}
DEFAULT_PRESETS = {DeviceKind.CPU: "xeon-32c-amx", DeviceKind.GPU: "a100-80g"}
SLOTS = ((8.0, 4, 8), (20.0, 2, 4), (float("inf"), 1, 2))  # weights below this many GiB: slots on a CPU, on a GPU


@dataclass(frozen=True)
class Profile:
    path: Path
    text: str
    models: dict[str, Any]

    def hosting(self, shape: str, kind: DeviceKind, hardware: str | None = None) -> Hosting:
        """`shape` on `hardware`, or on the first hardware of that kind that the profile has."""
        entry = self._model(shape)
        name, measured = self._hardware(shape, entry, kind, hardware)
        where = f"models.{shape}.hardware.{name}"
        weight_gib = self._number(shape, entry.get("shape", {}), "weight_gib", f"models.{shape}.shape")
        kv_kib = self._number(shape, entry.get("shape", {}), "kv_kib_per_token", f"models.{shape}.shape")
        cpu_slots, gpu_slots = next((cpu, gpu) for limit, cpu, gpu in SLOTS if weight_gib < limit)
        on_cpu = kind is DeviceKind.CPU
        return Hosting(
            weight_bytes=int(weight_gib * GIB),
            kv_bytes_per_token=int(kv_kib * KIB),
            latency=self._latency(name, measured, where),
            block_tokens=32 if on_cpu else 16,
            slots=cpu_slots if on_cpu else gpu_slots,
            concurrency=measured.get("sllm_concurrency") or 1,
            half_concurrency=measured.get("sllm_half_node_concurrency") or 1,
            load_s=0.0 if on_cpu else TransferModel().load_s(int(weight_gib * GIB)),
            weights_in_place=on_cpu,
        )

    def shape(self, shape: str) -> Shape:
        """For the roofline."""
        entry = self._model(shape).get("shape", {})
        where = f"models.{shape}.shape"
        names = ("weight_gib", "kv_kib_per_token", "layers")
        weight_gib, kv_kib, layers = (self._number(shape, entry, name, where) for name in names)
        return Shape(weight_gib, kv_kib, int(layers))

    def hardware_of(self, shape: str) -> list[str]:
        return list(self._model(shape).get("hardware", {}))

    def _model(self, shape: str) -> dict[str, Any]:
        if shape not in self.models:
            known = ", ".join(sorted(self.models))
            raise ConfigError(f"{self.path}: line {self._line('models')}: no model {shape!r}; it has {known}")
        entry: dict[str, Any] = self.models[shape]
        return entry

    def _hardware(
        self, shape: str, entry: dict[str, Any], kind: DeviceKind, hardware: str | None
    ) -> tuple[str, dict[str, Any]]:
        for name, measured in entry.get("hardware", {}).items():
            if name == hardware or (hardware is None and measured.get("kind") == kind.value):
                return name, measured
        wanted = hardware or f"hardware of kind {kind.value}"
        raise ConfigError(f"{self.path}: line {self._line(shape)}: models.{shape} has no {wanted}")

    def _latency(self, name: str, measured: dict[str, Any], where: str) -> LatencyModel:
        prefill = measured.get("prefill_ms")
        decode = measured.get("decode_ms")
        if not prefill:
            raise ConfigError(f"{self.path}: line {self._line(name)}: {where}: no prefill_ms point")
        if not decode or not all(row.get("batch_ms") for row in decode):
            raise ConfigError(f"{self.path}: line {self._line(name)}: {where}: no decode_ms point")
        try:
            return latency_from(prefill, decode)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.path}: line {self._line(name)}: {where}: {error}") from error

    def _number(self, key: str, section: dict[str, Any], name: str, where: str) -> float:
        value = section.get(name)
        if not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{self.path}: line {self._line(key)}: {where}.{name}: expected a positive number")
        return float(value)

    def _line(self, key: str) -> int:
        """Where the key stands in the file, for messages."""
        for number, line in enumerate(self.text.splitlines(), start=1):
            if f'"{key}"' in line:
                return number
        return 1


# Batches at which iterations are measured and written down: kernels take rows by fours and eights, in steps.
BATCHES = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64)


def latency_from(prefill_ms: list[Any], decode_ms: list[Any]) -> LatencyModel:
    """From the points as files have them."""
    rows = [(row["mean_length"], Curve([(b, ms / 1000) for b, ms in row["batch_ms"]])) for row in decode_ms]
    return LatencyModel(Curve([(tokens, ms / 1000) for tokens, ms in prefill_ms]), Surface(rows))


def read_profile(path: Path) -> Profile:
    try:
        text = path.read_text()
        raw = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: line {error.lineno}: not valid JSON: {error.msg}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("models"), dict):
        raise ConfigError(f"{path}: line 1: expected an object with the key 'models'")
    return Profile(path, text, raw["models"])


def preset_errors(profile: Profile, preset: str) -> dict[str, RooflineError]:
    """By model: how far the preset's roofline is from the profile's measurements on the same hardware."""
    errors = {}
    name = MEASURED.get(preset)
    for model in profile.models:
        if name in profile.hardware_of(model):
            measured = profile.hosting(model, PRESETS[preset].kind, name).latency
            errors[model] = roofline_error(PRESETS[preset], profile.shape(model), measured)
    return errors


# Points of a latency table: as close as profiles are measured where most requests are.
_TABLE_LENGTHS = (1, *(2**power for power in range(3, 16)))
_TABLE_BATCHES = (*BATCHES, 128, 256)


def tabulate(latency: Latency) -> dict[str, Any]:
    """A latency model as the points of a profile."""
    return {
        "prefill_ms": [[n, round(latency.prefill_s(n) * 1e3, 4)] for n in _TABLE_LENGTHS],
        "decode_ms": [
            {
                "mean_length": length,
                "batch_ms": [[b, round(latency.decode_s(b, b * length) * 1e3, 4)] for b in _TABLE_BATCHES],
            }
            for length in _TABLE_LENGTHS[1:]
        ],
    }


def hosting_values(hosting: Hosting) -> dict[str, Any]:
    """All of it as JSON has it, the latency as a table; `latency_from` reads that back."""
    layers = {"layer_s": hosting.layer_s} if hosting.layer_s is not None else {}
    return layers | {
        "weight_bytes": hosting.weight_bytes,
        "kv_bytes_per_token": hosting.kv_bytes_per_token,
        "block_tokens": hosting.block_tokens,
        "slots": hosting.slots,
        "concurrency": hosting.concurrency,
        "half_concurrency": hosting.half_concurrency,
        "load_s": hosting.load_s,
        "disk_s": hosting.disk_s,
        "weights_in_place": hosting.weights_in_place,
        "max_kv_tokens": hosting.max_kv_tokens,
        "keep_alive_s": -1.0 if hosting.keep_alive_s == float("inf") else hosting.keep_alive_s,
        "latency": tabulate(hosting.latency),
    }
