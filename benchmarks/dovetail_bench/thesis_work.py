"""What the workers of a stage compute and pass on, where they share the rows of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.plan.chains import Layer, shares


def can_share(layers: Sequence[Layer], workers: int) -> bool:
    return workers == 1 or (layers[-1].rows >= workers and all(layer.halo is not None for layer in layers))


def slowest_flops(layers: Sequence[Layer], workers: int) -> float:
    """Arithmetic of the worker with the most, rows that are computed twice included."""
    if workers == 1:
        return sum(layer.flops for layer in layers)
    return max(
        sum(layer.flops * (end - start) / layer.rows for layer, (start, end) in zip(layers, share.outputs, strict=True))
        for share in shares(layers, workers)
    )


def passed_bytes(layers: Sequence[Layer], workers: int) -> float:
    """What the master sends to a stage's workers and gets back, for one request."""
    first = layers[0]
    if workers == 1:
        return first.in_bytes + layers[-1].out_bytes
    rows = sum(share.inputs[1] - share.inputs[0] for share in shares(layers, workers))
    return first.in_bytes * rows / (first.rows * first.stride) + layers[-1].out_bytes
