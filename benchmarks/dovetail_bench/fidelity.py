"""How far a model's predictions are from those of another form of it: what quantised weights or a
quantised cache cost in accuracy.

Both read the same text, and at every position their distributions over the next token are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.modelspec import KvKind
from dovetail.node.ports import Checkpoint
from dovetail.sched.turn import Turn, TurnRow
from dovetail.types import SamplingParams

if TYPE_CHECKING:
    from dovetail.engine.devices.cuda.executor import CudaExecutor

_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
_BLOCK_SIZE = 16
_STEP = 64  # positions computed together


class Fidelity(msgspec.Struct, frozen=True):
    tokens: int
    perplexity: float
    reference_perplexity: float
    mean_kl: float  # nats per token, of the reference against the candidate
    median_kl: float
    same_first: float  # share of positions where both prefer the same token


def compare(
    reference: Checkpoint, candidate: Checkpoint, tokens: Sequence[int], level: str = "auto", kv: KvKind = "auto"
) -> Fidelity:
    """`kv`: of the candidate."""
    return compare_logits(logits_of(reference, tokens, level), logits_of(candidate, tokens, level, kv), tokens)


def compare_logits(reference: Tensor, candidate: Tensor, tokens: Sequence[int]) -> Fidelity:
    """Both [tokens, vocab], of whatever engine."""
    theirs, ours = (torch.log_softmax(logits.float(), dim=-1) for logits in (reference, candidate))
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    same = (theirs.argmax(-1) == ours.argmax(-1)).double().mean()
    return Fidelity(
        tokens=len(tokens),
        perplexity=_perplexity(ours, tokens),
        reference_perplexity=_perplexity(theirs, tokens),
        mean_kl=float(divergence.mean()),
        median_kl=float(divergence.median()),
        same_first=float(same),
    )


def compare_on_gpu(
    reference: Checkpoint, candidate: Checkpoint, tokens: Sequence[int], name: str, dtype: str
) -> Fidelity:
    """The candidate in this type, the reference in float32, both by that GPU."""
    from dovetail.engine.devices.cuda.device import CudaDevice

    device = CudaDevice(name)
    config = ExecutorConfig(kv_bytes=1 << 33, block_size=_BLOCK_SIZE, max_tokens=_room(tokens), max_batch=_STEP)
    theirs = _read(device.executor(reference, msgspec.structs.replace(config, dtype="f32")), tokens)
    return compare_logits(
        theirs, _read(device.executor(candidate, msgspec.structs.replace(config, dtype=dtype)), tokens), tokens
    )


def logits_of(checkpoint: Checkpoint, tokens: Sequence[int], level: str = "auto", kv: KvKind = "auto") -> Tensor:
    """Of the next token after each one, [tokens, vocab]."""
    config = ExecutorConfig(kv_bytes=1 << 33, block_size=_BLOCK_SIZE, max_tokens=_room(tokens), kv=kv, level=level)
    return _read(CpuExecutor(checkpoint, config), tokens)


def _room(tokens: Sequence[int]) -> int:
    return -(-len(tokens) // _BLOCK_SIZE) * _BLOCK_SIZE


def _read(executor: CpuExecutor | CudaExecutor, tokens: Sequence[int]) -> Tensor:
    """Every position is a row of its own over the same blocks, since an iteration computes logits of rows' ends
    alone."""
    count = _room(tokens) // _BLOCK_SIZE
    executor.resize(count)
    found = []
    for start in range(0, len(tokens), _STEP):
        rows = tuple(_row(tokens, at, list(range(count))) for at in range(start, min(start + _STEP, len(tokens))))
        logits = executor.logits(Turn(rows))
        found += [logits[row.sequence].clone() for row in rows]
    executor.close()
    return torch.stack(found)


def _row(tokens: Sequence[int], at: int, blocks: list[int]) -> TurnRow:
    return TurnRow(at, list(tokens[: at + 1]), at, 1, blocks, at + 1, _GREEDY, samples=True)


def _perplexity(logs: Tensor, tokens: Sequence[int]) -> float:
    following = torch.tensor(tokens[1:])
    return float(torch.exp(-logs[:-1].gather(1, following[:, None]).mean()))
