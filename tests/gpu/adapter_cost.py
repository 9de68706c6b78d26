"""What LoRA adapters cost a decoding iteration on a GPU: a model of random weights in the shape of an 8B one, without
adapters, with one for all rows and with one for each, in turns; and how long their bytes take to be read.

    PYTHONPATH=src python tests/gpu/adapter_cost.py [--layers 32] [--rank 16] [--rows 1 16 64] [--dtype bf16]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch

from dovetail.engine.adapters import AdapterMatrices, Part
from dovetail.engine.devices.cuda.adapter_image import MATRICES, adapted_matrix
from dovetail.engine.devices.cuda.adapters import CudaAdapter
from dovetail.engine.devices.cuda.device import CudaDevice
from dovetail.engine.devices.cuda.executor import CudaExecutor
from dovetail.engine.executor import ExecutorConfig
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import HostTensor
from dovetail.sched.turn import Turn, TurnRow
from dovetail.types import SamplingParams

CONTEXT, BLOCK = 128, 16
GREEDY = SamplingParams(max_tokens=4000, seed=0, temperature=0.0)


class RandomCheckpoint:
    """Every tensor is the head of the same random values."""

    in_place = True

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        largest = max(torch.Size(shape).numel() for _, shape in spec.tensors())
        values = torch.randn(largest, device="cuda").mul_(0.02).bfloat16().cpu()
        self._values = memoryview(values.view(torch.uint8).numpy()).cast("B")

    def pieces(self, name: str) -> Sequence[HostTensor]:
        shape = dict(self.spec.tensors())[name]
        return [HostTensor("bf16", shape, self._values[: 2 * torch.Size(shape).numel()])]

    def close(self) -> None:
        self._values = memoryview(b"")


def random_adapter(spec: ModelSpec, rank: int) -> AdapterMatrices:
    parts, shapes = [], dict(spec.tensors())
    for layer in range(spec.num_layers):
        for name in MATRICES:
            rows, columns = shapes.get(f"layers.{layer}.{name}.weight", (0, 0))
            row = 0
            for size in adapted_matrix(spec, layer, name, rows).sizes if rows else ():
                first, second = ((torch.randn(rank, count) * 0.02).bfloat16() for count in (columns, size))
                parts.append(Part(f"layers.{layer}.{name}.weight", row, first, second))
                row += size
    return AdapterMatrices(1.0, tuple(parts))


def decode_turn(rows: int, step: int, keys: Sequence[str]) -> Turn:
    length = CONTEXT + step
    width = (CONTEXT * 2) // BLOCK
    made = []
    for at in range(rows):
        blocks = list(range(at * width, (at + 1) * width))
        made.append(TurnRow(at, [1 + at % 100] * length, length - 1, 1, blocks, CONTEXT, GREEDY, True, keys[at]))
    return Turn(tuple(made))


class Clock:
    """Iterations by the device's own clock."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor

    def run(self, rows: int, keys: Sequence[str], count: int) -> list[float]:
        times = []
        for step in range(count):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = self._executor._device.stream
            turn = decode_turn(rows, step, keys)
            begin.record(stream)
            self._executor.launch(turn)
            end.record(stream)
            self._executor.collect()
            times.append(begin.elapsed_time(end))
        return times


def measure(executor: CudaExecutor, adapters: Sequence[CudaAdapter], rows: int, rounds: int) -> None:
    clock = Clock(executor)
    names = [f"adapter-{at}" for at in range(rows)]
    kinds = {"without": [""] * rows, "one for all": names[:1] * rows, "one for each": names}
    for keys in kinds.values():
        clock.run(rows, keys, 4)
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, keys in kinds.items():
            found[kind] += clock.run(rows, keys, 6)[1:]
    single = statistics.median(found["one for all"]) if rows == 1 else None
    base = statistics.median(found["without"])
    for kind, times in found.items():
        low, middle, high = (sorted(times)[len(times) * part // 10] for part in (1, 5, 9))
        print(f"{rows:4} rows, {kind:12}: {middle:6.3f} ms ({low:.3f} to {high:.3f}), {middle / base:.3f} times")
    num_bytes = sum(one.num_bytes for one in adapters[:rows])
    bandwidth = 4.3e12  # a copy on an H200, bytes read and written
    print(f"          all their bytes: {num_bytes / 1e6:,.0f} MB, {1e3 * num_bytes / bandwidth:.3f} ms at 4.3 TB/s")
    if single is not None:
        print(f"          one row at a time with an adapter: {single:.3f} ms each")


def prompts(executor: CudaExecutor, rounds: int) -> None:
    for length in (512, 4096):
        found: dict[str, list[float]] = {"": [], "adapter-0": []}
        for at in range(rounds + 2):
            for key, times in found.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                blocks = list(range(length // BLOCK))
                row = TurnRow(0, [1 + i % 100 for i in range(length)], 0, length, blocks, length, GREEDY, True, key)
                begin.record(executor._device.stream)
                executor.launch(Turn((row,)))
                end.record(executor._device.stream)
                executor.collect()
                times += [begin.elapsed_time(end)] if at >= 2 else []
        plain, adapted = (statistics.median(times) for times in found.values())
        print(f"prompt of {length}: {plain:.2f} ms, with an adapter {adapted:.2f} ms, {adapted / plain:.3f} times")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default="bf16")
    options = parser.parse_args()
    torch.manual_seed(0)
    spec = ModelSpec("llama", 128256, 4096, options.layers, 32, 8, 128, 14336, 8192, tied_embeddings=False)
    device = CudaDevice("cuda:0")
    config = ExecutorConfig(kv_bytes=4 << 30, block_size=BLOCK, dtype=options.dtype, max_batch=256)
    executor = device.executor(RandomCheckpoint(spec), config)
    executor.resize(executor.max_blocks)
    adapters = []
    matrices = random_adapter(spec, options.rank)
    for at in range(max(options.rows)):  # the same numbers, each in memory of its own
        adapters.append(device.pack_adapter(matrices, spec, options.dtype))
        adapters[-1].place()
        executor.add_adapter(f"adapter-{at}", adapters[-1])
    print(f"{torch.cuda.get_device_name()}, {options.dtype}, rank {options.rank}, {options.layers} layers")
    for rows in options.rows:
        measure(executor, adapters, rows, options.rounds)
    prompts(executor, 5)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
