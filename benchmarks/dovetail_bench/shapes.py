"""Shapes of models that people serve, for random ones of the same cost. No weights, no torch."""

from __future__ import annotations

from dovetail.modelspec import ModelSpec, RopeSpec

_QWEN, _LLAMA = RopeSpec(theta=1e6), RopeSpec(theta=5e5)
SHAPES = {
    # SmolLM2-135M
    "135M": ModelSpec("llama", 49_152, 576, 30, 9, 3, 64, 1536, 8192, tied_embeddings=True, rope=RopeSpec(theta=1e5)),
    # Qwen2.5-0.5B
    "0.5B": ModelSpec(
        "qwen2", 151_936, 896, 24, 14, 2, 64, 4864, 32_768, tied_embeddings=True, qkv_bias=True, rope=_QWEN
    ),
    # Llama 3.2 1B, its positions not stretched
    "1B": ModelSpec("llama", 128_256, 2048, 16, 32, 8, 64, 8192, 131_072, tied_embeddings=True, rope=_LLAMA),
    # Llama 3.1 8B, likewise
    "8B": ModelSpec("llama", 128_256, 4096, 32, 32, 8, 128, 14_336, 131_072, rope=_LLAMA),
}
# To try a bench itself.
TINY = ModelSpec("llama", 512, 64, 2, 4, 2, 16, 96, 2048, tied_embeddings=True)
