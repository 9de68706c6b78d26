"""A machine's ceiling as figures, and the shortest time that an iteration can take under it. Arithmetic only."""

from __future__ import annotations

import msgspec

from dovetail.modelspec import ModelSpec


class Roofline(msgspec.Struct, frozen=True):
    read_bytes_per_s: float
    flops_per_s: float  # of a large product in the compute type
    # Of one of 8-bit codes. Below flops_per_s: no loop was found that uses the instructions for them.
    int8_ops_per_s: float = 0.0
    read_by: str = ""  # the loop that was fastest
    product_by: str = ""


def least_seconds(
    spec: ModelSpec, weight_bytes: int, rows: int, logit_rows: int, best: Roofline, bits: int = 16
) -> float | None:
    """The shortest time for an iteration over `rows` tokens of which `logit_rows` are sampled: every weight is read
    once and multiplied with every row. Attention and the cache are left out, small as they are at these lengths.

    None where 8-bit products would be the bound and nothing measured is a ceiling for them."""
    head = spec.vocab_size * spec.hidden_size
    body = spec.num_parameters() - head * (1 if spec.tied_embeddings else 2)
    flops = 2 * (body * rows + head * logit_rows)
    reading_s, product_s = weight_bytes / best.read_bytes_per_s, flops / best.flops_per_s
    if bits > 8:
        return max(reading_s, product_s)
    if best.int8_ops_per_s > best.flops_per_s:
        return max(reading_s, flops / best.int8_ops_per_s)
    return reading_s if reading_s > product_s else None
