"""Models as chains of layers, by what each costs: arithmetic, weights, what it hands on, how rows may be shared out.

Counted from shapes, without torch. `networks` has the same chains as modules, and a test holds the two together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.errors import ConfigError
from dovetail.modelspec import ModelSpec

FLOAT = 4  # bytes
IMAGE = 224
CLASSES = 1000
BLOCKS = (3, 4, 6, 3)  # of a ResNet-50's four groups
EXPANSION = 4


@dataclass(frozen=True)
class Layer:
    """One link of a chain, for one request."""

    name: str
    flops: float
    weight_bytes: int
    in_bytes: int
    out_bytes: int
    rows: int = 1  # of its output, if workers may share them
    stride: int = 1  # input rows per output row
    halo: int | None = None  # input rows needed beyond a share's own, each side; None = rows cannot be shared


@dataclass(frozen=True)
class Chain:
    name: str
    layers: tuple[Layer, ...]
    input_shape: tuple[int, ...] = (3, IMAGE, IMAGE)  # of one request
    file: str = ""  # that the layers are from (ONNX)
    digest: str = ""  # of that file
    any_batch: bool = True  # else one request at a time

    @property
    def flops(self) -> float:
        return sum(layer.flops for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.layers)


@dataclass(frozen=True)
class RowShare:
    """What one worker of a stage does: its output rows of each layer, and the input rows that it is sent.

    input   |----[ halo | own rows | halo ]-----|     a layer's share, with the rows that its windows reach
    output  |-----------[   own   ]-------------|
    """

    inputs: tuple[int, int]
    outputs: tuple[tuple[int, int], ...]  # of each layer, the halo for the next one included


def shares(layers: Sequence[Layer], workers: int) -> list[RowShare]:
    """The last layer's rows in equal parts, and backwards what each part needs."""
    rows = layers[-1].rows
    borders = [rows * worker // workers for worker in range(workers + 1)]
    return [_share(layers, start, end) for start, end in itertools.pairwise(borders)]


def _share(layers: Sequence[Layer], start: int, end: int) -> RowShare:
    outputs = []
    for layer in reversed(layers):
        outputs.append((start, end))
        start, end = needed_rows(layer, start, end)
    return RowShare((start, end), tuple(reversed(outputs)))


def needed_rows(layer: Layer, start: int, end: int) -> tuple[int, int]:
    """Input rows for output rows [start, end): beginning at a multiple of the stride, so that rows stay in step."""
    if layer.halo is None:
        return 0, layer.rows * layer.stride
    low = max(start * layer.stride - layer.halo, 0) // layer.stride * layer.stride
    return low, min(end * layer.stride + layer.halo, layer.rows * layer.stride)


# Wide ResNet-50: every layer `width` times as wide as ResNet-50's


def wide_resnet50(width: int) -> Chain:
    size, channels = IMAGE // 4, 64 * width
    layers = [_stem(channels, size)]
    for group, blocks in enumerate(BLOCKS):
        inner = 64 * width * 2**group
        for block in range(blocks):
            stride = 2 if group and not block else 1
            size //= stride
            layers.append(_bottleneck(f"group{group}.{block}", channels, inner, size, stride))
            channels = inner * EXPANSION
    weights = (channels * CLASSES + CLASSES) * FLOAT
    in_bytes = channels * size * size * FLOAT
    layers.append(Layer("head", 2.0 * channels * CLASSES, weights, in_bytes, CLASSES * FLOAT))
    return Chain(f"wrn50-{width}", tuple(layers))


def _stem(channels: int, size: int) -> Layer:
    """7×7 by 2 and a 3×3 maximum by 2."""
    flops = 2.0 * 7 * 7 * 3 * channels * (2 * size) ** 2
    weights = (7 * 7 * 3 * channels + 2 * channels) * FLOAT
    in_bytes = 3 * (4 * size) ** 2 * FLOAT
    return Layer("stem", flops, weights, in_bytes, channels * size * size * FLOAT, size, 4, 5)


def _bottleneck(name: str, channels: int, inner: int, size: int, stride: int) -> Layer:
    """1×1, 3×3 by `stride`, 1×1, and a 1×1 by `stride` beside them where the shape changes."""
    out, wide = inner * EXPANSION, (size * stride) ** 2
    products = channels * inner * wide + (9 * inner * inner + inner * out) * size * size
    weights = channels * inner + 9 * inner * inner + inner * out + 2 * (2 * inner + out)
    if stride != 1 or channels != out:
        products += channels * out * size * size
        weights += channels * out + 2 * out
    in_bytes, out_bytes = channels * wide * FLOAT, out * size * size * FLOAT
    return Layer(name, 2.0 * products, weights * FLOAT, in_bytes, out_bytes, size, stride, 1)


# Decoder-only language models: one request is one token of a sequence, its keys and values stay with the stage


def decoder(spec: ModelSpec, weight_bytes: float = FLOAT) -> Chain:
    """Embedding, layers, head; `weight_bytes` of one parameter."""
    row = spec.hidden_size * FLOAT
    counts = dict.fromkeys(range(-1, spec.num_layers + 1), 0)
    for name, shape in spec.tensors():
        size = 1
        for length in shape:
            size *= length
        counts[_place(name, spec)] += size
    if spec.tied_embeddings:  # a stage of its own needs its own copy
        counts[spec.num_layers] += spec.vocab_size * spec.hidden_size
    layers = [Layer("embed", 0.0, int(counts[-1] * weight_bytes), 8, row)]
    for index in range(spec.num_layers):
        layers.append(Layer(f"layer{index}", 2.0 * counts[index], int(counts[index] * weight_bytes), row, row))
    head = counts[spec.num_layers]
    layers.append(Layer("head", 2.0 * head, int(head * weight_bytes), row, 8))
    return Chain(spec.family, tuple(layers))


def _place(name: str, spec: ModelSpec) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1])
    return -1 if name.startswith(("embed.", "positions.")) else spec.num_layers


def even_cuts(costs: Sequence[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Contiguous stages of which the costliest is as cheap as possible: for chains whose rows cannot be shared out."""
    if not 1 <= stages <= len(costs):
        raise ConfigError(f"{len(costs)} layers cannot be cut into {stages} stages")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[tuple[float, tuple[int, ...]]] = [(total, (end,)) for end, total in enumerate(sums)]
    for count in range(2, stages + 1):
        best = [
            min((max(best[cut][0], sums[end] - sums[cut]), (*best[cut][1], end)) for cut in range(count - 1, end))
            if end >= count
            else (float("inf"), ())
            for end in range(len(sums))
        ]
    ends = best[-1][1]
    return tuple(zip((0, *ends[:-1]), ends, strict=True))
