"""What a model takes whose matrices are 8-bit floats."""

from __future__ import annotations

from dovetail.modelspec import FP8, is_fp8_matrix
from dovetail_bench.shapes import SHAPES


def test_layers_take_half_and_the_rest_what_it_takes_in_bf16() -> None:
    spec = SHAPES["8B"]
    embeddings = 2 * spec.vocab_size * spec.hidden_size * 2
    body = spec.weight_bytes("bf16") - embeddings
    assert 0.5 < (spec.weight_bytes(FP8) - embeddings) / body < 0.51
    assert spec.kv_bytes_per_token(FP8) == spec.kv_bytes_per_token("bf16")


def test_only_matrices_of_layers_that_matrix_units_take_are_rounded() -> None:
    assert is_fp8_matrix("layers.3.qkv.weight", (6144, 4096))
    assert is_fp8_matrix("layers.3.experts.down.weight", (8, 4096, 1024))
    for name, shape in (
        ("embed.weight", (32000, 4096)),
        ("lm_head.weight", (32000, 4096)),
        ("layers.3.router.weight", (16, 4096)),
        ("layers.3.qkv.bias", (6144,)),
        ("layers.3.out.weight", (4096, 72)),
        ("layers.3.out.weight", (60, 4096)),
    ):
        assert not is_fp8_matrix(name, shape)
