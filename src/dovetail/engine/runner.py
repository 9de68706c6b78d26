"""One iteration on the torch level: walks a batch through the model, layer by layer, module by module."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dovetail.engine.batch import Batch, build_batch
from dovetail.engine.kv_cache import KVCache
from dovetail.engine.layer_source import LayerWalk
from dovetail.engine.model import DecoderModel
from dovetail.engine.prompt_reader import PIECE_TOKENS
from dovetail.native import Ops
from dovetail.sched.turn import Turn, TurnRow


class TorchModel:
    def __init__(self, model: DecoderModel, ops: Ops) -> None:
        self._model = model
        self._ops = ops
        self.walk: LayerWalk | None = None  # where layers are read with every iteration

    def forward(self, turn: Turn, cache: KVCache) -> tuple[list[TurnRow], Tensor, None]:
        """Computes keys and values of every token of the turn; returns the rows that sample and their logits, at whose
        values it has not looked."""
        batch, hidden = self._walk(turn, cache)
        return batch.sampled, self._model.logits(hidden[batch.sampled_at]), None

    def states(self, row: TurnRow, cache: KVCache) -> Tensor:
        return self._model.states(self._walk(Turn((row,)), cache)[1])

    def all_logits(self, row: TurnRow, cache: KVCache) -> Iterator[Tensor]:
        _, hidden = self._walk(Turn((row,)), cache)
        for piece in hidden.split(PIECE_TOKENS):
            yield self._model.logits(piece)

    def _walk(self, turn: Turn, cache: KVCache) -> tuple[Batch, Tensor]:
        """The residual stream of every token behind the last layer."""
        model, ops, spec = self._model, self._ops, self._model.spec
        batch = build_batch(turn, cache.block_size)
        scale = spec.attention_scale if spec.attention_scale is not None else spec.head_dim**-0.5
        hidden = model.embed(batch.tokens, batch.positions)
        angles = model.angles(batch.positions)
        layers = iter(model.layers)

        def step() -> None:
            nonlocal hidden
            layer = next(layers)
            q, k, v = layer.qkv(hidden, angles.of(layer))
            blocks = cache.layer(layer.index)
            ops.write_kv(blocks, k, v, batch.slot_blocks, batch.slot_offsets)
            attended = ops.attend(q, blocks, batch.groups, scale, layer.window, spec.attention_softcap, layer.sinks)
            hidden = layer.after_attention(attended, hidden)

        if self.walk is not None:
            self.walk.run(step, None)
        else:
            for _ in model.layers:
                step()
        return batch, hidden
