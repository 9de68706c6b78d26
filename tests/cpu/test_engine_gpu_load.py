"""What of loading onto a GPU needs none."""

from __future__ import annotations

from dovetail.engine.gpu_load import layer_ends


def test_layers_end_where_their_last_tensor_does() -> None:
    tensors = [("embed.weight", 0, 10), ("layers.0.qkv.weight", 10, 5), ("layers.0.down.weight", 15, 5)]
    tensors += [("layers.1.qkv.weight", 24, 6), ("final_norm.weight", 30, 2)]
    assert layer_ends(tensors, 32) == [20, 30, 32]
