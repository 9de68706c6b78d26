"""A model instance on a CPU: weights, KV memory and one method that computes one iteration.

Implements `node.ports.Executor`. Knows one model, keeps no clock, and decides nothing about who runs when. Several live
in one process without knowing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch

from dovetail.engine.batch import Batch, build_batch
from dovetail.engine.dtypes import TORCH_DTYPES, compute_dtype
from dovetail.engine.grammar import Grammars
from dovetail.engine.kv_cache import KVCache
from dovetail.engine.model import DecoderModel
from dovetail.engine.runner import forward
from dovetail.engine.sampler import sample
from dovetail.engine.weights import Weights, from_read_only_memory
from dovetail.errors import OutOfMemory
from dovetail.native import select
from dovetail.node.ports import Checkpoint
from dovetail.sched.turn import Outcome, Turn


class ExecutorConfig(msgspec.Struct, frozen=True):
    kv_bytes: int  # upper limit of KV memory
    block_size: int = 16
    max_tokens: int = 0  # KV memory for more tokens than this is never of use; 0 = no such limit
    dtype: str = "auto"
    weights: Literal["resident", "mapped", "auto"] = "auto"  # auto = in place where the checkpoint allows it
    level: str = "auto"  # of the kernels
    tokenizer_file: str = ""  # for structured output
    eos_token_ids: tuple[int, ...] = ()


class CpuExecutor:
    def __init__(self, checkpoint: Checkpoint, config: ExecutorConfig) -> None:
        spec = checkpoint.spec
        self.spec = spec
        self.dtype = compute_dtype(config.dtype, checkpoint.pieces("embed.weight")[0].dtype)
        dtype = TORCH_DTYPES[self.dtype]
        self._ops = select(config.level)
        in_place = checkpoint.in_place if config.weights == "auto" else config.weights == "mapped"
        weights = Weights(checkpoint, dtype, "mapped" if in_place else "resident", self._ops)
        with from_read_only_memory():
            self._model: DecoderModel | None = DecoderModel(spec, weights, dtype, self._ops)
        self.weight_bytes = weights.num_bytes
        self.copied_bytes = weights.copied_bytes
        self.max_blocks = _max_blocks(config, spec.kv_bytes_per_token(self.dtype) * config.block_size)
        self._cache = KVCache(spec, dtype, config.block_size, self.max_blocks)
        self._grammars = Grammars(Path(config.tokenizer_file), spec.vocab_size, config.eos_token_ids)

    @property
    def kv_committed_bytes(self) -> int:
        return self._cache.committed_bytes

    def run(self, turn: Turn) -> Outcome:
        with torch.inference_mode():
            batch, logits = self._forward(turn)
            return Outcome(tuple(sample(logits, batch.sampled, self._grammars)) if batch.sampled else ())

    def logits(self, turn: Turn) -> dict[int, torch.Tensor]:
        """The same iteration, but the logits of each sampling sequence instead of its token."""
        with torch.inference_mode():
            batch, logits = self._forward(turn)
            return {row.sequence: logits[at] for at, row in enumerate(batch.sampled)}

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]] = ()) -> None:
        assert num_blocks <= self.max_blocks
        self._cache.move(moves)
        self._cache.resize(num_blocks)

    def forget(self, sequence: int) -> None:
        self._grammars.forget(sequence)

    def close(self) -> None:
        self._model = None
        self._cache.close()

    def _forward(self, turn: Turn) -> tuple[Batch, torch.Tensor]:
        assert self._model is not None, "the executor is closed"
        batch = build_batch(turn, self._cache.block_size)
        return batch, forward(self._model, batch, self._cache, self._ops)


def _max_blocks(config: ExecutorConfig, block_bytes: int) -> int:
    blocks = config.kv_bytes // block_bytes
    if config.max_tokens:
        blocks = min(blocks, -(-config.max_tokens // config.block_size))
    if blocks == 0:
        raise OutOfMemory(f"KV memory of {config.kv_bytes:,} bytes is less than one block of {block_bytes:,}")
    return blocks
