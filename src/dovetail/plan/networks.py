"""Wide ResNet-50 as torch modules, layer by layer as `chains` counts them, whole or on shares of an image's rows.

Weights are a fixed pattern: what is planned is time and memory, and every process must have the same ones.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from dovetail.plan.chains import BLOCKS, CLASSES, EXPANSION, Chain, RowShare, shares

_PATTERN = 65_537  # a prime, so that rows of a matrix differ


class Stem(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(torch.relu(self.norm(self.conv(x))))
        return pooled


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        out = inner * EXPANSION
        self.reduce = nn.Conv2d(channels, inner, 1, bias=False)
        self.reduce_norm = nn.BatchNorm2d(inner)
        self.conv = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.conv_norm = nn.BatchNorm2d(inner)
        self.expand = nn.Conv2d(inner, out, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(out)
        changes = stride != 1 or channels != out
        self.shortcut = nn.Conv2d(channels, out, 1, stride=stride, bias=False) if changes else None
        self.shortcut_norm = nn.BatchNorm2d(out) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.reduce_norm(self.reduce(x)))
        inner = torch.relu(self.conv_norm(self.conv(inner)))
        inner = self.expand_norm(self.expand(inner))
        kept = x if self.shortcut is None or self.shortcut_norm is None else self.shortcut_norm(self.shortcut(x))
        return torch.relu(inner + kept)


class Head(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x.mean(dim=(2, 3)))
        return scores


def build_layers(width: int, first: int, end: int, device: str = "cpu") -> list[nn.Module]:
    """Layers [first, end) of the chain, with the weights that they have in the whole of it."""
    layers = []
    for index in range(first, end):
        with torch.device("meta"):
            layer = _layer(width, index)
        layer = layer.to_empty(device=device).eval()
        _fill(layer, index)
        layers.append(layer)
    return layers


def _layer(width: int, index: int) -> nn.Module:
    if index == 0:
        return Stem(64 * width)
    place, channels = index - 1, 64 * width
    for group, blocks in enumerate(BLOCKS):
        inner = 64 * width * 2**group
        if place < blocks:
            before = channels if place == 0 else inner * EXPANSION
            return Bottleneck(before, inner, 2 if group and not place else 1)
        place -= blocks
        channels = inner * EXPANSION
    return Head(channels)


@torch.no_grad()
def _fill(layer: nn.Module, index: int) -> None:
    pattern = torch.from_numpy(np.random.default_rng(index).standard_normal(_PATTERN, dtype=np.float32))
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if "norm" in name:
            tensor.fill_(1 if name.endswith(("weight", "running_var")) else 0)
        elif tensor.dim() > 1:
            scale = math.sqrt(2 / tensor[0].numel())
            scaled = (pattern * scale).to(tensor.device)
            flat = tensor.view(-1)
            for start in range(0, flat.numel(), _PATTERN):  # part by part: a second copy would count as its memory
                part = flat[start : start + _PATTERN]
                part.copy_(scaled[: part.numel()])
        else:
            tensor.zero_()


@torch.inference_mode()
def run_layers(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


@torch.inference_mode()
def run_share(layers: list[nn.Module], chain: Chain, first: int, share: RowShare, x: Tensor) -> Tensor:
    """x: the input rows of the share. A layer pads the cut edges with zeros, which spoils rows of the halo only; these
    are cut off before the next layer."""
    at = share.inputs[0]
    counted = chain.layers[first : first + len(layers)]
    for layer, counts, (start, end) in zip(layers, counted, share.outputs, strict=True):
        assert at % counts.stride == 0, "a share begins in step with the stride"
        offset = at // counts.stride
        x = layer(x)[:, :, start - offset : end - offset]
        at = start
    return x


def shares_of(chain: Chain, first: int, end: int, workers: int) -> list[RowShare]:
    return shares(chain.layers[first:end], workers)
