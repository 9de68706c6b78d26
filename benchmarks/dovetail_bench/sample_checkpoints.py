"""Random checkpoints of known shapes in every form that a contender reads: an HF folder, a torch file, and our store.

The weights are written as their publishers do (HF names, bf16, one safetensors file); `pull` makes the store's form of
them and torch its own. Fine-tuned adapters likewise, in the form of PEFT.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dovetail.errors import OutOfMemory
from dovetail.store import Catalogue
from dovetail.store.format.manifest import StoredTensors, partition_files
from dovetail_bench import peer_child
from dovetail_bench.contenders import SampleFiles
from dovetail_bench.peer_child import SAMPLE_BYTES, sample_starts
from dovetail_bench.peers import PEERS, PeerProcess, set_up
from dovetail_bench.safetensors_writer import write_safetensors

_SLAB_BYTES = 64 * 2**20
_FINITE = np.uint16(0xBFFF)  # without the top bit of the exponent no bfloat16 is infinite or not a number
_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


class Shape(msgspec.Struct, frozen=True):
    """A Llama, as its config.json says it."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = 128_256
    lora_rank: int = 64

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Of one layer, [out, in]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }

    def model_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for layer in range(self.num_hidden_layers):
            yield f"model.layers.{layer}.input_layernorm.weight", (self.hidden_size,)
            yield f"model.layers.{layer}.post_attention_layernorm.weight", (self.hidden_size,)
            for name, shape in self.matrices().items():
                yield f"model.layers.{layer}.{name}.weight", shape
        yield "model.norm.weight", (self.hidden_size,)

    def adapter_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for layer in range(self.num_hidden_layers):
            for name, (rows, columns) in self.matrices().items():
                place = f"base_model.model.model.layers.{layer}.{name}"
                yield f"{place}.lora_A.weight", (self.lora_rank, columns)
                yield f"{place}.lora_B.weight", (rows, self.lora_rank)

    def config(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        del fields["lora_rank"]
        return fields | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": 0,
        }


SHAPES = {
    "1b": Shape(2048, 16, 32, 8, 64, 8192),  # Llama 3.2 1B
    "3b": Shape(3072, 28, 24, 8, 128, 8192),  # Llama 3.2 3B
    "8b": Shape(4096, 32, 32, 8, 128, 14336),  # Llama 3.1 8B, its head tied
    "tiny": Shape(64, 2, 4, 2, 16, 96, vocab_size=300, lora_rank=4),  # to try the bench itself
}


def make_sample(
    model: str, folder: Path, peers: Path, *, lora: bool = False, install: bool = True, progress: Progress | None = None
) -> SampleFiles:
    """Writes what is not there yet."""
    shape = SHAPES[model]
    name = f"{model}-lora" if lora else model
    place = folder / name
    weights = place / ("adapter_model.safetensors" if lora else "model.safetensors")
    tensors = dict(shape.adapter_tensors() if lora else shape.model_tensors())
    if not weights.exists():
        _check_room(folder, 2 * sum(prod(each) for each in tensors.values()))
        place.mkdir(parents=True, exist_ok=True)
        _write_json(place / "adapter_config.json", _adapter_config(shape)) if lora else _write_model_files(place, shape)
        _write_safetensors(weights, tensors, progress)
    torch_file = place / "weights.pt"
    if not torch_file.exists():
        _save_torch(weights, torch_file, peers, install)
    store = Catalogue(folder / "store")
    store.take(str(place), name=name, dtype="bf16", progress=progress)
    stored = store.paths.folder(name)
    blobs = tuple(path for path, _ in partition_files(stored))
    checksums = _file_checksum(weights), _stored_checksum(stored)
    return SampleFiles(name, weights, torch_file, stored, blobs, *checksums, is_adapter=lora)


def stored_checksum(tensors: StoredTensors) -> int:
    """Of the same places of each tensor as in `peer_child.checksum`, in the order of their names."""
    total = 0
    for name in sorted(tensors.names()):
        data = tensors.share(name, 0).data
        for start in sample_starts(data.nbytes):
            total = zlib.crc32(data[start : start + SAMPLE_BYTES], total)
    return total


def _stored_checksum(folder: Path) -> int:
    """Read through the file system, not by the reader that is measured."""
    tensors = StoredTensors(folder)
    try:
        return stored_checksum(tensors)
    finally:
        tensors.close()


def _file_checksum(weights: Path) -> int:
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = msgspec.json.decode(file.read(length))
        total = 0
        for name in sorted(header):
            begin, end = header[name]["data_offsets"]
            for start in sample_starts(end - begin):
                file.seek(8 + length + begin + start)
                total = zlib.crc32(file.read(min(SAMPLE_BYTES, end - begin)), total)
    return total


def _write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]], progress: Progress | None) -> None:
    total = 2 * sum(prod(shape) for shape in tensors.values())
    write_safetensors(path, {name: ("bf16", shape) for name, shape in tensors.items()}, _random_slabs(total, progress))


def _random_slabs(total: int, progress: Progress | None) -> Iterator[memoryview]:
    random = np.random.Generator(np.random.SFC64(0))
    for done in range(0, total, _SLAB_BYTES):
        count = min(_SLAB_BYTES, total - done) // 2
        yield (np.frombuffer(random.bytes(2 * count), np.uint16) & _FINITE).data.cast("B")
        if progress is not None:
            progress("write", done + 2 * count, total)


def _save_torch(weights: Path, target: Path, peers: Path, install: bool) -> None:
    python = set_up(PEERS["safetensors"], peers, install=install)
    building = target.with_suffix(".building")
    with PeerProcess(python, Path(peer_child.__file__), "torch.save") as process:
        process.ask({"save_torch": str(building), "source": str(weights)})
    building.rename(target)


def _write_model_files(folder: Path, shape: Shape) -> None:
    _write_json(folder / "config.json", shape.config())
    model = {"type": "WordLevel", "vocab": {"<end>": 0}, "unk_token": "<end>"}
    _write_json(folder / "tokenizer.json", {"version": "1.0", "added_tokens": [], "model": model})


def _adapter_config(shape: Shape) -> dict[str, Any]:
    rank = shape.lora_rank
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(_LORA_TARGETS)}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.encode(value))


def _check_room(folder: Path, size_bytes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = 4 * size_bytes, shutil.disk_usage(folder).free  # three forms, and some to breathe
    if free < needed:
        raise OutOfMemory(
            f"{folder}: {needed / 1e9:.1f} GB of disk are needed, {free / 1e9:.1f} GB are free (--folder)"
        )
