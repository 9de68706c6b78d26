"""Where a model's tensors lie in a range of device memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dovetail.codings import Coding
from dovetail.engine.devices.cuda.coded import NUMPY_TO_TORCH
from dovetail.engine.devices.cuda.fp8 import TYPE as FP8_TYPE
from dovetail.layouts import BY_ROWS, coding_of
from dovetail.node.ports import HostTensor

ALIGNMENT = 256


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class CodedPlace:
    """Of one piece of a quantised matrix."""

    coding: Coding
    layout: str
    codes: Place
    scales: tuple[Place, ...]


@dataclass(frozen=True)
class Fp8Place:
    values: Place
    scales: Place


class Room:
    """Places one behind the other."""

    def __init__(self, begin: int = 0) -> None:
        self.num_bytes = begin

    def take(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Place:
        place = Place(dtype, shape, aligned(self.num_bytes))
        self.num_bytes = place.end
        return place

    def take_fp8(self, shape: tuple[int, ...]) -> Fp8Place:
        return Fp8Place(self.take(FP8_TYPE, shape), self.take(torch.float32, shape[:-1]))

    def take_coded(self, piece: HostTensor) -> CodedPlace:
        rows, coding = math.prod(piece.shape[:-1]), coding_of(piece.layout, piece.shape[-1])
        codes = self.take(torch.int8, (rows, coding.row_bytes))
        scales = tuple(self.take(NUMPY_TO_TORCH[part.dtype.name], (rows, part.count)) for part in coding.parts)
        return CodedPlace(coding, BY_ROWS.get(piece.layout, piece.layout), codes, scales)
