"""One iteration: walks a batch through the model, layer by layer, module by module."""

from __future__ import annotations

from torch import Tensor

from dovetail.engine.batch import Batch
from dovetail.engine.kv_cache import KVCache
from dovetail.engine.model import DecoderModel
from dovetail.native import Ops


def forward(model: DecoderModel, batch: Batch, cache: KVCache, ops: Ops) -> Tensor:
    """Computes keys and values of every token of the batch; returns the logits of the rows that sample."""
    spec = model.spec
    scale = spec.attention_scale if spec.attention_scale is not None else spec.head_dim**-0.5
    hidden = model.embed(batch.tokens, batch.positions)
    angles = model.angles(batch.positions)
    for layer in model.layers:
        q, k, v = layer.qkv(hidden, angles.of(layer))
        blocks = cache.layer(layer.index)
        ops.write_kv(blocks, k, v, batch.slot_blocks, batch.slot_offsets)
        attended = ops.attend(q, blocks, batch.groups, scale, layer.window, spec.attention_softcap)
        hidden = layer.proj(attended, hidden)
        hidden = layer.mlp(hidden)
    return model.logits(hidden[batch.sampled_at])
