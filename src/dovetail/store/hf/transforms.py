"""Tensors of HF folders that are canonical ones only after their elements have changed places, or in part.

gpt-oss     experts lie [experts, in, out], gate and up interleaved; or as MXFP4, blocks of 32 codes with an exponent,
            codes of neighbours in one byte, whose bits are kept (`codings`: fp4-e32)
DeepSeek    what makes keys and values of a latent is one matrix; rows that turn lie pair by pair
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dovetail.codings import Quantised
from dovetail.layouts import pack_codes
from dovetail.modelspec import MlaSpec, ModelSpec
from dovetail.node.ports import HostTensor
from dovetail.store.format.arrays import Array, LazyPieces, as_array, from_array, reordered
from dovetail.store.hf.safetensors_file import SafetensorsFile

FP4 = "fp4-e32"
BLOCKS, SCALES = "_blocks", "_scales"


class Stored:
    """A tensor of a file."""

    def __init__(self, file: SafetensorsFile, name: str) -> None:
        self.file, self.name = file, name

    def tensor(self) -> HostTensor:
        return self.file.tensor(self.name)

    def bytes(self) -> Array:
        return self.file.unsigned_bytes(self.name)


Transform = Callable[[ModelSpec, list[Stored]], Sequence[HostTensor]]


def transform_of(spec: ModelSpec, name: str) -> Transform | None:
    """What makes the canonical tensor of the file's; None = nothing has to."""
    return _TRANSFORMS.get(spec.family, {}).get(name.split(".", 2)[-1])


def is_fp4(names: Sequence[str]) -> bool:
    return names[0].endswith(BLOCKS)


def _gate_up(spec: ModelSpec, stored: list[Stored]) -> Sequence[HostTensor]:
    return _experts(stored, interleaved=True)


def _down(spec: ModelSpec, stored: list[Stored]) -> Sequence[HostTensor]:
    return _experts(stored, interleaved=False)


def _experts(stored: list[Stored], interleaved: bool) -> Sequence[HostTensor]:
    """A piece for each, made when it is asked for: all of a layer's are a gigabyte."""
    if is_fp4([one.name for one in stored]):
        blocks, scales = (one.bytes() for one in stored)
        return LazyPieces([partial(_fp4, *each, interleaved) for each in zip(blocks, scales, strict=True)])
    tensor = stored[0].tensor()
    return LazyPieces([partial(_transposed, one, tensor.dtype, interleaved) for one in as_array(tensor)])


def _transposed(matrix: Array, dtype: str, interleaved: bool) -> HostTensor:
    return from_array(_apart(matrix.T) if interleaved else matrix.T, dtype)


def _fp4(blocks: Array, scales: Array, interleaved: bool) -> HostTensor:
    """Blocks [rows, groups, 16] of bytes, the lower half the first of two neighbours."""
    rows, groups = scales.shape
    codes = np.stack([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=-1).reshape(rows, groups * 32).view(np.int8)
    if interleaved:
        codes, scales = _apart(codes), _apart(scales)
    shape = (rows, groups * 32)
    return HostTensor("f32", shape, pack_codes(FP4, shape, Quantised(codes, (scales,))).data, FP4)


def _gate_up_bias(spec: ModelSpec, stored: list[Stored]) -> Sequence[HostTensor]:
    tensor = stored[0].tensor()
    return [from_array(np.concatenate([_apart(one) for one in as_array(tensor)]), tensor.dtype)]


def _down_bias(spec: ModelSpec, stored: list[Stored]) -> Sequence[HostTensor]:
    tensor = stored[0].tensor()
    return [from_array(as_array(tensor).reshape(-1), tensor.dtype)]


def _apart(rows: Array) -> Array:
    return np.concatenate([rows[0::2], rows[1::2]])


def latent_orders(mla: MlaSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each row of a query head, and of the latent with the key beside it, its place in files: pairs of rows that
    turn become two halves."""
    turned = (*range(0, mla.rope, 2), *range(1, mla.rope, 2))
    query, latent = ((*range(still), *(still + row for row in turned)) for still in (mla.nope, mla.rank))
    return query, latent


def _latent_qkv(spec: ModelSpec, stored: list[Stored]) -> Sequence[HostTensor]:
    assert spec.mla is not None
    query, latent = latent_orders(spec.mla)
    heads = np.arange(spec.num_heads)[:, None] * len(query)
    rows = ((heads + np.array(query)).reshape(-1), np.array(latent))
    return [reordered(one.tensor(), order) for one, order in zip(stored, rows, strict=True)]


def _k_up(spec: ModelSpec, stored: list[Stored]) -> Sequence[HostTensor]:
    tensor = stored[0].tensor()
    return [from_array(_heads(spec, tensor)[:, : _nope(spec)].swapaxes(1, 2), tensor.dtype)]


def _v_up(spec: ModelSpec, stored: list[Stored]) -> Sequence[HostTensor]:
    tensor = stored[0].tensor()
    return [from_array(_heads(spec, tensor)[:, _nope(spec) :], tensor.dtype)]


def _heads(spec: ModelSpec, tensor: HostTensor) -> Array:
    """Of each head the rows that make its key, then those that make its value."""
    return as_array(tensor).reshape(spec.num_heads, -1, tensor.shape[-1])


def _nope(spec: ModelSpec) -> int:
    assert spec.mla is not None
    return spec.mla.nope


_TRANSFORMS: dict[str, dict[str, Transform]] = {
    "gpt_oss": {
        "experts.gate_up.weight": _gate_up,
        "experts.gate_up.bias": _gate_up_bias,
        "experts.down.weight": _down,
        "experts.down.bias": _down_bias,
    },
    "deepseek_v2": {"qkv.weight": _latent_qkv, "k_up.weight": _k_up, "v_up.weight": _v_up},
}
