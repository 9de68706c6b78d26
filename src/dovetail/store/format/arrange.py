"""What lies where: how a model's tensors are cut for the devices of a tensor-parallel group, in which layout each is
kept, and at which offset. Pure arithmetic; reads and writes nothing.

Cut as Megatron does: the matrix before an activation or attention by rows (outputs), the one after it by columns
(inputs), so that one sum over the devices per half layer suffices; embedding and head by rows of the vocabulary, of
which the last rank may have fewer. Norms, the router, learned positions and biases of summed matrices are in every
partition.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from dovetail.errors import UnsupportedModel
from dovetail.layouts import CELLS, GGUF, coding_of, packed_bytes
from dovetail.modelspec import ModelSpec
from dovetail.store.format.assemble import cut_axis
from dovetail.store.format.manifest import ALIGNMENT, MAX_PARTITIONS, PAGE_BYTES, Axis, TensorEntry


class Cut(NamedTuple):
    axis: Axis
    sections: tuple[int, ...] = ()  # rows of the whole, cut one by one; of "pieces" those of each


class Kept(NamedTuple):
    """How a tensor, or a piece of it, is kept."""

    rows: int  # of all matrices of a stack
    dtype: str
    layout: str


Coded = Callable[[str], tuple[tuple[int, str], ...]]  # of a tensor's parts: rows, and the layout that keeps their codes


class Tensor(NamedTuple):
    """One canonical tensor and its share of each partition, or its pieces, which have layouts of their own."""

    name: str
    shape: tuple[int, ...]
    cut: Cut
    shares: tuple[TensorEntry, ...]


class Arrangement(NamedTuple):
    tensors: tuple[Tensor, ...]  # in order of use, which is their order in the files
    sizes: tuple[int, ...]  # of the partitions


def arrange(
    spec: ModelSpec, dtype: str, layout: str = "plain", ranks: int = 1, coded: Coded | None = None
) -> Arrangement:
    """`coded`: of the source, for the layout "gguf"."""
    _check_ranks(spec, ranks)
    ends, tensors, group = [0] * ranks, [], ""
    for name, shape in spec.tensors():
        here = name.rsplit(".", 1)[0] if not name.startswith("layers.") else ".".join(name.split(".")[:2])
        step = ALIGNMENT if here == group else PAGE_BYTES  # a layer can be read by itself
        group = here
        cut = cut_of(spec, name) if ranks > 1 else Cut("")
        pieces = _pieces(spec, name, shape, dtype, layout, ranks, coded)
        if len(pieces) > 1:
            tensors.append(_in_pieces(name, shape, pieces, _up(ends[0], step)))
            ends[0] = tensors[-1].shares[-1].offset + tensors[-1].shares[-1].size
            continue
        _, kind, packing = pieces[0]
        shares = []
        for rank in range(ranks):
            share, sections = _share(cut, shape, rank, ranks)
            offset = _up(ends[rank], step)
            size = packed_bytes(packing, kind, share)
            ends[rank] = offset + size
            shares.append(TensorEntry(name, rank, offset, size, kind, share, packing, cut.axis, sections))
        tensors.append(Tensor(name, shape, cut, tuple(shares)))
    return Arrangement(tuple(tensors), tuple(_up(end, PAGE_BYTES) for end in ends))


def cut_of(spec: ModelSpec, name: str) -> Cut:
    module, kind = (name.split(".", 2)[2] if name.startswith("layers.") else name).rsplit(".", 1)
    if module in ("embed", "lm_head"):
        return Cut("rows", (spec.vocab_size,))
    if module == "qkv":
        return Cut("rows", (spec.q_size, spec.kv_size, spec.kv_size))
    if module == "gate_up":
        return Cut("rows", (spec.intermediate_size,) * 2)
    if module == "up":
        return Cut("rows", (spec.intermediate_size,))
    if module == "experts.gate_up" and spec.moe is not None:
        return Cut("rows", (spec.moe.intermediate_size,) * (2 * spec.moe.num_experts))
    if kind == "weight" and module in ("out", "down", "experts.down"):
        return Cut("columns")
    return Cut("")


def bounds(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """The part of `size` rows or columns that a rank has; all but the last have equally many."""
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def _share(cut: Cut, shape: tuple[int, ...], rank: int, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if cut.axis == "":
        return shape, ()
    axis = cut_axis(cut.axis, len(shape))
    share = list(shape)
    if cut.axis == "columns":
        start, stop = bounds(shape[axis], rank, ranks)
        share[axis] = stop - start
        return tuple(share), ()
    sections = tuple(stop - start for start, stop in (bounds(size, rank, ranks) for size in cut.sections))
    share[axis] = sum(sections) // math.prod(shape[:-2])
    return tuple(share), sections


def _kept_as(spec: ModelSpec, name: str, dtype: str, layout: str) -> tuple[str, str]:
    """Norms stay in float32: they are small, and Gemma's are 1 plus something that 16 bits would lose. Only matrices
    that multiply are packed, the embedding where it is the head as well: a router decides by small differences. Heads
    have 8 bits at least: with 4 the outputs lose more than the bytes are worth (docs/design/kernels.md)."""
    if "norm." in name or "sinks." in name:
        return "f32", "plain"
    if name == "lm_head.weight" or (name == "embed.weight" and spec.tied_embeddings):
        layout = {"int4": "int8", "amx-bf16": "plain" if name == "embed.weight" else layout}.get(layout, layout)
    elif not is_packed(name):
        layout = "plain"
    if layout == "plain":
        return dtype, "plain"
    return ("bf16", layout) if layout == "amx-bf16" else (dtype, CELLS[layout])


def _pieces(
    spec: ModelSpec, name: str, shape: tuple[int, ...], dtype: str, layout: str, ranks: int, coded: Coded | None
) -> list[Kept]:
    """One, but where the parts of a fused matrix come in blocks of several types."""
    rows = math.prod(shape[:-1])
    if layout != GGUF:
        return [Kept(rows, *_kept_as(spec, name, dtype, layout))]
    assert coded is not None, "what is kept as GGUF's blocks has some"
    if not (is_packed(name) or name in ("embed.weight", "lm_head.weight")):
        return [Kept(rows, *_kept_as(spec, name, dtype, "plain"))]
    parts = coded(name)
    layouts = {part for _, part in parts}
    if layouts == {"plain"}:
        return [Kept(rows, dtype, "plain")]
    if len(layouts) == 1 and _can_be_cut(spec, name, shape, parts[0][1], ranks):
        return [Kept(rows, dtype, parts[0][1] or CELLS["int8"])]
    if ranks > 1:
        return [Kept(rows, dtype, CELLS["int8"])]
    return [Kept(own, dtype, CELLS["int8"] if part in ("plain", "") else part) for own, part in parts]


def _in_pieces(name: str, shape: tuple[int, ...], pieces: list[Kept], offset: int) -> Tensor:
    entries: list[TensorEntry] = []
    for piece in pieces:
        own = (piece.rows, shape[-1])
        size = packed_bytes(piece.layout, piece.dtype, own)
        entries.append(TensorEntry(name, 0, offset, size, piece.dtype, own, piece.layout, "pieces"))
        offset = _up(offset + size, ALIGNMENT)
    return Tensor(name, shape, Cut("pieces", tuple(piece.rows for piece in pieces)), tuple(entries))


def _can_be_cut(spec: ModelSpec, name: str, shape: tuple[int, ...], layout: str, ranks: int) -> bool:
    """Whether every rank's columns are whole groups."""
    if ranks == 1 or layout == "" or cut_of(spec, name).axis != "columns":
        return True
    return bounds(shape[-1], 0, ranks)[1] % coding_of(layout, shape[-1]).unit == 0


def is_packed(name: str) -> bool:
    """A matrix of a layer that a layout packs."""
    others = ("norm.", "router.", "sinks.")
    return name.startswith("layers.") and name.endswith(".weight") and not any(other in name for other in others)


def _check_ranks(spec: ModelSpec, ranks: int) -> None:
    if not 1 <= ranks <= MAX_PARTITIONS:
        raise UnsupportedModel(f"tensor parallelism over {ranks} devices is not supported")
    if ranks > 1 and (spec.mla is not None or spec.attention_sinks or (spec.moe is not None and spec.moe.shared_size)):
        raise UnsupportedModel(f"a {spec.family} model is not cut for several devices: pull it whole (without --tp)")
    counts = {"attention heads": spec.num_heads, "key/value heads": spec.num_kv_heads}
    counts["rows of the MLP"] = spec.intermediate_size
    if spec.moe is not None:
        counts["rows of an expert"] = spec.moe.intermediate_size
    for what, count in counts.items():
        if count % ranks:
            raise UnsupportedModel(f"{count} {what} cannot be shared by {ranks} devices")
    start, stop = bounds(spec.vocab_size, ranks - 1, ranks)
    if start == stop:
        raise UnsupportedModel(f"a vocabulary of {spec.vocab_size} cannot be shared by {ranks} devices")


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
