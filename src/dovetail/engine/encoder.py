"""Encoders (BERT, XLM-RoBERTa, ModernBERT): texts in, one vector each out, or a score of a pair of texts. No keys and
values are kept.

A text is read whole, because every token sees all others; where it comes in chunks, with the last of them. Products are
over all texts of an iteration at once, attention is within each. In torch's own operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.engine.dtypes import TORCH_DTYPES, compute_dtype
from dovetail.engine.executor import ExecutorConfig, OnCallersCores, max_blocks
from dovetail.engine.model import Mlp, Norm
from dovetail.engine.native_model import NativeCall
from dovetail.engine.rope import Rope
from dovetail.engine.weights import Weights, from_read_only_memory
from dovetail.modelspec import ModelSpec, ScoreSpec
from dovetail.native import TORCH
from dovetail.node.ports import Checkpoint
from dovetail.sched.turn import Outcome, RowOutcome, Turn, TurnRow

Angles = tuple[Tensor, Tensor] | None


class EncoderLayer:
    def __init__(self, spec: ModelSpec, weights: Weights, index: int) -> None:
        assert spec.encoder is not None
        prefix = f"layers.{index}"
        self.is_local = spec.has_local_rope(index)
        self._spec = spec
        self._norm_after = spec.encoder.norm_after
        self._window = spec.window(index)
        has_norm = weights.has(f"{prefix}.attn_norm.weight")
        self._attn_norm = Norm(spec, weights, f"{prefix}.attn_norm", TORCH) if has_norm else None
        self._qkv = weights.linear(f"{prefix}.qkv")
        self._out = weights.linear(f"{prefix}.out")
        self._mlp_norm = Norm(spec, weights, f"{prefix}.mlp_norm", TORCH)
        self._mlp = Mlp(spec, weights, prefix, TORCH)

    def __call__(self, hidden: Tensor, lengths: Sequence[int], angles: Angles) -> Tensor:
        """hidden [tokens, hidden] of all texts, one after the other"""
        if self._norm_after:
            assert self._attn_norm is not None
            hidden = self._attn_norm(hidden + self._attended(hidden, lengths, angles))
            return self._mlp_norm(hidden + self._mlp(hidden))
        normed = hidden if self._attn_norm is None else self._attn_norm(hidden)
        hidden = hidden + self._attended(normed, lengths, angles)
        return hidden + self._mlp(self._mlp_norm(hidden))

    def _attended(self, x: Tensor, lengths: Sequence[int], angles: Angles) -> Tensor:
        spec = self._spec
        q, k, v = self._qkv(x).view(len(x), 3, spec.num_heads, spec.head_dim).unbind(1)
        if angles is not None:
            q, k = TORCH.rotate(q, *angles), TORCH.rotate(k, *angles)
        texts = zip(*(part.split(list(lengths)) for part in (q, k, v)), strict=True)
        found = [self._within(*(part.transpose(0, 1) for part in text)) for text in texts]  # [heads, tokens, d]
        return self._out(torch.cat([each.transpose(0, 1).flatten(1) for each in found]))

    def _within(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one text's tokens to each other, those of a layer with a window to their neighbours only."""
        mask = None
        if 0 < self._window < q.shape[1]:
            places = torch.arange(q.shape[1])
            mask = (places[:, None] - places).abs() <= self._window
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]


class ScoreHead:
    """One number for a pair of texts."""

    def __init__(self, spec: ModelSpec, score: ScoreSpec, weights: Weights) -> None:
        self._score = score
        self._dense, self._out = weights.linear("score.dense"), weights.linear("score.out")
        self._norm = Norm(spec, weights, "score.norm", TORCH) if score.norm else None

    def __call__(self, states: Tensor) -> Tensor:
        pooled = states.mean(dim=0) if self._score.pooling == "mean" else states[0]
        inner = self._dense(pooled[None])
        kind = self._score.activation
        inner = inner.tanh() if kind == "tanh" else TORCH.activate(inner, kind)
        return self._out(inner if self._norm is None else self._norm(inner))[0]


class EncoderModel:
    def __init__(self, spec: ModelSpec, weights: Weights, dtype: torch.dtype) -> None:
        assert spec.encoder is not None
        self._spec = spec
        self._embed = weights.tensor("embed.weight")
        self._positions = weights.tensor("positions.weight") if weights.has("positions.weight") else None
        self._types = weights.tensor("token_types.weight") if weights.has("token_types.weight") else None
        self._embed_norm = Norm(spec, weights, "embed_norm", TORCH)
        self._layers = [EncoderLayer(spec, weights, index) for index in range(spec.num_layers)]
        self._final_norm = Norm(spec, weights, "final_norm", TORCH) if weights.has("final_norm.weight") else None
        score = spec.encoder.score
        self.score = ScoreHead(spec, score, weights) if score is not None else None
        self._separator = spec.encoder.separator
        turns = spec.position_offset is None
        self._rope = Rope(spec.rope, spec.head_dim, dtype) if turns else None
        self._rope_local = Rope(spec.rope_local, spec.head_dim, dtype) if turns and spec.rope_local else None

    def states(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """[tokens, hidden] of each text."""
        lengths = [len(text) for text in texts]
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden = self._embedded([torch.tensor(text) for text in texts], positions)
        everywhere = self._rope.angles(positions) if self._rope else None
        local = self._rope_local.angles(positions) if self._rope_local else None
        for layer in self._layers:
            hidden = layer(hidden, lengths, local if layer.is_local else everywhere)
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        return list(hidden.split(lengths))

    def _embedded(self, texts: list[Tensor], positions: Tensor) -> Tensor:
        hidden = F.embedding(torch.cat(texts), self._embed)
        if self._types is not None:
            hidden = hidden + F.embedding(torch.cat([self._types_of(text) for text in texts]), self._types)
        if self._positions is not None and self._spec.position_offset is not None:
            hidden = hidden + F.embedding(positions + self._spec.position_offset, self._positions)
        return self._embed_norm(hidden)

    def _types_of(self, text: Tensor) -> Tensor:
        """1 for what lies behind the first separator: the second text of a pair."""
        if self._separator is None:
            return torch.zeros_like(text)
        ends = (text == self._separator).long()
        return (ends.cumsum(0) - ends).clamp(max=1)


class EncoderExecutor(OnCallersCores):
    """Implements `node.ports.Executor`. Blocks are counted, so that a node's ledger knows of the memory that texts take
    while they are read; there is nothing in them."""

    def __init__(self, checkpoint: Checkpoint, config: ExecutorConfig) -> None:
        super().__init__()
        spec = checkpoint.spec
        assert spec.encoder is not None
        self.spec = spec
        self.level = TORCH.level
        self.dtype = compute_dtype(config.dtype, "f32")
        dtype = TORCH_DTYPES[self.dtype]
        in_place = checkpoint.in_place if config.weights == "auto" else config.weights == "mapped"
        weights = Weights(checkpoint, dtype, "mapped" if in_place else "resident", TORCH)
        with from_read_only_memory():
            self._model: EncoderModel | None = EncoderModel(spec, weights, dtype)
        self.weight_bytes, self.copied_bytes = weights.num_bytes, weights.copied_bytes
        self._block_bytes = spec.kv_bytes_per_token(self.dtype) * config.block_size
        self.max_blocks = max_blocks(config, self._block_bytes)
        self.block_size = config.block_size
        self._num_blocks = 0

    @property
    def kv_committed_bytes(self) -> int:
        return self._num_blocks * self._block_bytes

    def _compute(self, turn: Turn) -> Outcome:
        assert self._model is not None, "the executor is closed"
        whole = [row for row in turn.rows if row.samples]
        if not whole:
            return Outcome(())
        with torch.inference_mode():
            states = self._model.states([row.tokens for row in whole])
            return Outcome(tuple(map(self._outcome, whole, states)))

    def _outcome(self, row: TurnRow, states: Tensor) -> RowOutcome:
        states = states.float()
        kind = row.sampling.pooling
        if kind is None:
            return RowOutcome(row.sequence, token=0, error="an encoder makes vectors, no text", unprocessable=True)
        if kind == "score":
            assert self._model is not None
            assert self._model.score is not None, "the gateway asks for scores of models that have them"
            pooled = self._model.score(states.to(TORCH_DTYPES[self.dtype])).float()
        else:
            pooled = states.mean(dim=0) if kind == "mean" else states[0 if kind == "cls" else -1]
        if not bool(pooled.isfinite().all()):
            return RowOutcome(row.sequence, token=0, error="the model computed a value that is not a number")
        return RowOutcome(row.sequence, token=0, embedding=pooled.contiguous().numpy().tobytes())

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]] = ()) -> None:
        assert num_blocks <= self.max_blocks
        self._num_blocks = num_blocks

    def wrap_native(self, wrap: Callable[[NativeCall], NativeCall]) -> bool:
        return False

    def forget(self, sequence: int) -> None:
        """Nothing is kept of one."""

    def close(self) -> None:
        self._model = None
