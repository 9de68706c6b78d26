"""What an adapter's tensors add to which rows of which matrix of a model: PEFT's names against the model's own.

Everything is compared before a byte is read; what does not fit is named with its file and tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import HostTensor, LowRankPart
from dovetail.store.format.arrays import reordered, rows_in_file
from dovetail.store.format.manifest import MANIFEST, Adapter, is_stored, read_manifest
from dovetail.store.hf.adapters import (
    CONFIG,
    WEIGHTS,
    PeftFolder,
    StoredAdapter,
    is_adapter_folder,
    read_adapter_config,
)
from dovetail.store.hf.names import PREFIXES, hf_pieces
from dovetail.types import AdapterRef

FIRST, SECOND = ".lora_A.weight", ".lora_B.weight"
SERVED_DTYPES = ("f32", "bf16", "f16")
_MATRICES = ("qkv", "out", "gate_up", "up", "down")


class AdapterTensors(Protocol):
    """A PEFT folder, or an adapter of the store."""

    adapter: Adapter

    def pieces(self, name: str) -> Sequence[HostTensor]: ...

    def close(self) -> None: ...


class TargetRows(NamedTuple):
    """Where a linear layer of transformers lies in the model."""

    tensor: str
    row: int
    rows: int
    columns: int


class ModelAdapter:
    """A node.ports.AdapterWeights: an adapter that fits this model."""

    def __init__(self, tensors: AdapterTensors, names: Sequence[str], spec: ModelSpec, origin: Path) -> None:
        self._spec = spec
        self._tensors = tensors
        self._targets = adapted_targets(names, spec, origin)
        for name, target in self._targets.items():
            self._check(name, target, origin)

    @property
    def scaling(self) -> float:
        return self._tensors.adapter.scaling

    @property
    def num_bytes(self) -> int:
        return sum(len(tensor.data) for part in self.parts() for tensor in (part.first, part.second))

    def parts(self) -> Iterator[LowRankPart]:
        for name, target in self._targets.items():
            second = self._tensor(name + SECOND)
            if target.tensor.endswith(".qkv.weight"):  # whose rows the model may keep in another order
                rows = rows_in_file(self._spec, target.row, target.rows)
                second = second if rows is None else reordered(second, rows)
            yield LowRankPart(target.tensor, target.row, self._tensor(name + FIRST), second)

    def close(self) -> None:
        self._tensors.close()

    def _tensor(self, name: str) -> HostTensor:
        (tensor,) = self._tensors.pieces(name)
        return tensor

    def _check(self, name: str, target: TargetRows, origin: Path) -> None:
        rank = self._tensors.adapter.rank
        for suffix, expected in ((FIRST, (rank, target.columns)), (SECOND, (target.rows, rank))):
            tensor = self._tensor(name + suffix)
            if tensor.shape != expected:
                raise DamagedCheckpoint(
                    f"{origin}: {name}{suffix} has shape {list(tensor.shape)}; rank and model make it {list(expected)}"
                )
            if tensor.dtype not in SERVED_DTYPES:
                raise UnsupportedModel(
                    f"{origin}: {name}{suffix} is {tensor.dtype}; adapters are served in {', '.join(SERVED_DTYPES)}"
                )


def open_adapter(path: Path, spec: ModelSpec, stored: StoredAdapter | None = None) -> ModelAdapter:
    """Where it lies, or from memory that a pool has filled with it. Raises CheckpointError for what does not fit."""
    if stored is not None or is_stored(path):
        stored = stored or StoredAdapter(path)
        return ModelAdapter(stored, stored.names(), spec, path / MANIFEST)
    if not is_adapter_folder(path):
        raise DamagedCheckpoint(f"{path}: no adapter: it has neither {CONFIG} nor {MANIFEST}")
    folder = PeftFolder(path)
    return ModelAdapter(folder, folder.names, spec, path / WEIGHTS)


def describe_adapter(path: Path, name: str, spec: ModelSpec) -> AdapterRef:
    """An adapter that fits this model, under this name."""
    path = path.resolve()
    open_adapter(path, spec).close()
    return AdapterRef(name, str(path), _digest(path))


def declared_base(path: Path) -> str:
    """What the adapter's author says it is for; empty = nothing."""
    if is_stored(path):
        stored = read_manifest(path).adapter
        return stored.base_model if stored is not None else ""
    return read_adapter_config(path).base_model


def _digest(path: Path) -> str:
    """Of a folder, which has no checksums, another number when a file was written again."""
    if is_stored(path):
        return read_manifest(path).partitions[0].digest[:16]
    stats = [(path / name).stat() for name in (CONFIG, WEIGHTS)]
    facts = repr([(one.st_size, one.st_mtime_ns, one.st_ino) for one in stats])
    return hashlib.sha256(f"{path} {facts}".encode()).hexdigest()[:16]


def adapted_targets(names: Sequence[str], spec: ModelSpec, origin: Path) -> dict[str, TargetRows]:
    """By the adapter's name of a layer, in the order of `names`."""
    if spec.encoder is not None:
        raise UnsupportedModel(f"{origin}: adapters are served for decoders, and {spec.family} is an encoder")
    if spec.mla is not None:
        raise UnsupportedModel(f"{origin}: adapters are not served for {spec.family}, whose attention is over latents")
    known = target_rows_of(spec)
    found: dict[str, TargetRows] = {}
    for name in names:
        module = name.removesuffix(FIRST).removesuffix(SECOND)
        if module in found:
            continue
        target = _find(module, known)
        if target is None:
            modules = sorted({one.rpartition(".")[2] for one in known})
            raise UnsupportedModel(
                f"{origin}: {name} is for no matrix of this {spec.family} model with {spec.num_layers} layers that "
                f"adapters are served for ({', '.join(modules)})"
            )
        found[module] = target
    return found


def _find(module: str, known: Mapping[str, TargetRows]) -> TargetRows | None:
    tries = (module.removeprefix(prefix) for prefix in PREFIXES if module.startswith(prefix))
    return next((known[one] for one in tries if one in known), None)


def target_rows_of(spec: ModelSpec) -> dict[str, TargetRows]:
    """Of all matrices that adapters are served for, by the names that transformers has for them."""
    found: dict[str, TargetRows] = {}
    for tensor, shape in spec.tensors():
        module, _, kind = tensor.rpartition(".")
        of_experts = ".experts." in tensor or ".shared." in tensor
        if kind != "weight" or module.rpartition(".")[2] not in _MATRICES or of_experts:
            continue
        for pieces in hf_pieces(spec, tensor, shape):
            row = 0
            for piece in pieces:
                found[piece.name.removesuffix(".weight")] = TargetRows(tensor, row, piece.shape[0], piece.shape[1])
                row += piece.shape[0]
    return found
