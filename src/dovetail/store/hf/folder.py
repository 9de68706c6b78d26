"""A Hugging Face folder (config.json and safetensors, whole or sharded) as a Checkpoint. Never unpickles anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.layouts import GGUF
from dovetail.modelspec import ModelSpec, rotary_order
from dovetail.node.ports import HostTensor
from dovetail.store.files import read_json, read_text
from dovetail.store.format.arrays import Array, as_array, from_array, reordered, rows_in_file, to_float32
from dovetail.store.format.tokenizer_files import TokenFields, find_tokenizer, read_token_fields
from dovetail.store.hf.config import spec_from_config
from dovetail.store.hf.encoders import (
    ENCODER_PREFIXES,
    encoder_pieces,
    encoder_prefix_mark,
    score_piece,
    with_own_pooling,
)
from dovetail.store.hf.names import EMBEDDING, LM_HEADS, PREFIXES, Piece, hf_pieces
from dovetail.store.hf.safetensors_file import SafetensorsFile
from dovetail.store.hf.transforms import FP4, Stored, is_fp4, transform_of

INDEX = "model.safetensors.index.json"
_COMPARED_ELEMENTS = 2**23
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HfFolder:
    """Everything that the spec asks for is found, and its shape compared, before the first tensor is handed out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = read_json(path / "config.json")
        spec = spec_from_config(config, str(path / "config.json"))
        self._files = _open_weights(path)
        self._where = {name: file for file in self._files for name in file}
        self._prefix = self._find_prefix(spec)
        self.spec: ModelSpec = self._settle_tying(spec) if spec.encoder is None else with_own_pooling(spec, path)
        self._pieces = {name: self._resolve(name, shape) for name, shape in self.spec.tensors()}
        self._check_dtypes()
        # Gemma's files keep a norm as its distance from 1.
        is_gemma = self.spec.family.startswith("gemma")
        self._plus_one = {name for name in self._pieces if is_gemma and "norm." in name}
        self._order = rotary_order(self.spec)

    @property
    def in_place(self) -> bool:
        return True

    def pieces(self, name: str) -> Sequence[HostTensor]:
        if (transform := transform_of(self.spec, name)) is not None:
            return transform(self.spec, [Stored(self._where[full], full) for full in self._pieces[name]])
        tensors = [self._where[full].tensor(full) for full in self._pieces[name]]
        if name in self._plus_one:
            return [from_array(to_float32(tensor) + np.float32(1.0)) for tensor in tensors]
        if self._order is not None and ".qkv." in name:
            return self._in_order(tensors)
        return tensors

    def _in_order(self, tensors: list[HostTensor]) -> list[HostTensor]:
        """q and k, whole or fused with v, with the rows of each head where the canonical head has them."""
        found, first = [], 0
        for tensor in tensors:
            rows = rows_in_file(self.spec, first, tensor.shape[0])
            first += tensor.shape[0]
            found.append(tensor if rows is None else reordered(tensor, rows))
        return found

    def tokenizer(self) -> tuple[TokenFields, str]:
        return read_token_fields(self.path), read_text(find_tokenizer(self.path))

    def release(self) -> None:
        for file in self._files:
            file.release()

    def close(self) -> None:
        for file in self._files:
            file.close()

    @property
    def size_bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self._files)

    @property
    def dtype(self) -> str:
        """Storage type of the matrices."""
        return self.float_dtype

    @property
    def float_dtype(self) -> str:
        """Of those that are not quantised."""
        return self.pieces("layers.0.out.weight")[0].dtype

    def _check_dtypes(self) -> None:
        for full in (full for pieces in self._pieces.values() for full in pieces):
            self._where[full].check_weights(full)

    def _find_prefix(self, spec: ModelSpec) -> str:
        mark = "layers.0." if spec.encoder is None else encoder_prefix_mark(spec)
        for prefix in PREFIXES if spec.encoder is None else ENCODER_PREFIXES:
            if any(name.startswith(prefix + mark) for name in self._where):
                return prefix
        raise DamagedCheckpoint(f"{self.path}: no tensor of layer 0 (such as model.layers.0.…) in the weights")

    def _settle_tying(self, spec: ModelSpec) -> ModelSpec:
        """As transformers: a config that says tied is overruled by an lm_head with values of its own."""
        head = self._lm_head()
        embedding = self._prefix + EMBEDDING
        if not spec.tied_embeddings or head is None or embedding not in self._where:
            return spec
        ours, theirs = self._where[embedding].tensor(embedding), self._where[head].tensor(head)
        if ours.dtype == theirs.dtype and _are_equal(as_array(ours), as_array(theirs)):
            return spec
        return msgspec.structs.replace(spec, tied_embeddings=False)

    def _lm_head(self) -> str | None:
        return next((name for name in LM_HEADS if name in self._where), None)

    def _resolve(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """File names of the pieces of one canonical tensor, present and of the right shape."""
        if name == "lm_head.weight":
            return self._checked((Piece(self._lm_head() or LM_HEADS[0], shape),), prefix="")
        if name.startswith("score."):
            return self._checked((score_piece(self.spec, name, shape),), prefix="")
        pieces = hf_pieces if self.spec.encoder is None else encoder_pieces
        ways = pieces(self.spec, name, shape)
        for way in ways:
            if self._prefix + way[0].name in self._where:
                return self._checked(way, self._prefix)
        if name == "embed.weight" and self.spec.tied_embeddings and (head := self._lm_head()) is not None:
            return self._checked((Piece(head, shape),), prefix="")  # tied, and kept under the other name
        return self._checked(ways[0], self._prefix)

    def _checked(self, way: tuple[Piece, ...], prefix: str) -> tuple[str, ...]:
        for piece in way:
            full = prefix + piece.name
            if full not in self._where:
                raise DamagedCheckpoint(f"{self.path}: tensor {full} is missing from the weights")
            found = self._where[full].shape(full)
            if found != piece.shape:
                where = self._where[full].path
                raise DamagedCheckpoint(
                    f"{where}: {full} has shape {list(found)}, config.json asks for {list(piece.shape)}"
                )
        return tuple(prefix + piece.name for piece in way)


class CodedHfFolder(HfFolder):
    """One of which some matrices are quantised, in blocks that can be kept."""

    def _check_dtypes(self) -> None:
        """Codes are of any type."""

    @property
    def dtype(self) -> str:
        return GGUF  # whose layout says of every matrix how it is kept

    def coded(self, name: str) -> tuple[tuple[int, str], ...]:
        rows = math.prod(dict(self.spec.tensors())[name][:-1])
        return ((rows, FP4 if is_fp4(self._pieces[name]) else "plain"),)


def open_hf_folder(path: Path) -> HfFolder:
    config = read_json(path / "config.json")
    return (HfFolder if config.get("quantization_config") is None else CodedHfFolder)(path)


def _are_equal(one: Array, other: Array) -> bool:
    """Some rows at a time: comparing whole vocabularies would take a byte per element."""
    step = max(1, _COMPARED_ELEMENTS // one.shape[-1])
    parts = range(0, len(one), step)
    return one.shape == other.shape and all(np.array_equal(one[at : at + step], other[at : at + step]) for at in parts)


def is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file()


def _open_weights(path: Path) -> list[SafetensorsFile]:
    whole = path / "model.safetensors"
    if whole.is_file():
        return [SafetensorsFile(whole)]
    if (path / INDEX).is_file():
        return _open_shards(path, read_json(path / INDEX))
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return [SafetensorsFile(found[0])]
    if found:
        raise DamagedCheckpoint(f"{path}: {len(found)} safetensors files but no {INDEX} that says what is where")
    pickles = [file.name for pattern in PICKLES for file in sorted(path.glob(pattern))]
    if pickles:
        raise UnsupportedModel(
            f"{path}: weights only as pickle ({pickles[0]}), which can run code when read; convert them to safetensors"
        )
    raise DamagedCheckpoint(f"{path}: no weights (model.safetensors, or shards with {INDEX})")


def _open_shards(path: Path, index: dict[str, Any]) -> list[SafetensorsFile]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedCheckpoint(f"{path / INDEX}: no weight_map")
    files: dict[str, SafetensorsFile] = {}
    for name in sorted(set(weight_map.values())):
        if not isinstance(name, str) or Path(name).name != name:
            raise DamagedCheckpoint(f"{path / INDEX}: {name!r} is not the name of a file in this folder")
        if not (path / name).is_file():
            raise DamagedCheckpoint(f"{path}: shard {name} is missing")
        files[name] = SafetensorsFile(path / name)
    for tensor, shard in weight_map.items():
        if tensor not in files[shard]:
            raise DamagedCheckpoint(f"{path / shard}: tensor {tensor} is missing, {INDEX} says it is there")
    return list(files.values())
