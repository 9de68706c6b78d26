"""Keys and values of one model in an arena, block-major: a block holds `block_size` tokens of every layer.

    [block][layer][key | value][token in block][kv head][head dim]

Where a key is the value as well (`ModelSpec.mla`), there is one of both.

As int8, a head's codes are followed by their scale, a float32 in four more bytes. All that belongs to a block is one
stretch of memory, so the pool grows and shrinks at its tail. Which block belongs to whom is `sched.blocks`' matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from dovetail.engine.arena import HostArena
from dovetail.modelspec import KV_SCALE_BYTES, KvKind, ModelSpec


class Arena(Protocol):
    """Memory of one device that grows and shrinks in place."""

    @property
    def committed_bytes(self) -> int: ...

    def resize(self, num_bytes: int) -> None: ...

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor: ...

    def close(self) -> None: ...


class KVCache:
    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        block_size: int,
        max_blocks: int,
        kv: KvKind = "auto",
        arena: Callable[[int], Arena] = HostArena,
    ) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.num_blocks = 0
        dtype, width = (torch.int8, spec.head_dim + KV_SCALE_BYTES) if kv == "int8" else (dtype, spec.head_dim)
        shape = (max_blocks, spec.num_layers, spec.kv_parts, block_size, spec.num_kv_heads, width)
        self.block_bytes = shape[1] * shape[2] * shape[3] * shape[4] * shape[5] * dtype.itemsize
        self._arena = arena(max_blocks * self.block_bytes)
        self._blocks: torch.Tensor | None = self._arena.tensor(dtype, shape)

    @property
    def committed_bytes(self) -> int:
        return self._arena.committed_bytes

    def resize(self, num_blocks: int) -> None:
        self._arena.resize(num_blocks * self.block_bytes)
        self.num_blocks = num_blocks

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, each (from, to); no block is both. One by one, in place: a pool moves blocks in order to
        shrink, and a copy of all of them would take more memory at that moment than it held before."""
        if moves:
            assert self._blocks is not None, "the cache is closed"
            rows: Any = self._blocks.view(self.max_blocks, -1).view(torch.uint8)
            if rows.device.type == "cpu":
                rows = rows.numpy()  # torch would wake its threads for each block
            for source, place in moves:
                rows[place] = rows[source]

    def layer(self, index: int) -> torch.Tensor:
        """[blocks, 2, block_size, kv_heads, head_dim] of one layer; only the first `num_blocks` may be touched."""
        assert self._blocks is not None, "the cache is closed"
        return self._blocks[:, index]

    def addresses(self) -> torch.Tensor:
        """[blocks, layers, 2, block_size, kv_heads, head_dim] over the whole range, which never moves; only the first
        `num_blocks` may be touched."""
        assert self._blocks is not None, "the cache is closed"
        return self._blocks

    def usable(self) -> torch.Tensor:
        """[blocks, layers, 2, block_size, kv_heads, head_dim (+ scale)]: what may be touched."""
        assert self._blocks is not None, "the cache is closed"
        return self._blocks[: self.num_blocks]

    def close(self) -> None:
        self._blocks = None  # no view may outlive the addresses
        self.num_blocks = 0
        self._arena.close()
