"""A decoder as one native call per iteration: the whole forward pass, from tokens to logits.

Weights stay in the type and layout that they are stored in where the kernels can read it (16 bits under float32
arithmetic lose nothing, quantised matrices are multiplied as their codes), so a mapped checkpoint is used as it lies.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, repeat
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from dovetail.codings import CODINGS
from dovetail.engine.adapters import AdapterMatrices
from dovetail.engine.kv_cache import KVCache
from dovetail.engine.layer_source import LayerWalk
from dovetail.engine.preemption import PreemptionPoint
from dovetail.engine.prompt_reader import PIECE_TOKENS, single_tokens
from dovetail.engine.rope import Rope
from dovetail.engine.weights import Weights
from dovetail.errors import UnsupportedModel
from dovetail.modelspec import MlaSpec, ModelSpec, MoeSpec
from dovetail.sched.turn import Turn, TurnRow

READABLE_LAYOUTS = CODINGS  # besides plain
NativeCall = Callable[..., bool]
_EXPERT_FIELDS = {
    "scale": "shares_scale",
    "shared_size": "shared_size",
    "groups": "expert_groups",
    "groups_per_token": "groups_per_token",
    "alpha": "gate_alpha",
    "limit": "gate_limit",
}
_LATENT_FIELDS = {
    "rank": "latent_rank",
    "rope": "rope_dim",
    "nope": "nope_dim",
    "value": "value_dim",
    "norm_eps": "latent_eps",
}
_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def can_run(dtype: torch.dtype) -> bool:
    """Other types stay with the torch level."""
    return dtype in _PRECISIONS


def readable_types(dtype: torch.dtype) -> set[torch.dtype]:
    """What a model that is computed in `dtype` may keep its matrices in."""
    return set(_PRECISIONS) if dtype == torch.float32 else {dtype}


class NativeModel:
    def __init__(self, spec: ModelSpec, weights: Weights, dtype: torch.dtype, kernels: Any, level: str) -> None:
        self.spec = spec
        shape = _shape(spec, kernels, _PRECISIONS[dtype])
        try:
            self._model = kernels.Model(level, torch.get_num_threads(), shape, spec.num_layers)
            self._fill(weights)
        except ValueError as error:  # which says what does not fit what
            raise UnsupportedModel(f"the kernels cannot compute this model: {error}") from error
        self.call: NativeCall = self._model.forward  # of every iteration; who measures puts something around it
        self.preemption: PreemptionPoint | None = None  # of an iteration that may stop
        self.walk: LayerWalk | None = None  # where layers are read with every iteration
        self._adapters: dict[str, int] = {}  # by key: the number by which the kernels know it
        self._next_adapter = 0

    def _fill(self, weights: Weights) -> None:
        spec = self.spec
        for name, _ in spec.tensors():
            self._add(weights, name)
        for layer in range(spec.num_layers):
            self._model.set_layer(layer, spec.window(layer), spec.has_local_rope(layer))
        if spec.position_offset is None:
            self._set_rope(Rope(spec.rope, spec.turning_dim, torch.float32), local=False)
            if spec.rope_local is not None:
                self._set_rope(Rope(spec.rope_local, spec.turning_dim, torch.float32), local=True)
        self._model.check()

    def _add(self, weights: Weights, name: str) -> None:
        names = [name, "lm_head.weight"] if name == "embed.weight" and self.spec.tied_embeddings else [name]
        quantised = weights.quantised(name)
        pieces = _pieces(weights, name) if quantised is None else []
        for each in names:
            for matrix in quantised or ():
                self._model.add_quantised(each, *matrix)
            if quantised is None:
                self._model.add(each, pieces)
        if self.spec.norm == "layer" and not self.spec.norm_bias and name.endswith("norm.weight"):
            # A bias is how the kernels know a layer norm.
            self._model.add(name.removesuffix("weight") + "bias", [torch.zeros_like(pieces[0])])

    def _set_rope(self, rope: Rope, local: bool) -> None:
        self._model.set_rope(rope.frequencies.tolist(), rope.scale, local)

    def add_adapter(self, key: str, adapter: AdapterMatrices) -> None:
        number = self._next_adapter
        self._next_adapter += 1
        self._model.add_adapter(number, adapter.scaling)
        try:
            for part in adapter.parts:
                self._model.add_low_rank(number, part.tensor, part.row, part.first, part.second)
        except ValueError as error:
            self._model.remove_adapter(number)
            raise UnsupportedModel(f"the kernels cannot compute this adapter: {error}") from error
        self._adapters[key] = number

    def remove_adapter(self, key: str) -> None:
        self._model.remove_adapter(self._adapters.pop(key))

    def has_adapter(self, key: str) -> bool:
        return key in self._adapters

    def forward(self, turn: Turn, cache: KVCache) -> tuple[list[TurnRow], Tensor, list[int]]:
        """Computes keys and values of every token of the turn; returns the rows that sample, their logits, and where
        the largest of each row is (-1 if one is not a number)."""
        rows = _by_adapter(turn.rows)
        sampled = [row for row in rows if row.samples]
        logits = torch.empty(len(sampled), self.spec.vocab_size)
        best = torch.empty(len(sampled), dtype=torch.int32)
        self._compute(self.call, *_arguments(rows, cache), logits, best, **self._adapters_of(rows))
        return sampled, logits, best.tolist()

    def states(self, row: TurnRow, cache: KVCache) -> Tensor:
        found = torch.empty(row.count, self.spec.hidden_size)
        rows = tuple(single_tokens(row))
        self._compute(self._model.states, *_arguments(rows, cache), found, **self._adapters_of(rows))
        return found

    def _compute(self, call: NativeCall, *arguments: Any, **options: Any) -> None:
        preemption = self.preemption
        if self.walk is not None:
            steps = chain([partial(call, *arguments, seconds=0.0, **options)], repeat(partial(self._model.resume, 0.0)))
            self.walk.run(lambda: next(steps)(), preemption)
            self._model.resume()
            return
        if preemption is None:
            call(*arguments, **options)
            return
        is_done = call(*arguments, seconds=preemption.every_s, **options)
        while not is_done:
            preemption.preempt()
            is_done = self._model.resume(preemption.every_s)

    def _adapters_of(self, rows: tuple[TurnRow, ...]) -> dict[str, Any]:
        """An argument only where some row has an adapter."""
        if not any(row.adapter for row in rows):
            return {}
        numbers = [self._adapters[row.adapter] if row.adapter else -1 for row in rows]
        return {"adapters": np.array(numbers, dtype=np.int32)}

    def all_logits(self, row: TurnRow, cache: KVCache) -> Iterator[Tensor]:
        rows = tuple(single_tokens(row))
        for first in range(0, len(rows), PIECE_TOKENS):
            yield self.forward(Turn(rows[first : first + PIECE_TOKENS]), cache)[1]


def _by_adapter(rows: tuple[TurnRow, ...]) -> tuple[TurnRow, ...]:
    """Rows of one adapter lie together, so that they are multiplied together."""
    return tuple(sorted(rows, key=lambda row: row.adapter)) if any(row.adapter for row in rows) else rows


def _arguments(rows: tuple[TurnRow, ...], cache: KVCache) -> tuple[Any, ...]:
    tokens, tables, offsets = array("i"), array("i"), array("i")
    for row in rows:
        assert 0 < row.count <= len(row.tokens) - row.start, "a row computes known tokens only"
        tokens.extend(row.tokens[row.start : row.end])
        offsets.append(len(tables))
        tables.extend(row.blocks[: -(-row.end // cache.block_size)])
    return (
        np.asarray(tokens),
        np.array([row.start for row in rows], dtype=np.int32),
        np.array([row.count for row in rows], dtype=np.int32),
        np.asarray(offsets),
        np.asarray(tables),
        np.array([row.samples for row in rows], dtype=np.int32),
        cache.usable(),
    )


def _shape(spec: ModelSpec, kernels: Any, precision: str) -> Any:
    shape = kernels.Shape()
    same = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    for name in (*same, "norm_eps", "embed_scale", "activation", "gated_mlp"):
        setattr(shape, name, getattr(spec, name))
    for name, usual in (("logit_scale", 1.0), ("qk_norm_whole", False), ("parallel_block", False)):
        if getattr(spec, name) != usual:
            setattr(shape, name, getattr(spec, name))
    shape.attention_scale = spec.attention_scale if spec.attention_scale is not None else spec.head_dim**-0.5
    shape.attention_softcap = spec.attention_softcap or 0.0
    shape.final_softcap = spec.final_softcap or 0.0
    shape.position_offset = -1 if spec.position_offset is None else spec.position_offset
    shape.precision = precision
    # Sizes that no layer uses, and no tensor vouches for, shall not size buffers.
    kinds = {spec.is_moe_layer(layer) for layer in range(spec.num_layers)}
    if False not in kinds:
        shape.intermediate_size = 1
    if spec.moe is not None and True in kinds:
        shape.num_experts, shape.experts_per_token = spec.moe.num_experts, spec.moe.experts_per_token
        shape.expert_size, shape.normalize_shares = spec.moe.intermediate_size, spec.moe.normalize_weights
        _set_unusual(shape, spec.moe, _EXPERT_FIELDS)
    if spec.mla is not None:
        _set_unusual(shape, spec.mla, _LATENT_FIELDS)
    return shape


def _set_unusual(shape: Any, record: MoeSpec | MlaSpec, fields: Mapping[str, str]) -> None:
    """Kernels of before a field came to be compute what does not need it."""
    usual = {field.name: field.default for field in msgspec.structs.fields(record)}
    for ours, theirs in fields.items():
        if getattr(record, ours) != usual[ours]:
            setattr(shape, theirs, getattr(record, ours))


def _pieces(weights: Weights, name: str) -> list[Tensor]:
    """Matrices as they lie; norms and biases, which are small, whole and in float32 (biases rounded as matrices are, so
    that a model is the same however it is stored)."""
    if "norm." in name or name.endswith(".sinks.weight"):
        return [weights.norm(name)]
    if name.endswith(".bias"):
        return [weights.tensor(name).float()]
    if name in ("embed.weight", "positions.weight"):
        return [weights.tensor(name)]
    return [part.reshape(-1, part.shape[-1]) for part in weights.parts(name)]  # of a stack of experts: all their rows
