"""Some layers of a decoder-only model in a process of their own. Its keys and values stay here; hidden states pass.

Computes with the engine's own modules on the torch level, in the order in which one process does, so that the text of
several stages is the text of one.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from dovetail.engine.batch import Batch, build_batch
from dovetail.engine.grammar import Grammars
from dovetail.engine.kv_cache import KVCache
from dovetail.engine.model import Angles, DecoderLayer, Norm, finish_logits
from dovetail.engine.rope import Rope
from dovetail.engine.sampler import sample
from dovetail.engine.weights import Linear, Weights, from_read_only_memory
from dovetail.modelspec import ModelSpec
from dovetail.native import TORCH
from dovetail.plan.frames import Answer, Call, Spec
from dovetail.sched.turn import Turn
from dovetail.store import open_checkpoint

BLOCK = 16
DTYPE = torch.float32


class DecoderStage:
    """Layers [first, end) in the chain's numbers: 0 is the embedding, the last is the head."""

    def __init__(self, spec: Spec) -> None:
        checkpoint = open_checkpoint(Path(spec.model))
        model = checkpoint.spec
        self._model = model
        self._is_first = spec.first == 0
        self._is_last = spec.end == model.num_layers + 2
        indices = range(max(spec.first - 1, 0), min(spec.end - 1, model.num_layers))
        weights = Weights(checkpoint, DTYPE, "mapped" if checkpoint.in_place else "resident", TORCH)
        with from_read_only_memory():
            self._build(model, weights, indices)
        blocks = -(-spec.kv_tokens // BLOCK) or 1
        own = msgspec.structs.replace(model, num_layers=max(len(indices), 1))
        self._cache = KVCache(own, DTYPE, BLOCK, blocks)
        self._cache.resize(blocks)
        self._grammars = Grammars(Path(), model.vocab_size, ())

    def _build(self, model: ModelSpec, weights: Weights, indices: range) -> None:
        self._first_layer = indices.start
        self._layers = [DecoderLayer(model, weights, index, TORCH) for index in indices]
        ties = self._is_last and model.tied_embeddings
        self._embed = weights.tensor("embed.weight") if self._is_first or ties else None
        learned = self._is_first and model.position_offset is not None
        self._positions = weights.tensor("positions.weight") if learned else None
        self._final_norm = Norm(model, weights, "final_norm", TORCH) if self._is_last else None
        self._head: Linear | None = None
        if self._is_last:
            self._head = Linear([self._embed], None, TORCH) if ties else weights.linear("lm_head")  # type: ignore[list-item]
        uses_rope = model.position_offset is None
        self._rope = Rope(model.rope, model.turning_dim, DTYPE) if uses_rope else None
        local = model.rope_local if uses_rope else None
        self._rope_local = Rope(local, model.head_dim, DTYPE) if local is not None else None

    def run(self, call: Call, payload: bytearray) -> tuple[Answer, memoryview]:
        started = time.perf_counter()
        with torch.inference_mode():
            batch = build_batch(msgspec.convert(call.turn, Turn), BLOCK)
            hidden = self._embedded(batch) if self._is_first else _tensor(payload, call.shape)
            hidden = self._through(batch, hidden)
            tokens = self._tokens(batch, hidden) if self._is_last else ()
        seconds = time.perf_counter() - started
        if self._is_last:
            return Answer(seconds, tokens=tokens), memoryview(b"")
        return Answer(seconds, tuple(hidden.shape)), hidden.numpy().data.cast("B")

    def _embedded(self, batch: Batch) -> Tensor:
        model = self._model
        assert self._embed is not None
        hidden = torch.nn.functional.embedding(batch.tokens, self._embed)
        if model.embed_scale != 1.0:
            hidden = hidden * torch.tensor(model.embed_scale, dtype=DTYPE)
        if self._positions is not None and model.position_offset is not None:
            places = batch.positions + model.position_offset
            hidden = hidden + torch.nn.functional.embedding(places, self._positions)
        return hidden

    def _through(self, batch: Batch, hidden: Tensor) -> Tensor:
        model = self._model
        scale = model.attention_scale if model.attention_scale is not None else model.head_dim**-0.5
        angles = Angles(
            self._rope.angles(batch.positions) if self._rope else None,
            self._rope_local.angles(batch.positions) if self._rope_local else None,
        )
        for layer in self._layers:
            q, k, v = layer.qkv(hidden, angles.of(layer))
            blocks = self._cache.layer(layer.index - self._first_layer)
            TORCH.write_kv(blocks, k, v, batch.slot_blocks, batch.slot_offsets)
            cap, sinks = model.attention_softcap, layer.sinks
            attended = TORCH.attend(q, blocks, batch.groups, scale, layer.window, cap, sinks)
            hidden = layer.after_attention(attended, hidden)
        return hidden.contiguous()

    def _tokens(self, batch: Batch, hidden: Tensor) -> tuple[int, ...]:
        """In the order of the turn's rows that sample."""
        if not batch.sampled:
            return ()
        assert self._head is not None
        assert self._final_norm is not None
        logits = finish_logits(self._model, self._head(self._final_norm(hidden[batch.sampled_at])))
        outcomes = sample(logits, batch.sampled, self._grammars)
        chosen = {outcome.sequence: outcome.token for outcome in outcomes}
        return tuple(chosen[sequence] for sequence in sorted(chosen))


def _tensor(payload: bytearray, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(payload, dtype=DTYPE).view(shape)


def turn_of(turn: Turn) -> Any:
    """As a call carries it."""
    return msgspec.to_builtins(turn)
