"""What a decoder-only model, or an encoder, looks like: its shape, the few ways in which families differ, and its
canonical tensors.

Knows neither files nor torch. `store` turns HF configs and GGUF metadata into a ModelSpec and serves tensors under
the canonical names below; `engine` builds a runnable model from the two; `policy` and `sim` take byte and FLOP counts.

Canonical tensors (i = layer; concatenated pieces lie along the first dimension, in the order written):

    embed.weight              [vocab, hidden]
    positions.weight          [context + position_offset, hidden]      learned positions only
    token_types.weight        [token_types, hidden]                    encoders with types only
    embed_norm.*              [hidden]                                 encoders only
    layers.i.attn_norm.*      [hidden]                                 .weight, .bias with norm_bias; pre_norm only
    layers.i.qkv.*            [(heads + 2·kv_heads)·head_dim, hidden]  q, k, v; .bias with qkv_bias
                              [heads·(nope + rope) + rank + rope, hidden]  with mla: q, latent, key that turns
    layers.i.kv_norm.weight   [rank]                                   mla only, as the next two
    layers.i.k_up.weight      [heads, rank, nope]                      from a latent to a head's key, transposed
    layers.i.v_up.weight      [heads, value, rank]
    layers.i.sinks.weight     [heads]                                  attention_sinks only
    layers.i.q_norm.weight    [head_dim]                               qk_norm only; [heads·head_dim] with qk_norm_whole
    layers.i.k_norm.weight    [head_dim]                               [kv_heads·head_dim] with qk_norm_whole
    layers.i.out.*            [hidden, heads·head_dim]                 .bias with out_bias; [hidden, heads·value], mla
    layers.i.post_attn_norm.weight  [hidden]                           sandwich_norm only
    layers.i.mlp_norm.*       [hidden]                                 pre_norm, unless parallel_block
    layers.i.gate_up.weight   [2·intermediate, hidden]                 gate, up; gated_mlp
    layers.i.up.*             [intermediate, hidden]                   otherwise; .bias with mlp_bias
    layers.i.down.*           [hidden, intermediate]
    layers.i.router.weight    [experts, hidden]                        in MoE layers, instead of gate_up and down
    layers.i.router.bias      [experts]                                with moe.biases
    layers.i.experts.gate_up.weight [experts, 2·moe_intermediate, hidden]
    layers.i.experts.gate_up.bias   [experts·2·moe_intermediate]       with moe.biases
    layers.i.experts.down.weight    [experts, hidden, moe_intermediate]
    layers.i.experts.down.bias      [experts·hidden]                   with moe.biases
    layers.i.shared.gate_up.weight  [2·moe.shared_size, hidden]        with moe.shared_size
    layers.i.shared.down.weight     [hidden, moe.shared_size]
    layers.i.post_mlp_norm.weight   [hidden]                           sandwich_norm only
    final_norm.*              [hidden]                                 unless norm_after
    score.dense.*             [hidden, hidden]                         encoders that score pairs only, as the next two
    score.norm.*              [hidden]
    score.out.*               [1, hidden]
    lm_head.weight            [vocab, hidden]                          unless tied_embeddings

A norm's weight is the multiplier itself: readers add the 1 that Gemma's files leave out. Rotary q and k are in the
half-rotated order of HF (the two halves of a head are the pair), whatever the file had: `rotary_order` says where its
rows go. Of a head that turns in part only, the last pairs of both halves are those that stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

DTYPE_BYTES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}
FP8 = "fp8"  # to compute in: the matrices of layers as 8-bit floats with a float32 per row, all else in bf16
FP8_STEP = 16  # rows and columns of such a matrix are multiples of it; others stay in bf16
KV_SCALE_BYTES = 4  # behind the codes of each head's key and value
KvKind = Literal["auto", "int8"]  # keys and values: in the type that is computed in, or as int8 with scales


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary positions. `kind` names the scaling; each uses the fields it needs."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "none"] = "default"  # none: nothing turns
    factor: float = 1.0
    factors: tuple[float, ...] = ()  # longrope: each frequency is divided by its own
    rotary_dims: int = 0  # of a head, how many dimensions turn; 0 = all
    original_context: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # longrope; yarn, where None = 0.1·ln(factor) + 1
    truncate: bool = True  # yarn


class MoeSpec(msgspec.Struct, frozen=True):
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool  # the chosen experts' weights sum to 1
    biases: bool = False  # of the router and of the experts
    alpha: float = 1.0  # with a limit, the inner part is (up + 1)·gate·sigmoid(alpha·gate)
    limit: float = 0.0  # the gate is at most this, up within plus and minus this; 0 = no limit, and the usual form
    shared_size: int = 0  # inner size of an MLP that every token goes through besides; 0 = none
    scale: float = 1.0  # of the chosen experts' weights
    groups: int = 1  # of experts, equally large and in order: a token's experts are
    groups_per_token: int = 1  # of so many of them, those whose largest weight is largest


class MlaSpec(msgspec.Struct, frozen=True):
    """Multi-head latent attention: keys and values of all heads are made of one latent per token. It is kept, beside a
    key that turns and that all heads share; what makes a head's key and value of it is applied to the query and to the
    sum instead. So to the cache it is one key head of rank + rope dimensions, whose value is the key itself."""

    rank: int  # of the latent
    rope: int  # dimensions of a query, and of the shared key, that turn
    nope: int  # dimensions of a query that do not
    value: int  # of a head
    norm_eps: float = 1e-6  # of the latent's norm


class ScoreSpec(msgspec.Struct, frozen=True):
    """The head of an encoder that reads a query and a document together and says how well they match."""

    pooling: Literal["cls", "mean"] = "cls"  # which states it reads
    activation: Literal["tanh", "silu", "gelu_tanh", "gelu", "relu"] = "tanh"  # behind its dense layer
    dense_bias: bool = True
    norm: bool = False  # behind the activation


class EncoderSpec(msgspec.Struct, frozen=True):
    """A model that reads a text in both directions and says nothing: its answer is a vector."""

    pooling: Literal["cls", "mean", "last"] = "mean"  # which states make the vector: the first, all, or the last
    normalize: bool = False  # to length 1
    token_types: int = 0  # learned vectors for the first and the second text of a pair; 0 = none
    norm_after: bool = False  # norms of the sums behind attention and the MLP, not before them (BERT)
    first_norm: bool = True  # the first layer has an attn_norm; ModernBERT's has the embedding's
    separator: int | None = None  # the token behind the first of two texts, where the second has a type of its own
    score: ScoreSpec | None = None  # it makes no vectors, but scores of pairs


class ModelSpec(msgspec.Struct, frozen=True):
    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_bias: bool = True  # of layer norms
    norm_in_float32: bool = False  # multiply by the weight before rounding to the compute type (Gemma)
    activation: Literal["silu", "gelu_tanh", "gelu", "relu"] = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_sinks: bool = False  # each head has a score that takes part in the softmax and has no value (gpt-oss)
    mla: MlaSpec | None = None  # head_dim is then rank + rope, and num_kv_heads 1
    qk_norm_whole: bool = False  # over all heads of a token at once (OLMo 2)
    pre_norm: bool = True  # norms before attention and before the MLP
    sandwich_norm: bool = False  # norms after attention and after the MLP as well (Gemma), or instead (OLMo 2)
    parallel_block: bool = False  # attention and the MLP read the same norm of the same rows (Cohere)
    position_offset: int | None = None  # learned positions, shifted by this many rows (OPT: 2); None = rotary
    rope: RopeSpec = RopeSpec()
    rope_local: RopeSpec | None = None  # some layers use this one instead: those with a window (Gemma 3), unless
    rope_local_layers: tuple[int, ...] = ()  # says which (SmolLM3)
    pairs_side_by_side: bool = False  # in files, a pair's two dimensions are neighbours; readers bring them in order
    windows: tuple[int, ...] = ()  # per layer, attention reaches this many tokens back, 0 = all; empty = all layers 0
    embed_scale: float = 1.0
    attention_scale: float | None = None  # None = 1/sqrt(head_dim)
    attention_softcap: float | None = None
    final_softcap: float | None = None
    logit_scale: float = 1.0
    tied_embeddings: bool = False
    moe: MoeSpec | None = None
    dense_layers: tuple[int, ...] = ()  # layers of a MoE model that have a plain MLP
    encoder: EncoderSpec | None = None  # windows then reach so far to both sides

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the first projection of attention."""
        if self.mla is None:
            return self.q_size + 2 * self.kv_size
        return self.num_heads * (self.mla.nope + self.mla.rope) + self.mla.rank + self.mla.rope

    @property
    def attended_size(self) -> int:
        """Columns of the last one."""
        return self.q_size if self.mla is None else self.num_heads * self.mla.value

    @property
    def turning_dim(self) -> int:
        """The part of a head that positions may turn."""
        return self.head_dim if self.mla is None else self.mla.rope

    @property
    def kv_parts(self) -> int:
        """What the cache has of a token and head: a key and a value, or one for both."""
        return 2 if self.mla is None else 1

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def has_local_rope(self, layer: int) -> bool:
        if self.rope_local is None or self.position_offset is not None:
            return False
        return layer in self.rope_local_layers if self.rope_local_layers else self.window(layer) > 0

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.dense_layers

    def kv_bytes_per_token(self, dtype: str, kv: KvKind = "auto") -> int:
        """Of an encoder, which keeps neither: what a token takes on its way through a layer."""
        if self.encoder is not None:
            return (8 * self.hidden_size + 3 * self.intermediate_size) * DTYPE_BYTES[dtype]
        own = DTYPE_BYTES[activation_dtype(dtype)]
        per_head = self.head_dim + KV_SCALE_BYTES if kv == "int8" else self.head_dim * own
        return self.kv_parts * self.num_layers * self.num_kv_heads * per_head

    def num_parameters(self) -> int:
        return sum(_product(shape) for _, shape in self.tensors())

    def weight_bytes(self, dtype: str) -> int:
        if dtype != FP8:
            return self.num_parameters() * DTYPE_BYTES[dtype]
        own = DTYPE_BYTES[activation_dtype(FP8)]
        return sum(
            _product(shape[:-1]) * (shape[-1] + 4) if is_fp8_matrix(name, shape) else _product(shape) * own
            for name, shape in self.tensors()
        )

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Canonical names and shapes, in order of use."""
        yield "embed.weight", (self.vocab_size, self.hidden_size)
        if self.position_offset is not None:
            yield "positions.weight", (self.context_length + self.position_offset, self.hidden_size)
        if self.encoder is not None:
            if self.encoder.token_types:
                yield "token_types.weight", (self.encoder.token_types, self.hidden_size)
            yield from self._norm("embed_norm")
        for layer in range(self.num_layers):
            for name, shape in self._layer_tensors(layer):
                yield f"layers.{layer}.{name}", shape
        if self.encoder is None or not self.encoder.norm_after:
            yield from self._norm("final_norm")
        if self.encoder is not None and self.encoder.score is not None:
            yield from _linear("score.dense", self.hidden_size, self.hidden_size, self.encoder.score.dense_bias)
            if self.encoder.score.norm:
                yield from self._norm("score.norm")
            yield from _linear("score.out", 1, self.hidden_size, True)
        if not self.tied_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def _layer_tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden = self.hidden_size
        if self.pre_norm and (layer > 0 or self.encoder is None or self.encoder.first_norm):
            yield from self._norm("attn_norm")
        yield from _linear("qkv", self.qkv_size, hidden, self.qkv_bias)
        if self.mla is not None:
            yield "kv_norm.weight", (self.mla.rank,)
            yield "k_up.weight", (self.num_heads, self.mla.rank, self.mla.nope)
            yield "v_up.weight", (self.num_heads, self.mla.value, self.mla.rank)
        if self.attention_sinks:
            yield "sinks.weight", (self.num_heads,)
        if self.qk_norm:
            yield "q_norm.weight", (self.q_size if self.qk_norm_whole else self.head_dim,)
            yield "k_norm.weight", (self.kv_size if self.qk_norm_whole else self.head_dim,)
        yield from _linear("out", hidden, self.attended_size, self.out_bias)
        if self.sandwich_norm:
            yield "post_attn_norm.weight", (hidden,)
        if self.pre_norm and not self.parallel_block:
            yield from self._norm("mlp_norm")
        yield from self._mlp_tensors(layer)
        if self.sandwich_norm:
            yield "post_mlp_norm.weight", (hidden,)

    def _mlp_tensors(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        if self.moe is not None and self.is_moe_layer(layer):
            yield from _moe_tensors(self.moe, hidden)
        elif self.gated_mlp:
            yield from _linear("gate_up", 2 * inner, hidden, self.mlp_bias)
            yield from _linear("down", hidden, inner, self.mlp_bias)
        else:
            yield from _linear("up", inner, hidden, self.mlp_bias)
            yield from _linear("down", hidden, inner, self.mlp_bias)

    def _norm(self, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (self.hidden_size,)
        if self.norm == "layer" and self.norm_bias:
            yield f"{name}.bias", (self.hidden_size,)


def rotary_order(spec: ModelSpec) -> tuple[int, ...] | None:
    """For each row of a canonical q or k head, which row of the head in the file it is; None = the same. Not of mla,
    whose projections have rows of several kinds."""
    half = spec.head_dim // 2
    turning = (spec.rope.rotary_dims or spec.head_dim) // 2  # pairs
    if spec.position_offset is not None or spec.mla is not None or (turning == half and not spec.pairs_side_by_side):
        return None
    second = 1 if spec.pairs_side_by_side else turning
    firsts = [pair * (2 if spec.pairs_side_by_side else 1) for pair in range(turning)]
    still = range(2 * turning, spec.head_dim)
    rest = half - turning
    return (*firsts, *still[:rest], *(first + second for first in firsts), *still[rest:])


# Far beyond any model, and small enough that no product of two, times the tokens of an iteration, leaves 64 bits.
MANY_LAYERS = 10_000  # or experts; a damaged count must not become a loop without end
_WIDE, _LONG = 1 << 24, (1 << 31) - 1
_RANGES = {
    "vocab_size": (1, _LONG),
    "hidden_size": (1, _WIDE),
    "num_layers": (1, MANY_LAYERS),
    "num_heads": (1, 1 << 16),
    "num_kv_heads": (1, 1 << 16),
    "head_dim": (1, 1 << 12),
    "intermediate_size": (1, _WIDE),
    "context_length": (1, _LONG),
    "position_offset": (0, 1 << 16),
    "norm_eps": (0.0, 1.0),
    "embed_scale": (-1e6, 1e6),
    "attention_scale": (-1e6, 1e6),
    "attention_softcap": (0.0, 1e6),
    "final_softcap": (0.0, 1e6),
    "logit_scale": (-1e6, 1e6),
}
_MOE_RANGES = {
    "num_experts": (1, MANY_LAYERS),
    "experts_per_token": (1, MANY_LAYERS),
    "intermediate_size": (1, _WIDE),
    "alpha": (1e-6, 1e6),
    "limit": (0.0, 1e6),
    "shared_size": (0, _WIDE),
    "scale": (-1e6, 1e6),
    "groups": (1, MANY_LAYERS),
    "groups_per_token": (1, MANY_LAYERS),
}
_MLA_RANGES = {
    "rank": (1, 1 << 12),
    "rope": (2, 1 << 12),
    "nope": (1, 1 << 12),
    "value": (1, 1 << 12),
    "norm_eps": (0.0, 1.0),
}
_ROPE_RANGES = {
    "theta": (1e-6, 1e15),
    "factor": (1e-6, 1e6),
    "original_context": (0, _LONG),
    "low_freq_factor": (-1e6, 1e6),
    "high_freq_factor": (-1e6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "attention_factor": (-1e6, 1e6),
}


def spec_problem(spec: ModelSpec) -> str | None:
    """What of it no engine could compute with, whatever the weights: key, expectation and value. None = nothing."""
    found = _outside(spec, _RANGES, "")
    for name, rope in (("rope", spec.rope), ("rope_local", spec.rope_local)):
        found = found or (None if rope is None else _rope_problem(rope, name))
        found = found or (None if rope is None else _turning_problem(rope, name, spec.turning_dim))
    if found is None and spec.moe is not None:
        found = _moe_problem(spec.moe)
    if found is None and spec.mla is not None:
        found = _mla_problem(spec, spec.mla)
    return found or _shape_problem(spec)


def _shape_problem(spec: ModelSpec) -> str | None:
    if spec.num_heads % spec.num_kv_heads:
        return f"num_kv_heads: expected a divisor of num_heads = {spec.num_heads}, got {spec.num_kv_heads}"
    if spec.position_offset is None and spec.head_dim % 2:
        return f"head_dim: expected an even number, because rotary positions need pairs, got {spec.head_dim}"
    if spec.windows and len(spec.windows) != spec.num_layers:
        return f"windows: expected one for each of {spec.num_layers} layers, got {len(spec.windows)}"
    if not all(0 <= window <= _LONG for window in spec.windows):
        return f"windows: expected whole numbers from 0 to {_LONG}, got {min(spec.windows)} to {max(spec.windows)}"
    for key in ("dense_layers", "rope_local_layers"):
        layers = getattr(spec, key)
        if not all(0 <= layer < spec.num_layers for layer in layers):
            return f"{key}: expected numbers of the {spec.num_layers} layers, got {list(layers)[:8]}"
    if not spec.pre_norm and (spec.parallel_block or not spec.sandwich_norm):
        return "pre_norm: expected norms after attention and after the MLP where there are none before"
    return None


def _moe_problem(moe: MoeSpec) -> str | None:
    found = _outside(moe, _MOE_RANGES, "moe.")
    if found is None and moe.experts_per_token > moe.num_experts:
        return f"moe.experts_per_token: expected at most {moe.num_experts}, got {moe.experts_per_token}"
    if found is None and moe.num_experts % moe.groups:
        return f"moe.groups: expected a divisor of num_experts = {moe.num_experts}, got {moe.groups}"
    if found is None and moe.experts_per_token > moe.num_experts // moe.groups * moe.groups_per_token:
        return f"moe.groups_per_token: expected groups of {moe.experts_per_token} experts, got {moe.groups_per_token}"
    return found


def _mla_problem(spec: ModelSpec, mla: MlaSpec) -> str | None:
    found = _outside(mla, _MLA_RANGES, "mla.")
    if found is None and (spec.num_kv_heads, spec.head_dim) != (1, mla.rank + mla.rope):
        return f"mla.rank: expected one key head of head_dim = {spec.head_dim} dimensions, got {mla.rank} + {mla.rope}"
    if found is None and mla.rope % 2:
        return f"mla.rope: expected an even number, because rotary positions need pairs, got {mla.rope}"
    if found is None and (spec.qk_norm or spec.qkv_bias or spec.attention_sinks or spec.rope_local is not None):
        return "mla: expected neither biases nor norms of q and k, nor sinks, nor a second rotation"
    return found


def _rope_problem(rope: RopeSpec, name: str) -> str | None:
    found = _outside(rope, _ROPE_RANGES, f"{name}.")
    if found is None and rope.kind in ("llama3", "yarn") and rope.original_context == 0:
        return f"{name}.original_context: expected a number above 0 with {rope.kind}, got 0"
    if found is None and rope.kind == "llama3" and rope.low_freq_factor == rope.high_freq_factor:
        return f"{name}.high_freq_factor: expected another number than low_freq_factor = {rope.low_freq_factor}"
    if found is None and rope.kind == "yarn" and rope.theta <= 1.0:
        return f"{name}.theta: expected a number above 1 with yarn, got {rope.theta}"
    return found


def _turning_problem(rope: RopeSpec, name: str, head_dim: int) -> str | None:
    if rope.rotary_dims % 2 or not 0 <= rope.rotary_dims <= head_dim:
        return f"{name}.rotary_dims: expected an even number up to head_dim = {head_dim}, got {rope.rotary_dims}"
    pairs = (rope.rotary_dims or head_dim) // 2
    if rope.kind == "longrope" and len(rope.factors) != pairs:
        return f"{name}.factors: expected one for each of {pairs} pairs, got {len(rope.factors)}"
    if not all(math.isfinite(factor) and factor > 0 for factor in rope.factors):
        return f"{name}.factors: expected numbers above 0"
    return None


def _outside(
    record: ModelSpec | MoeSpec | MlaSpec | RopeSpec, ranges: Mapping[str, tuple[float, float]], prefix: str
) -> str | None:
    for key, (low, high) in ranges.items():
        value = getattr(record, key)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            return f"{prefix}{key}: expected {low:g} to {high:g}, got {value!r}"
    return None


def _moe_tensors(moe: MoeSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    experts, inner = moe.num_experts, moe.intermediate_size
    yield from _linear("router", experts, hidden, moe.biases)
    yield "experts.gate_up.weight", (experts, 2 * inner, hidden)
    if moe.biases:
        yield "experts.gate_up.bias", (experts * 2 * inner,)
    yield "experts.down.weight", (experts, hidden, inner)
    if moe.biases:
        yield "experts.down.bias", (experts * hidden,)
    if moe.shared_size:
        yield from _linear("shared.gate_up", 2 * moe.shared_size, hidden, False)
        yield from _linear("shared.down", hidden, moe.shared_size, False)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def activation_dtype(dtype: str) -> str:
    """Of what is multiplied with the weights, and of keys and values."""
    return "bf16" if dtype == FP8 else dtype


def is_fp8_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor becomes 8-bit floats where a model is computed in them."""
    if not name.startswith("layers.") or len(shape) < 2 or "router" in name:
        return False
    return shape[-1] % FP8_STEP == 0 and shape[-2] % FP8_STEP == 0


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
