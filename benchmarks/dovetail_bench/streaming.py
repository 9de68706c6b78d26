"""Models that stay in host memory: what streaming their layers costs, beside the link and beside computing alone.

Through the executor as a worker has it, from a host pool as a server has it; no disk and no HTTP. The copy that is
compared with moves chunks of the same pool, in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import msgspec
import torch

from dovetail.engine.devices.cuda.arena import bytes_at
from dovetail.engine.devices.cuda.device import CudaDevice
from dovetail.engine.devices.cuda.in_place import hybrid
from dovetail.engine.devices.cuda.products import MOST_IN_PLACE
from dovetail.engine.executor import ExecutorConfig
from dovetail.errors import ConfigError
from dovetail.policy.streaming import streamed_layers
from dovetail.sched.turn import Turn, TurnRow
from dovetail_bench.gpu_engines import _GREEDY, BLOCK, LAYOUTS, MODELS, Decoding
from dovetail_bench.pooled_weights import PooledWeights

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
ROWS = (1, 8, 64, 256, 1024, 2048)
ALPHAS = (0.0, 0.125, 0.25, 0.5, 1.0)
_COPY_BYTES, _REPEAT, _WARM_UPS = 4 << 30, 5, 3
_MOST_DECODED = 256  # rows that are sequences; more are a prompt


class StreamCell(msgspec.Struct, frozen=True):
    model: str
    metric: str
    ms: float  # median
    least_ms: float  # the longer of the link, at the copy's speed, and of computing with all layers on the device
    gb_per_s: float  # over the link; 0 = nothing is streamed

    @property
    def share(self) -> float:
        return self.least_ms / self.ms


class StreamingBench:
    def __init__(
        self, device: str, model: str, precision: str, tick: Callable[[str], None] = lambda text: None
    ) -> None:
        if model not in MODELS:
            raise ConfigError(f"--model: {model!r} is none of {', '.join(MODELS)}")
        if precision not in LAYOUTS:
            raise ConfigError(f"--precisions: {precision!r} is none of {', '.join(LAYOUTS)}")
        self.model, self.spec, self._tick = f"{model} {precision}", MODELS[model], tick
        self._precision = precision
        self._device = CudaDevice(device)
        self._weights = PooledWeights(self.spec, self._device, precision)
        self._layer_bytes = sum(
            size
            for name, (_, size) in self._weights.places.items()
            if name.startswith("layers.0.") and "norm." not in name
        )
        self.copy_rate = 0.0  # bytes/s

    def close(self) -> None:
        self._weights.close()

    def run(self, shares: Sequence[float], rows: Sequence[int]) -> list[StreamCell]:
        first = self._open(0.0)  # registers the chunks
        self.copy_rate = self._copied()
        compute = self._all_rows(1.0, rows)
        streamed = self._all_rows(0.0, rows)
        link_s = self._link_s(0.0)
        cells = [self._cell("copy of the pool's chunks", _COPY_BYTES / self.copy_rate, 0.0, _COPY_BYTES)]
        for count in rows:
            cells.append(self._cell(f"{count} rows, all resident", compute[count], 0.0, 0))
            least_s = max(link_s, compute[count])
            cells.append(self._cell(f"{count} rows, none resident", streamed[count], least_s, self._link_bytes(0.0)))
        for share in shares:
            if 0.0 < share < 1.0:
                seconds = self._all_rows(share, rows[:1])[rows[0]]
                least_s = max(self._link_s(share), compute[rows[0]])
                cells.append(
                    self._cell(f"{rows[0]} rows, {share:g} resident", seconds, least_s, self._link_bytes(share))
                )
        if LAYOUTS[self._precision] == "plain" and self._precision != "fp8":
            for count, seconds in self._all_rows(0.0, rows, in_place=True).items():
                least_s = max(link_s, compute[count])
                cells.append(self._cell(f"{count} rows, all in place", seconds, least_s, self._link_bytes(0.0)))
            cells += self._products(rows)
        cells += self._switches(first)
        first.close()
        return cells

    def _open(self, share: float, *, in_place: bool = False) -> Any:
        resident = round(share * self.spec.num_layers)
        dtype = "fp8" if self._precision == "fp8" else "auto"
        kv_bytes = self.spec.kv_bytes_per_token("bf16") * (_MOST_DECODED * 128 + 8192)
        config = ExecutorConfig(
            kv_bytes=kv_bytes,
            block_size=BLOCK,
            max_batch=_MOST_DECODED,
            dtype=dtype,
            resident_layers=resident,
            in_place=in_place,
        )
        executor = self._device.executor(self._weights.open(), config)
        executor.resize(executor.max_blocks)
        return executor

    def _link_bytes(self, share: float) -> int:
        layers = self.spec.num_layers
        return self._layer_bytes * len(streamed_layers(layers, round(share * layers)))

    def _link_s(self, share: float) -> float:
        return self._link_bytes(share) / self.copy_rate

    def _cell(self, metric: str, seconds: float, least_s: float, link_bytes: int) -> StreamCell:
        cell = StreamCell(self.model, metric, seconds * 1e3, least_s * 1e3, link_bytes / seconds / 1e9)
        self._tick(f"{self.model}: {metric}: {cell.ms:.2f} ms, at least {cell.least_ms:.2f}, {cell.gb_per_s:.1f} GB/s")
        return cell

    def _copied(self) -> float:
        """Bytes a second of chunks of the pool that are registered, one after the other."""
        size = min(_COPY_BYTES, self._weights.lease.size_bytes)
        target = torch.empty(size, dtype=torch.uint8, device="cuda")
        pieces = [torch.frombuffer(one, dtype=torch.uint8) for one in self._weights.lease.pieces(0, size)]
        assert all(one.is_pinned() for one in pieces), "chunks are registered when a model is opened"
        times = []
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            at = 0
            for one in pieces:
                target[at : at + len(one)].copy_(one, non_blocking=True)
                at += len(one)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return float(size / min(times[1:]))

    def _all_rows(self, share: float, rows: Sequence[int], *, in_place: bool = False) -> dict[int, float]:
        executor = self._open(share, in_place=in_place)
        try:
            return {count: self._iteration(executor, count) for count in rows}
        finally:
            executor.close()

    def _iteration(self, executor: Any, count: int) -> float:
        if count <= _MOST_DECODED:
            decoding = Decoding(executor, [16] * count)
            return median([decoding.step() for _ in range(_WARM_UPS + _REPEAT)][_WARM_UPS:])
        return median([_prompt(executor, count) for _ in range(_WARM_UPS + _REPEAT)][_WARM_UPS:])

    def _products(self, rows: Sequence[int]) -> list[StreamCell]:
        """One layer's matrices in place, by the share of columns that are summed output by output (α)."""
        shapes = [
            (name, shape) for name, shape in self.spec.tensors() if name.startswith("layers.1.") and len(shape) > 1
        ]
        matrices = []
        for name, shape in shapes:
            begin, size = self._weights.places[name]
            first = torch.frombuffer(self._weights.lease.pieces(begin, begin + size)[0], dtype=torch.uint8)
            matrices.append(bytes_at(first.data_ptr(), size, self._device.device).view(torch.bfloat16).view(shape))
        cells = []
        for count in (count for count in rows if count > MOST_IN_PLACE):
            given = [torch.randn(count, matrix.shape[1], device="cuda", dtype=torch.bfloat16) for matrix in matrices]
            for share in ALPHAS:
                products = [partial(hybrid, x, one, None, share) for x, one in zip(given, matrices, strict=True)]
                seconds = median(_timed(products) for _ in range(4))
                least_s = self._layer_bytes / self.copy_rate
                cells.append(self._cell(f"{count} rows of a layer, α = {share:g}", seconds, least_s, self._layer_bytes))
        return cells

    def _switches(self, first: Any) -> list[StreamCell]:
        """Two models in host memory, each with every iteration after the other's; and one that is opened for it."""
        second = self._open(0.0)
        decoders = [Decoding(executor, [16]) for executor in (first, second)]
        for _ in range(_WARM_UPS):
            for decoder in decoders:
                decoder.step()
        alone = median([decoders[0].step() for _ in range(_REPEAT)])
        turns = median([decoder.step() for _ in range(_REPEAT) for decoder in decoders])
        second.close()
        opened, begun, texts = [], [], []
        for _ in range(4):
            torch.cuda.synchronize()
            started = time.perf_counter()
            executor = self._open(0.0)
            opened.append(time.perf_counter() - started)
            begun.append(_until_first_kernel(executor, self._device))
            executor.close()
            torch.cuda.synchronize()
            started = time.perf_counter()
            executor = self._open(0.0)
            _prompt(executor, 128)
            texts.append(time.perf_counter() - started)
            executor.close()
        streamed = self._link_bytes(0.0)
        return [
            self._cell("after another model's iteration, added", max(turns - alone, 1e-9), 0.0, 0),
            self._cell("opening a model", median(opened[1:]), 0.0, 0),
            self._cell("from launching its first iteration to the end of the first kernel", median(begun[1:]), 0.0, 0),
            self._cell("from opening to the first token of 128", median(texts[1:]), self._link_s(0.0), streamed),
        ]


def _timed(functions: Sequence[Callable[[], object]]) -> float:
    """One after the other by the device's clock, the second time."""
    for function in functions:
        function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for function in functions:
        function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) / 1e3)


def _until_first_kernel(executor: Any, device: CudaDevice) -> float:
    """Of an opened model's first iteration, by the device's clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    model = executor._model
    embed = model.embed

    def marked(*arguments: Any) -> Any:
        rows = embed(*arguments)
        end.record()
        return rows

    model.embed = marked
    stream = device._streams.stream
    stream.synchronize()
    begin.record(stream)
    _prompt(executor, 128)
    model.embed = embed
    return float(begin.elapsed_time(end) / 1e3)


def _prompt(executor: Any, count: int) -> float:
    tokens, blocks = [(7 * i) % 997 for i in range(count)], list(range(-(-count // BLOCK)))
    row = TurnRow(0, tokens, 0, count, blocks, count, _GREEDY, samples=True)
    started = time.perf_counter()
    executor.run(Turn((row,)))
    return time.perf_counter() - started
