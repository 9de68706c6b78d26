"""What the first requests of a model would wait for, done before: kernels are compiled, or found on disk where an
earlier process has compiled them, by the thread that loads; graphs are captured while nothing else is to be computed.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from dovetail.engine.devices.cuda.chunks import ChunkSteps
from dovetail.engine.devices.cuda.graphs import DecodeSteps
from dovetail.engine.devices.cuda.model import CudaModel
from dovetail.engine.devices.cuda.splits import AttentionShape
from dovetail.engine.devices.cuda.whole_prompts import LENGTHS, load_library, prepare
from dovetail.engine.kv_cache import KVCache

LONG_PROMPTS = (1024, 4096)  # which no graph is for
log = logging.getLogger("dovetail.worker")
_COMPILED: set[Hashable] = set()  # shapes of models that this process has all kernels of


def compile_kernels(shape: Hashable, model: CudaModel, kv: KVCache, decode: DecodeSteps, chunk: ChunkSteps) -> None:
    """Runs a few layers on a stream of its own, without writing to the cache; once in a process for each shape."""
    if shape in _COMPILED:
        return
    kv.resize(1)  # its address is looked at
    cache = kv.addresses()
    few = model.one_of_each_kind()
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(cache.device)):
        for bucket in decode.buckets:
            decode.run_empty(bucket, few)
        for kind in [*chunk.kinds, *chunk.mixed_kinds]:
            chunk.run_empty(kind, few)
        for length in LONG_PROMPTS:
            tokens = torch.zeros(length, dtype=torch.int32, device=cache.device)
            few.forward(tokens, tokens, torch.full_like(tokens, -1), cache, tokens[:1], _queries)
        load_library(few.layers[0].attention, cache.dtype, cache.device)
        torch.cuda.current_stream().synchronize()
    kv.resize(0)
    _COMPILED.add(shape)


def _queries(qkv: Tensor, cache: Tensor, shape: AttentionShape) -> Tensor:
    """In the place of attention, whose kernels shorter chunks have."""
    return qkv[:, : shape.num_heads * shape.head_dim].contiguous()


def capture_next(ahead: Iterator[bool]) -> bool:
    """Of `graphs_ahead`; False if nothing is left. One that cannot be captured now will be at its first use."""
    try:
        return any(ahead)
    except RuntimeError as error:  # no memory, mostly
        log.warning("graphs of iterations are not captured ahead: %s", str(error).partition("\n")[0])
        return False


def graphs_ahead(model: CudaModel, dtype: torch.dtype, decode: DecodeSteps, chunk: ChunkSteps) -> Iterator[bool]:
    """Captures one graph with each step, or makes the plan for one length of prompts, the likeliest first; yields
    whether it was not there."""
    for bucket in decode.buckets:
        for splits in (False, True):
            yield decode.capture(bucket, splits=splits, greedily=True)
            yield decode.capture(bucket, splits=splits, greedily=False)
    for kind in [*chunk.kinds, *chunk.kinds_beside]:
        yield chunk.capture(kind)
    for shape in model.attention_shapes():
        for length in LENGTHS:
            yield prepare(length, shape, dtype, decode.device)
