"""How fast the engine computes on a GPU: first tokens, tokens of a batch, cold starts and resizes, with random weights.

Everything goes through the executor as a worker has it, Python and the copy of the tokens included. Peers do not run
here: they want an installation of their own, and their figures are given with the version that made them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
import torch

from dovetail.codings import GROUP
from dovetail.engine.devices.cuda.device import CudaDevice
from dovetail.engine.devices.cuda.executor import CudaExecutor
from dovetail.engine.executor import ExecutorConfig
from dovetail.errors import ConfigError
from dovetail.layouts import CELLS, packed_bytes
from dovetail.modelspec import FP8, ModelSpec
from dovetail.node.ports import HostTensor
from dovetail.sched.turn import Turn, TurnRow
from dovetail.types import SamplingParams
from dovetail_bench.shapes import SHAPES

BLOCK = 16
PROMPTS = (128, 1024, 3900)
BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (256, 1024)
UNEVEN = (256,) * 31 + (100_000,)  # contexts of one batch
BESIDE = ((32, 128), (32, 512), (128, 256))  # rows that decode at 256, and tokens of a prompt in the same iteration
MODELS = {name: SHAPES[name] for name in ("0.5B", "1B", "8B")}
_GREEDY = SamplingParams(max_tokens=1 << 20, seed=0, temperature=0.0)
_WARM_UPS, _STEPS = 4, 24
LARGE_CACHE = 64 << 30  # of which one half comes and goes
LAYOUTS = {"16": "plain", "8": CELLS["int8"], "4": CELLS["int4"], FP8: "plain"}  # by precision


class Cell(msgspec.Struct, frozen=True):
    model: str
    metric: str  # "ttft 128", "tpot 8 @ 1024", …
    ms: float  # median
    slowest_ms: float
    least_ms: float  # weights and cache over the memory's speed, or products over the units'; the larger

    @property
    def share(self) -> float:
        return self.least_ms / self.ms


class PinnedCheckpoint:
    """Random weights in pinned memory, as in a registered pool; tensors of one shape share their bytes, and where
    matrices are not quantised, all share those of the largest."""

    in_place = True

    def __init__(self, spec: ModelSpec, precision: str = "16") -> None:
        self.spec = spec
        self._shapes = dict(spec.tensors())
        self._layout = LAYOUTS[precision]
        largest = max(math.prod(shape) for shape in self._shapes.values()) if self._layout == "plain" else 1 << 16
        values = torch.empty(largest, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
        ones = torch.ones(max(spec.hidden_size, spec.head_dim), dtype=torch.bfloat16)
        self._values = values.cpu().pin_memory().view(torch.uint8).numpy().data
        self._ones = ones.pin_memory().view(torch.uint8).numpy().data
        self._coded: dict[tuple[int, ...], memoryview] = {}

    def pieces(self, name: str) -> Sequence[HostTensor]:
        shape = self._shapes[name]
        if self._layout != "plain" and len(shape) > 1:
            return [HostTensor("f32", shape, self._codes(shape), self._layout)]
        source = self._ones if "norm." in name else self._values
        return [HostTensor("bf16", shape, source[: 2 * math.prod(shape)])]

    def _codes(self, shape: tuple[int, ...]) -> memoryview:
        """Any codes, and one scale."""
        if shape not in self._coded:
            size = packed_bytes(self._layout, "f32", shape)
            scales = math.prod(shape) // GROUP
            data = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
            data[-2 * scales :].view(torch.float16).fill_(0.02 / 64)
            self._coded[shape] = data.cpu().pin_memory().numpy().data
        return self._coded[shape]

    def close(self) -> None:
        """The next cold start reads the same bytes."""


class GpuBench:
    def __init__(
        self, device: str, model: str, precision: str = "16", tick: Callable[[str], None] = lambda text: None
    ) -> None:
        if model not in MODELS:
            raise ConfigError(f"--models: {model!r} is none of {', '.join(MODELS)}")
        if precision not in LAYOUTS:
            raise ConfigError(f"--precisions: {precision!r} is none of {', '.join(LAYOUTS)}")
        self.model = (
            model if precision == "16" else f"{model}, {precision if precision == FP8 else precision + ' bits'}"
        )
        self.precision = precision
        self.spec = MODELS[model]
        self._tick = tick
        self._device = CudaDevice(device)
        self._peaks = self._device.peaks("bf16", "bf16")
        self._checkpoint = PinnedCheckpoint(self.spec, precision)
        free = torch.cuda.mem_get_info()[0] - self.spec.weight_bytes("bf16")
        most = self.spec.kv_bytes_per_token("bf16") * max(BATCHES) * (max(CONTEXTS) + 2 * BLOCK + 4 * _STEPS)
        self._kv_bytes = min(int(free * 0.8), most)

    def run(self) -> list[Cell]:
        executor = self._open()
        executor.resize(executor.max_blocks)
        try:
            cells = [self._first_token(executor, tokens) for tokens in PROMPTS]
            for context in CONTEXTS:
                cells += [self._decode(executor, f"{batch} @ {context}", [context] * batch) for batch in BATCHES]
            if self.spec.context_length >= max(UNEVEN) + 4 * _STEPS:
                cells.append(self._decode(executor, f"{len(UNEVEN) - 1} @ {UNEVEN[0]} + 1 @ {UNEVEN[-1]}", UNEVEN))
            cells += [self._mixed(executor, batch, tokens) for batch, tokens in BESIDE]
        finally:
            executor.close()
        return [*cells, self._switch(), self._cold_start(), *self._resizes()]

    def _open(self) -> CudaExecutor:
        dtype = FP8 if self.precision == FP8 else "auto"
        config = ExecutorConfig(kv_bytes=self._kv_bytes, block_size=BLOCK, max_batch=max(BATCHES), dtype=dtype)
        return self._device.executor(self._checkpoint, config)

    def _cell(self, metric: str, seconds: Sequence[float], least_s: float) -> Cell:
        self._tick(f"{self.model}: {metric}")
        return Cell(self.model, metric, median(seconds) * 1e3, max(seconds) * 1e3, least_s * 1e3)

    def _first_token(self, executor: CudaExecutor, tokens: int) -> Cell:
        row = _row(0, [(7 * i) % 997 for i in range(tokens)], 0, tokens, list(range(-(-tokens // BLOCK))))
        seconds = [_timed(lambda: executor.run(Turn((row,)))) for _ in range(_WARM_UPS + 7)]
        return self._cell(f"ttft {tokens}", seconds[_WARM_UPS:], self._least_s(tokens, 1, 0))

    def _decode(self, executor: CudaExecutor, what: str, contexts: Sequence[int]) -> Cell:
        decoding, batch = Decoding(executor, contexts), len(contexts)
        seconds = [decoding.step() for _ in range(_WARM_UPS + _STEPS)]
        return self._cell(f"tpot {what}", seconds[_WARM_UPS:], self._least_s(batch, batch, sum(contexts)))

    def _mixed(self, executor: CudaExecutor, batch: int, tokens: int) -> Cell:
        """One iteration of a batch that decodes and of a prompt beside it."""
        decoding = Decoding(executor, [256] * batch)
        blocks = list(range(decoding.num_blocks, decoding.num_blocks + -(-tokens // BLOCK)))
        prompt = _row(batch, [(7 * i) % 997 for i in range(tokens)], 0, tokens, blocks)
        seconds = [decoding.step(prompt) for _ in range(_WARM_UPS + _STEPS)]
        least_s = self._least_s(batch + tokens, batch + 1, batch * 256)
        return self._cell(f"{batch} @ 256 beside a prompt of {tokens}", seconds[_WARM_UPS:], least_s)

    def _least_s(self, rows: int, logit_rows: int, cached_tokens: int) -> float:
        spec = self.spec
        head = spec.vocab_size * spec.hidden_size
        body = spec.num_parameters() - head * (1 if spec.tied_embeddings else 2)
        in_fp8 = self.precision == FP8  # twice as many products a second; the head has 16 bits
        bits = 8.0 if in_fp8 else float(self.precision)
        if LAYOUTS[self.precision] != "plain":
            bits += 16 / GROUP
        read = (body * bits + head * (16.0 if in_fp8 else bits)) / 8 + cached_tokens * spec.kv_bytes_per_token("bf16")
        products = 2 * (body * rows / (2.0 if in_fp8 else 1.0) + head * logit_rows)
        return max(read / self._peaks.bandwidth, products / self._peaks.flops)

    def _resizes(self) -> list[Cell]:
        """The cache from a half to the whole and back while a batch decodes: what its longest token waited for."""
        self._kv_bytes = min(LARGE_CACHE, int((torch.cuda.mem_get_info()[0] - self.spec.weight_bytes("bf16")) * 0.9))
        executor = self._open()
        half = executor.max_blocks // 2
        executor.resize(half)
        decoding = Decoding(executor, [256] * 8)
        try:
            usual = median(decoding.step() for _ in range(_WARM_UPS + _STEPS))
            grow, shrink = [], []
            for _ in range(3):
                grow.append(_timed(lambda: executor.resize(executor.max_blocks)) + decoding.step() - usual)
                shrink.append(_timed(lambda: executor.resize(half)) + decoding.step() - usual)
        finally:
            executor.close()
        size = (executor.max_blocks - half) * BLOCK * self.spec.kv_bytes_per_token("bf16") / 2**30
        what = f"{size:.1f} GiB more cache, added to a token", f"{size:.1f} GiB less"
        return [self._cell(what[0], grow, 0.0), self._cell(what[1], shrink, 0.0)]

    def _switch(self) -> Cell:
        """Two instances that decode in turns, against one after itself."""
        pair = [self._open(), self._open()]
        try:
            for executor in pair:
                executor.resize(executor.max_blocks)
            first, second = (Decoding(executor, [256] * 8) for executor in pair)
            for _ in range(_WARM_UPS):
                first.step(), second.step()
            alone = median(first.step() for _ in range(_STEPS))
            in_turns = []
            for _ in range(_STEPS):
                second.step()
                in_turns.append(max(first.step() - alone, 0.0))
        finally:
            for executor in pair:
                executor.close()
        return self._cell("after another model's iteration, added", in_turns, 0.0)

    def _cold_start(self) -> Cell:
        seconds = []
        for _ in range(4):
            started = time.perf_counter()
            executor = self._open()
            executor.resize(64)
            executor.run(Turn((_row(0, [(7 * i) % 997 for i in range(128)], 0, 128, list(range(8))),)))
            seconds.append(time.perf_counter() - started)
            executor.close()
        return self._cell("cold start to the first token of 128", seconds[1:], 0.0)


class Decoding:
    """A batch that decodes, a token for each with every step."""

    def __init__(self, executor: CudaExecutor, contexts: Sequence[int]) -> None:
        self._executor = executor
        self.num_blocks = 0
        self._sequences: list[tuple[list[int], list[int]]] = []
        for context in contexts:
            first, self.num_blocks = self.num_blocks, self.num_blocks - (-(context + 4 * _STEPS) // BLOCK)
            self._sequences.append(([7] * (context + 1), list(range(first, self.num_blocks))))

    def step(self, *prompts: TurnRow) -> float:
        """Seconds that it took."""
        rows = [_row(i, tokens, len(tokens) - 1, 1, blocks) for i, (tokens, blocks) in enumerate(self._sequences)]
        started = time.perf_counter()
        outcome = self._executor.run(Turn((*rows, *prompts)))
        took_s = time.perf_counter() - started
        for result in outcome.rows:
            if result.sequence < len(self._sequences):
                self._sequences[result.sequence][0].append(result.token)
        return took_s


def _row(index: int, tokens: list[int], start: int, count: int, blocks: list[int]) -> TurnRow:
    return TurnRow(index, tokens, start, count, blocks, len(tokens), _GREEDY, samples=start + count == len(tokens))


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
