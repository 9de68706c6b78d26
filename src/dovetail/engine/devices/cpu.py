"""The host's own cores as a device: weights are used where the host has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from dovetail.engine.adapters import AdapterMatrices
from dovetail.engine.devices import Peaks
from dovetail.engine.dtypes import TORCH_DTYPES, compute_dtype
from dovetail.engine.encoder import EncoderExecutor
from dovetail.engine.executor import CpuExecutor, ExecutorConfig, serves_as_stored
from dovetail.engine.layer_source import StreamedCheckpoint
from dovetail.engine.native_model import can_run
from dovetail.layouts import CELLS, GGUF, packed_bytes
from dovetail.machine import NODE_SHARE, memory_bytes, read_cpu, slug
from dovetail.modelspec import ModelSpec
from dovetail.native import select
from dovetail.node.ports import Checkpoint
from dovetail.policy.placement import DeviceKind

QUANTISED = ("int8", "int4", GGUF)
EFFICIENCY, FLOOR_S, LAYER_S = 0.6, 0.002, 0.0003


class CpuDevice:
    kind = DeviceKind.CPU
    max_batch, max_turn_tokens = 64, 512

    def __init__(self, threads: int) -> None:
        self.label = f"{slug(read_cpu().model)}-{threads}c"
        self.memory_bytes = int(memory_bytes()[0] * NODE_SHARE)

    def node_bytes(self, asked: int) -> int:
        return asked or self.memory_bytes

    def compute_dtype(self, asked: str, stored: str) -> str:
        return compute_dtype(asked, stored)

    def serves_as_stored(self, dtype: str, form: str) -> bool:
        return serves_as_stored(dtype, form)

    def executor(self, checkpoint: Checkpoint, config: ExecutorConfig) -> CpuExecutor | EncoderExecutor:
        make = CpuExecutor if checkpoint.spec.encoder is None else EncoderExecutor
        with ExitStack() as undo:
            if isinstance(checkpoint, StreamedCheckpoint):
                undo.callback(checkpoint.reader.close)
            executor = make(checkpoint, config)
            undo.pop_all()
        checkpoint.close()
        return executor

    def pack_adapter(self, adapter: AdapterMatrices, spec: ModelSpec, dtype: str) -> AdapterMatrices:
        return adapter

    def use_host_pool(self, address: int, size_bytes: int, chunk_bytes: int) -> None:
        """Nothing to prepare: the cores read it as it is."""

    def expect_models(self, num_bytes: int) -> None:
        """Likewise."""

    def peaks(self, dtype: str, kept: str) -> Peaks:
        """Measured, in a few hundredths of a second."""
        tokens, size = 128, 1024
        # More than the caches hold. numpy's, because torch's allocator may keep what it is given back.
        large = torch.from_numpy(np.ones(64 * 2**20 // 8, np.int64))
        product_s = _fastest(_product(dtype, kept, tokens, size))
        read_s = _fastest(large.sum)
        flops, bandwidth = 2 * tokens * size * size / product_s, large.numel() * large.itemsize / read_s
        return Peaks(flops, bandwidth, EFFICIENCY, FLOOR_S, LAYER_S)


def _product(dtype: str, kept: str, tokens: int, size: int) -> Callable[[], object]:
    ops = select()
    threads = torch.get_num_threads()
    if kept in QUANTISED:
        assert ops.kernels is not None, "codes are multiplied by the kernels alone"
        rows, out = torch.rand(tokens, size), torch.empty(tokens, size)
        layout = CELLS["int8"]
        data = np.full(packed_bytes(layout, "f32", (size, size)), 0x25, np.uint8)  # codes of 37, scales of 0.02
        return partial(ops.kernels.linear_quantised, ops.level, threads, rows, data, layout, out)
    if ops.kernels is not None and can_run(TORCH_DTYPES[dtype]):
        rows, matrix, out = torch.rand(tokens, size), torch.rand(size, size), torch.empty(tokens, size)
        kind = matrix.to(TORCH_DTYPES[dtype])
        return partial(ops.kernels.linear, ops.level, threads, dtype, rows, kind, out)
    rows, matrix = (torch.rand(count, size).to(TORCH_DTYPES[dtype]) for count in (tokens, size))
    return partial(torch.nn.functional.linear, rows, matrix)


def _fastest(function: Callable[[], object], repeat: int = 3) -> float:
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)
