"""A GGUF file as a Checkpoint: pieces in the file's own floats where it has them, or with its own codes where a layout
of ours holds them (`gguf.codes`), dequantised to float32 where not.

Pieces are made when they are asked for, one at a time and at most some megabytes of rows each, so that converting a
large model needs little memory.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from dovetail.codings import Quantised
from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.layouts import GGUF, pack_codes
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import HostTensor
from dovetail.store.files import open_regular
from dovetail.store.format.arrange import is_packed
from dovetail.store.format.arrays import LazyPieces, from_array
from dovetail.store.format.manifest import release_pages
from dovetail.store.format.tokenizer_files import TokenFields
from dovetail.store.gguf.codes import layout_of, read_blocks
from dovetail.store.gguf.config import spec_from_metadata
from dovetail.store.gguf.names import Part, gguf_parts
from dovetail.store.gguf.shapes import ROPE_FACTORS, GgufModel
from dovetail.store.gguf.tokenizer import Vocabulary, build_tokenizer, token_fields
from dovetail.store.keys import Keys

_IN_PLACE = {
    gguf.GGMLQuantizationType.F64: "f64",
    gguf.GGMLQuantizationType.F32: "f32",
    gguf.GGMLQuantizationType.F16: "f16",
    gguf.GGMLQuantizationType.BF16: "bf16",
}
_ARRAY, _STRING = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING
_PIECE_BYTES = 32 * 2**20  # of float32
_DAMAGE = (ValueError, IndexError, KeyError, TypeError, OverflowError)  # what the reader trips over in a bad file


class GgufFile:
    """Everything that the spec asks for is found, and its shape compared, before the first tensor is handed out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.keys = Keys(_Metadata(self._reader, path), str(path))
        if (self.keys.get("split.count") or 0) > 1:
            raise UnsupportedModel(f"{path}: one part of a split GGUF; merge the parts first")
        self.architecture = str(self.keys.get("general.architecture"))
        self.spec: ModelSpec = spec_from_metadata(self._model())
        self._parts = {name: self._resolve(name, shape) for name, shape in self.spec.tensors()}
        self._check_types()

    @property
    def in_place(self) -> bool:
        return False

    def pieces(self, name: str) -> Sequence[HostTensor]:
        return LazyPieces([slab.load for part in self._parts[name] for slab in self._slabs(part)])

    def tokenizer(self) -> tuple[TokenFields, str]:
        vocabulary = Vocabulary(self.keys)
        return token_fields(vocabulary), build_tokenizer(vocabulary, self.architecture).to_str()

    def release(self) -> None:
        release_pages([self._reader.mapping])

    def close(self) -> None:
        """Nothing to do: views of the mapped file keep it open, and it goes with the last of them."""

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    @cached_property
    def dtype(self) -> str:
        """Storage type of the matrices; "gguf" where some of the layers' are quantised."""
        packed = [name for name in self._parts if is_packed(name)]
        kinds = {self._tensors[part.tensor].tensor_type for name in packed for part in self._parts[name]}
        if not kinds <= _IN_PLACE.keys():
            return GGUF
        return _IN_PLACE[self._tensors["blk.0.attn_output.weight"].tensor_type]

    def coded(self, name: str) -> tuple[tuple[int, str], ...]:
        """Rows of each part of a matrix, and the layout that keeps its blocks to the bit; "plain" of floats, "" of a
        type that none keeps."""
        return tuple(
            (math.prod(part.piece_shape[:-1]), "plain" if kind in _IN_PLACE else layout_of(kind) or "")
            for part in self._parts[name]
            for kind in (self._tensors[part.tensor].tensor_type,)
        )

    def _model(self) -> GgufModel:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            # Say that the architecture is unknown rather than that a tensor is missing where both hold.
            spec_from_metadata(GgufModel(self.keys, self._tensors, 1, {}))
            raise DamagedCheckpoint(f"{self.path}: tensor token_embd.weight is missing")
        factors = {name: self._tensors[name].data for name in ROPE_FACTORS if name in self._tensors}
        values = {name: [float(value) for value in data.reshape(-1)] for name, data in factors.items()}
        return GgufModel(self.keys, self._tensors, _shape(embedding)[0], values)

    def _resolve(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        ways = gguf_parts(self.spec, self.architecture, name, shape)
        way = next((way for way in ways if way[0].tensor in self._tensors), ways[0])
        for part in way:
            if part.tensor not in self._tensors:
                raise DamagedCheckpoint(f"{self.path}: tensor {part.tensor} is missing")
            found = _shape(self._tensors[part.tensor])
            kind = self._tensors[part.tensor].tensor_type
            if len(found) == 1 and kind not in _IN_PLACE:
                raise UnsupportedModel(f"{self.path}: {part.tensor}: a vector of type {kind.name} is not supported")
            if found != part.shape:
                raise DamagedCheckpoint(
                    f"{self.path}: {part.tensor} has shape {list(found)}, the metadata asks for {list(part.shape)}"
                )
        return way

    def _check_types(self) -> None:
        """One row of each kind, so that a type that cannot be read is reported before an hour of conversion."""
        used = {part.tensor for parts in self._parts.values() for part in parts}
        for tensor in {self._tensors[name].tensor_type: self._tensors[name] for name in used}.values():
            rows = tensor.data.reshape(-1, tensor.data.shape[-1])
            try:
                _dequantize(rows[:1], tensor)
            except UnsupportedModel as error:
                raise UnsupportedModel(f"{self.path}: {error}") from error

    def _slabs(self, part: Part) -> Iterator[_Slab]:
        """The part cut into runs of rows; where rows change places, these are whole heads."""
        tensor = self._tensors[part.tensor]
        data = tensor.data if part.expert is None else tensor.data[part.expert]
        data = data[part.first : part.first + part.piece_shape[0]]
        rows = data.shape[0]
        bytes_per_row = 4 * int(np.prod(part.piece_shape[1:], dtype=np.int64))
        unit = len(part.order) or 1
        step = unit * max(1, _PIECE_BYTES // (bytes_per_row * unit))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield _Slab(tensor, data[start:stop], (stop - start, *part.piece_shape[1:]), part.order)


class _Slab(NamedTuple):
    tensor: gguf.ReaderTensor
    data: npt.NDArray[Any]  # in the file
    shape: tuple[int, ...]
    order: tuple[int, ...]  # of the rows of each head; empty = as they are

    def load(self) -> HostTensor:
        dtype = _IN_PLACE.get(self.tensor.tensor_type)
        if (layout := layout_of(self.tensor.tensor_type)) is not None and len(self.shape) == 2:
            codes, scales = read_blocks(self.data.reshape(-1, self.data.shape[-1]), self.tensor.tensor_type)
            if self.order:
                codes, scales = _in_order(codes, self.order), tuple(_in_order(part, self.order) for part in scales)
            return HostTensor("f32", self.shape, pack_codes(layout, self.shape, Quantised(codes, scales)).data, layout)
        if self.order:
            return from_array(_in_order(_dequantize(self.data, self.tensor).reshape(self.shape), self.order))
        if dtype is not None:
            return HostTensor(dtype, self.shape, memoryview(self.data.reshape(-1).view(np.uint8).data))
        return from_array(_dequantize(self.data, self.tensor).reshape(self.shape))


class _Metadata(Mapping[str, Any]):
    """Values decoded when asked for: the vocabulary is long, and most callers want a few numbers."""

    def __init__(self, reader: gguf.GGUFReader, path: Path) -> None:
        self._fields = reader.fields
        self._path = path

    def __getitem__(self, key: str) -> Any:
        field = self._fields[key]
        if field.types == [gguf.GGUFValueType.FLOAT32]:
            return float(str(field.parts[-1][0]))  # 1e-05 as it was meant, not the double nearest to its float32
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise DamagedCheckpoint(f"{self._path}: {key}: text that is not UTF-8") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


class _BoundedReader(gguf.GGUFReader):
    """The package's reader takes what is left where a file ends early; here that is an error, and at once."""

    @property  # type: ignore[override]
    def data(self) -> npt.NDArray[Any]:
        return self._bytes

    @data.setter
    def data(self, value: npt.NDArray[Any]) -> None:
        self.mapping = _mapping_of(value)
        self._bytes = np.asarray(value)  # slicing a plain view instead of a memmap halves the time of a vocabulary

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None) -> npt.NDArray[Any]:
        kind, begin = np.dtype(dtype), int(offset)
        end = begin + kind.itemsize * int(count)
        if end > len(self._bytes):
            raise _Truncated(f"truncated: {len(self._bytes)} bytes, at least {end} expected")
        found = self._bytes[begin:end].view(kind)
        order = override_order or self.byte_order
        return found if order == "I" else found.view(kind.newbyteorder(order))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        """Arrays in one piece, and texts as views: the package makes several objects of each element, which takes two
        minutes and three gigabytes for eight megabytes of empty texts."""
        if raw_type != _ARRAY:
            found: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
            return found
        kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        begin, count, types = orig_offs + 12, int(length[0]), [_ARRAY, gguf.GGUFValueType(kind[0])]
        scalar = self.gguf_scalar_to_np.get(types[1])
        if scalar is not None:
            values = self._get(begin, scalar, count)
            return 12 + values.nbytes, [kind, length, values], [2], types
        if types[1] is not _STRING:
            raise ValueError("an array of arrays")
        texts, end = self._texts(begin, count)
        return end - orig_offs, [kind, length, *texts], list(range(2, 2 + count)), types

    def _texts(self, begin: int, count: int) -> tuple[list[memoryview], int]:
        view, size, at = self._bytes.data, len(self._bytes), begin
        order: Literal["little", "big"] = "little" if (self.byte_order == "I") == (sys.byteorder == "little") else "big"
        texts = []
        for _ in range(count):
            end = at + 8 + int.from_bytes(view[at : at + 8], order)
            if end > size or at + 8 > size:
                raise _Truncated(f"truncated: {size} bytes, at least {end} expected")
            texts.append(view[at + 8 : end])
            at = end
        return texts, at


class _Truncated(Exception):
    pass


def _open(path: Path) -> _BoundedReader:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise DamagedCheckpoint(f"{path}: not a GGUF file")
        return _BoundedReader(path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror}") from error
    except _Truncated as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error
    except _DAMAGE as error:
        raise DamagedCheckpoint(f"{path}: damaged GGUF header: {error}") from error


def _mapping_of(array: npt.NDArray[Any]) -> mmap.mmap:
    """The mapping under numpy's memmap."""
    base: Any = array
    while not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else base.base
    return base


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _dequantize(data: npt.NDArray[Any], tensor: gguf.ReaderTensor) -> npt.NDArray[np.float32]:
    try:
        found: npt.NDArray[np.float32] = gguf.quants.dequantize(data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModel(f"{tensor.name}: type {tensor.tensor_type.name} cannot be dequantised") from error
    return found.astype(np.float32, copy=False)


def _in_order(rows: npt.NDArray[Any], order: tuple[int, ...]) -> npt.NDArray[Any]:
    """Within each head. Where llama.cpp keeps the two numbers of a rotary pair side by side, ours are half a head
    apart."""
    heads = rows.reshape(-1, len(order), *rows.shape[1:])
    return heads[:, list(order)].reshape(rows.shape)
