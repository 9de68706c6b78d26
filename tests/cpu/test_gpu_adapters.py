"""Adapters as a GPU keeps them, as far as no GPU is needed: what lies at which address, and which rows go together."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_adapters import ATTENTION, save_adapter

from dovetail.engine.adapters import AdapterMatrices, Part, read_matrices
from dovetail.engine.devices.cuda.adapter_image import (
    ALIGNMENT,
    MATRICES,
    TILE,
    AdapterImage,
    adapted_matrix,
    fill_words,
    group_rows,
    most_tiles,
    rank_capacity,
    tile_room,
)
from dovetail.errors import UnsupportedModel
from dovetail.modelspec import ModelSpec
from dovetail.store import open_checkpoint
from dovetail.store.hf.adapter_parts import open_adapter

ADDRESS = 1 << 40
LLAMA = ModelSpec("llama", 100, 8, 2, 2, 1, 4, 16, 64)


class Read:
    """An image as a kernel reads it, through addresses."""

    def __init__(self, image: AdapterImage) -> None:
        self.bytes = image.relocated(ADDRESS)
        self._dtype = image.dtype
        words = self.bytes[: len(self.bytes) // 8 * 8].view(torch.int64)
        self.rank, self.scaling = int(words[0]), float(np.int32(int(words[1])).view(np.float32))
        self._addresses = words[2:]

    def address(self, entry: int, which: int) -> int:
        return int(self._addresses[2 * entry + which])

    def matrix(self, entry: int, which: int, columns: int) -> torch.Tensor:
        at = self.address(entry, which) - ADDRESS
        assert at > 0
        assert at % ALIGNMENT == 0
        size = self.rank * columns * self._dtype.itemsize
        return self.bytes[at : at + size].view(self._dtype).view(self.rank, columns).float()


@pytest.mark.parametrize("family", ["llama_bias", "gemma2", "opt", "phi3", "glm4", "qwen3_moe"])
def test_every_matrix_is_found_by_its_address(family: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny_folder(family)
    spec = open_checkpoint(base).spec
    weights = open_adapter(save_adapter(tmp_path / "a", base, targets=(*ATTENTION, "down_proj", "fc2")), spec)
    matrices = read_matrices(weights)
    wanted: dict[str, torch.Tensor] = {}
    shapes = {
        name: shape for name, shape in spec.tensors() if name.split(".")[2:] in [[one, "weight"] for one in MATRICES]
    }
    for part in matrices.parts:
        delta = wanted.setdefault(part.tensor, torch.zeros(shapes[part.tensor]))
        delta[part.row : part.row + part.second.shape[1]] = part.second.t().float() @ part.first.float()
    read = Read(AdapterImage(matrices, spec, torch.float32))
    assert (read.rank, read.scaling) == (4, pytest.approx(matrices.scaling))
    for name, shape in shapes.items():
        _, layer, matrix, _ = name.split(".")
        place, row = adapted_matrix(spec, int(layer), matrix, shape[0]), 0
        found = torch.zeros(shape)
        for at, size in enumerate(place.sizes):
            if read.address(place.entry + at, 0):
                first, second = (
                    read.matrix(place.entry + at, which, shape[1] if not which else size) for which in (0, 1)
                )
                found[row : row + size] = second.t() @ first
            row += size
        assert torch.equal(found, wanted.pop(name, torch.zeros(shape))), name
    assert not wanted


def test_what_one_matrix_of_transformers_covers_shares_its_first_half() -> None:
    first, second = torch.randn(3, 8), torch.randn(3, 16)
    image = AdapterImage(AdapterMatrices(2.0, (Part("layers.1.qkv.weight", 0, first, second),)), LLAMA, torch.bfloat16)
    read, entry = Read(image), adapted_matrix(LLAMA, 1, "qkv", 16).entry
    assert len({read.address(entry + at, 0) for at in range(3)}) == 1
    assert torch.equal(read.matrix(entry + 2, 1, 4), second[:, 12:].bfloat16().float())
    assert not any(read.address(at, which) for at in range(entry) for which in (0, 1)), "nothing for the first layer"


def test_rows_that_a_piece_has_in_part_are_refused() -> None:
    part = Part("layers.0.qkv.weight", 4, torch.randn(3, 8), torch.randn(3, 8))
    with pytest.raises(UnsupportedModel, match=r"some rows only of what layers\.0\.qkv\.weight keeps together"):
        AdapterImage(AdapterMatrices(1.0, (part,)), LLAMA, torch.float32)


def test_ranks_have_room_in_powers_of_two() -> None:
    assert [rank_capacity(rank) for rank in (1, 16, 17, 64, 100, 256)] == [16, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("seed", range(20))
def test_every_row_with_an_adapter_is_in_one_tile_of_it(seed: int) -> None:
    draw = random.Random(seed)
    rows = draw.choice([1, 3, 40, 200])
    addresses = [draw.choice([0, *range(1000, 1000 + draw.choice([1, 7, 300]))]) for _ in range(rows)]
    counts = [draw.choice([1, 1, 1, 17, 64]) for _ in range(rows)]
    tiles, order = group_rows(addresses, counts)
    room = most_tiles(sum(counts), rows)
    words = np.full(4 * room + sum(counts), 77, np.int64)
    fill_words(words, tiles, order, room)
    seen: dict[int, int] = {}
    for address, first, count, _ in words[: 4 * room].reshape(-1, 4).tolist():
        assert (0 < count <= TILE) == bool(address)
        for place in range(first, first + count):
            row = int(words[4 * room + place])
            assert row not in seen
            seen[row] = address
    owners = [address for address, count in zip(addresses, counts, strict=True) for _ in range(count)]
    assert seen == {row: address for row, address in enumerate(owners) if address}


def test_graphs_have_programs_for_few_adapters_or_for_as_many_as_there_are_rows() -> None:
    assert [tile_room(needed, 64, 64) for needed in (1, 12, 13, 64)] == [12, 12, 64, 64]
    assert [tile_room(needed, 16, 16) for needed in (1, 16)] == [16, 16], "too small a difference for two graphs"
