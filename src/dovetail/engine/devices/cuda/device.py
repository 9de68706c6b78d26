"""One GPU, or a slice of one: what all of its models share, and what it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec
import torch

from dovetail.engine.adapters import AdapterMatrices
from dovetail.engine.devices import Peaks
from dovetail.engine.devices.card_memory import granted_bytes
from dovetail.engine.devices.cuda.adapter_image import AdapterImage
from dovetail.engine.devices.cuda.adapters import CudaAdapter
from dovetail.engine.devices.cuda.copier import RegisteredPool
from dovetail.engine.devices.cuda.executor import CudaExecutor, SharedStreams, gpu_dtype
from dovetail.engine.devices.cuda.graphs import batch_sizes
from dovetail.engine.dtypes import TORCH_DTYPES
from dovetail.engine.executor import ExecutorConfig
from dovetail.errors import ConfigError
from dovetail.layouts import CELLS, GGUF
from dovetail.machine import slug
from dovetail.modelspec import ModelSpec, activation_dtype
from dovetail.node.ports import Checkpoint, HostTensor
from dovetail.policy.placement import DeviceKind
from dovetail.sched.turn import Turn, TurnRow
from dovetail.types import SamplingParams

MEMORY_SHARE = 0.9  # of what others leave; the rest is for activations, graphs and the libraries' own
log = logging.getLogger("dovetail.worker")
LINK_BYTES = 64 << 20  # that are copied from the host to see how fast that is
EFFICIENCY, FLOOR_S, LAYER_S = 0.7, 0.0004, 0.00001


class CudaDevice:
    kind = DeviceKind.GPU
    max_batch, max_turn_tokens = 256, 8192

    def __init__(self, name: str = "cuda:0") -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device {name}: torch {torch.__version__} sees no GPU here")
        index = torch.device(name).index or 0
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        facts = torch.cuda.get_device_properties(self.device)
        self.label = slug(facts.name)
        self._free_bytes = torch.cuda.mem_get_info(self.device)[0]
        self.memory_bytes = int(self._free_bytes * MEMORY_SHARE)
        self._streams = SharedStreams(self.device, facts.multi_processor_count)
        self._peaks: Peaks | None = None

    def node_bytes(self, asked: int) -> int:
        if not asked:
            return self.memory_bytes
        whole = torch.cuda.get_device_properties(self.device).total_memory
        return granted_bytes(self.label, asked, self._free_bytes, whole)

    def compute_dtype(self, asked: str, stored: str) -> str:
        return gpu_dtype(asked, stored)

    def serves_as_stored(self, dtype: str, form: str) -> bool:
        return form == dtype or form in (*CELLS, GGUF)

    def executor(self, checkpoint: Checkpoint, config: ExecutorConfig) -> CudaExecutor:
        parked = self._streams.take_parked(checkpoint, config)
        if parked is not None:
            parked.reopen(checkpoint, config)
            return parked
        return CudaExecutor(checkpoint, config, self._streams, config.max_batch or self.max_batch)

    def pack_adapter(self, adapter: AdapterMatrices, spec: ModelSpec, dtype: str) -> CudaAdapter:
        return CudaAdapter(AdapterImage(adapter, spec, TORCH_DTYPES[activation_dtype(dtype)]), spec, self._streams)

    def use_host_pool(self, address: int, size_bytes: int, chunk_bytes: int) -> None:
        self._streams.copier.pool = RegisteredPool(address, size_bytes, chunk_bytes)

    def expect_models(self, num_bytes: int) -> None:
        if self._streams.copier.pool is not None:
            self._streams.copier.pool.expect(num_bytes)

    def prepare(self, checkpoint: Checkpoint, dtype: str) -> None:
        """Compile what models of this shape and these layouts need, by running one layer of zeros: kept on disk, it is
        found at once by every later start."""
        spec = checkpoint.spec
        one_layer = msgspec.structs.replace(spec, num_layers=1, windows=spec.windows[:1])
        longest = min(spec.context_length, 64)
        kv_bytes = one_layer.kv_bytes_per_token(dtype) * self.max_batch * 64
        config = ExecutorConfig(kv_bytes=kv_bytes, dtype=dtype)
        executor = self.executor(Zeros(one_layer, checkpoint), config)
        executor.resize(executor.max_blocks)
        try:
            _run_each_kind(executor, longest, config.block_size, self.max_batch)
        finally:
            executor.close()

    def peaks(self, dtype: str, kept: str) -> Peaks:
        """Measured once, by copies and a product of 16 bits."""
        if self._peaks is None:
            half, size = 1 << 30, 8192  # far more than the caches hold, and long beside a launch
            large = torch.empty(2 * half, dtype=torch.uint8, device=self.device)
            a, b = (torch.randn(size, size, device=self.device).bfloat16() for _ in range(2))
            copied_s, product_s = _seconds(lambda: large[:half].copy_(large[half:])), _seconds(lambda: a @ b)
            host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
            link = LINK_BYTES / _seconds(lambda: large[:LINK_BYTES].copy_(host, non_blocking=True))
            flops, bandwidth = 2 * size**3 / product_s, 2 * half / copied_s
            self._peaks = Peaks(flops, bandwidth, EFFICIENCY, FLOOR_S, LAYER_S, link)
            del large, a, b
            torch.cuda.empty_cache()
        return self._peaks


def _run_each_kind(executor: CudaExecutor, longest: int, block_size: int, max_batch: int) -> None:
    """One iteration of every kind that has kernels of its own; the executor has memory for as many rows as it takes."""
    blocks = list(range(-(-longest // block_size)))
    tokens = [0] * longest
    greedy, drawn = (SamplingParams(max_tokens=1, seed=0, temperature=value) for value in (0.0, 1.0))

    def row(index: int, start: int, count: int, sampling: SamplingParams = greedy) -> TurnRow:
        return TurnRow(index, tokens[: start + count], start, count, blocks, longest, sampling, samples=True)

    executor.run(Turn((row(0, 0, longest),)))
    executor.run(Turn((row(0, longest - 1, 1), row(1, 0, longest))))
    for batch in batch_sizes(max_batch):
        executor.run(Turn(tuple(row(index, longest - 1, 1) for index in range(batch))))
    executor.run(Turn((row(batch, longest - 1, 1, drawn),)))


class Zeros:
    """A checkpoint of nothing but zeros, in the forms of another."""

    in_place = True

    def __init__(self, spec: ModelSpec, other: Checkpoint) -> None:
        self.spec = spec
        self._pieces = {name: other.pieces(name) for name, _ in spec.tensors()}
        self._zeros = memoryview(bytes(max(len(one.data) for pieces in self._pieces.values() for one in pieces)))

    def pieces(self, name: str) -> Sequence[HostTensor]:
        return [one._replace(data=self._zeros[: len(one.data)]) for one in self._pieces[name]]

    def close(self) -> None:
        self._pieces.clear()
        self._zeros = memoryview(b"")


def _seconds(function: Callable[[], object], repeat: int = 4) -> float:
    times: list[float] = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)
