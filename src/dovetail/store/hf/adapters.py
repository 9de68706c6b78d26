"""LoRA adapters as PEFT saves them (adapter_config.json, adapter_model.safetensors), and as the store keeps them.

Tensors keep PEFT's names without the `base_model.model.` in front, in order of layers. Reads and keeps; applying one
to a model is the engine's business.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.layouts import packed_bytes
from dovetail.node.ports import HostTensor
from dovetail.store.files import read_json
from dovetail.store.format.arrange import Arrangement, Cut, Tensor
from dovetail.store.format.manifest import (
    ALIGNMENT,
    MANIFEST,
    PAGE_BYTES,
    Adapter,
    Manifest,
    StoredTensors,
    TensorEntry,
)
from dovetail.store.hf.safetensors_file import SafetensorsFile
from dovetail.store.keys import Keys

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_MAX_SCALING = 65504.0
_PREFIX = "base_model.model."
_SUFFIXES = (".lora_A.weight", ".lora_B.weight")
# Each makes something else of the model than W + scaling · B·A, the same for every target.
_VARIANTS = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
)
_OTHER_BASE = ("pissa", "olora", "corda", "loftq")  # begin with changing W


class StoredAdapter(StoredTensors):
    """An adapter of the store; its tensors by name through `pieces`."""

    def __init__(
        self, folder: Path, buffers: Sequence[memoryview] | None = None, manifest: Manifest | None = None
    ) -> None:
        super().__init__(folder, buffers, manifest)
        if self.manifest.adapter is None:
            raise UnsupportedModel(f"{folder / MANIFEST}: a model, not an adapter")
        self.adapter: Adapter = self.manifest.adapter


class PeftFolder:
    """Everything is found and its shape compared before the first tensor is handed out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.adapter = read_adapter_config(path)
        self._file = _open_weights(path)
        self.names = sorted((_stripped(name) for name in self._file), key=_order_of_use)
        self._full = {_stripped(name): name for name in self._file}
        _check_tensors(path / WEIGHTS, {name: self._file.shape(self._full[name]) for name in self.names}, self.adapter)
        self.dtype = self.pieces(self.names[0])[0].dtype

    def pieces(self, name: str) -> Sequence[HostTensor]:
        return [self._file.tensor(self._full[name])]

    def release(self) -> None:
        self._file.release()

    def close(self) -> None:
        self._file.close()

    def arrange(self, dtype: str) -> Arrangement:
        end, tensors = 0, []
        for name in self.names:
            shape = self._file.shape(self._full[name])
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            size = packed_bytes("plain", dtype, shape)
            tensors.append(Tensor(name, shape, Cut(""), (TensorEntry(name, 0, offset, size, dtype, shape),)))
            end = offset + size
        return Arrangement(tuple(tensors), (-(-end // PAGE_BYTES) * PAGE_BYTES,))


def is_adapter_folder(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read_adapter_config(path: Path) -> Adapter:
    keys = Keys(read_json(path / CONFIG), str(path / CONFIG))
    keys.require("peft_type", "LORA")
    for key in _VARIANTS:
        if keys.get(key):
            raise keys.unsupported(key, keys.get(key))
    if isinstance(start := keys.get("init_lora_weights"), str) and start.startswith(_OTHER_BASE):
        raise keys.unsupported("init_lora_weights", start)
    rank, alpha = keys.integer("r", at_most=2**16), keys.positive("lora_alpha")
    targets = keys.get("target_modules")
    if not (isinstance(targets, str) or (isinstance(targets, list) and all(isinstance(name, str) for name in targets))):
        raise keys.damaged("target_modules", "a name or a list of names")
    base = keys.get("base_model_name_or_path")
    scaling = alpha / (math.sqrt(rank) if keys.flag("use_rslora") else rank)
    if scaling > _MAX_SCALING:
        raise UnsupportedModel(
            f"{path / CONFIG}: lora_alpha {alpha:g} with r {rank} scales by {scaling:g}; at most {_MAX_SCALING:g} is "
            "served, which float16 can hold"
        )
    return Adapter(
        rank=rank,
        alpha=alpha,
        scaling=scaling,
        target_modules=(targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        base_model=base if isinstance(base, str) else "",
    )


def _open_weights(path: Path) -> SafetensorsFile:
    if not (path / WEIGHTS).is_file() and (path / PICKLE).exists():
        raise UnsupportedModel(
            f"{path}: weights only as pickle ({PICKLE}), which can run code when read; save them as safetensors"
        )
    return SafetensorsFile(path / WEIGHTS)


def _check_tensors(origin: Path, shapes: dict[str, tuple[int, ...]], adapter: Adapter) -> None:
    if not shapes:
        raise DamagedCheckpoint(f"{origin}: no tensors")
    for name, shape in shapes.items():
        if not name.endswith(_SUFFIXES):
            raise UnsupportedModel(f"{origin}: {name} is neither a lora_A nor a lora_B of a linear layer")
        is_first = name.endswith(_SUFFIXES[0])
        if len(shape) != 2 or 0 in shape or shape[0 if is_first else 1] != adapter.rank:
            raise DamagedCheckpoint(f"{origin}: {name} has shape {list(shape)}, the rank is {adapter.rank}")
        other = name[: -len(_SUFFIXES[0])] + _SUFFIXES[1 if is_first else 0]
        if other not in shapes:
            raise DamagedCheckpoint(f"{origin}: {other} is missing")


def _stripped(name: str) -> str:
    return name.removeprefix(_PREFIX)


def _order_of_use(name: str) -> tuple[int, str]:
    layer = re.search(r"\.(\d+)\.", name)
    return (int(layer.group(1)) if layer else -1, name)
