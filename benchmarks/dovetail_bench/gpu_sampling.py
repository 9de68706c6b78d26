"""What choosing tokens costs on a GPU: decoding with different sampling parameters, beside greedy decoding.

Goes through the scheduler and the executor as a worker does, with iterations launched ahead; without HTTP. The weights
are random, so that logits are flat: hard for top-p, whose filter keeps tens of thousands of tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from dovetail.engine.devices.cuda.device import CudaDevice
from dovetail.engine.executor import ExecutorConfig
from dovetail.errors import ConfigError
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.sched.sequence import Sequence as Tokens
from dovetail.types import Grammar, ModelCard, SamplingParams
from dovetail.worker.runner import ModelRunner
from dovetail_bench.gpu_engines import BLOCK, MODELS, PinnedCheckpoint

BATCHES = (1, 8, 32, 128, 256)
SCHEMA_ROWS = 16  # of the kind "schema", at most; the other rows are as in "top-p + penalties"
_SCHEMA = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 600}
_STEPS, _WARM_UPS, _ROUNDS = 40, 8, 3
_MAX_TOKENS = 1 << 20

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top-p": {"top_p": 0.9},
    "top-p + penalties": {
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    },
    "top-k 50": {"top_k": 50},
    "logprobs 5": {"logprobs": 5},
    "schema": {"temperature": 1.0},
}


class SamplingCell(msgspec.Struct, frozen=True):
    model: str
    kind: str
    batch: int
    context: int
    ms: float  # of a token, median of the rounds
    of_greedy: float  # the time of a greedy token over this one's


class SamplingBench:
    def __init__(self, device: str, model: str, tick: Callable[[str], None] = lambda text: None) -> None:
        if model not in MODELS:
            raise ConfigError(f"--model: {model!r} is none of {', '.join(MODELS)}")
        self._model, self._spec, self._tick = model, MODELS[model], tick
        self._device = CudaDevice(device)
        self._next_id = 0

    def run(self, batches: Sequence[int], kinds: Sequence[str], context: int, folder: Path) -> list[SamplingCell]:
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown:
            raise ConfigError(f"--kinds: {unknown[0]!r} is none of {', '.join(KINDS)}")
        runner = self._open(max(batches), context, byte_tokenizer(folder, self._spec.vocab_size))
        cells = []
        try:
            for batch in batches:
                times: dict[str, list[float]] = {kind: [] for kind in kinds}
                for _ in range(_ROUNDS):  # in turns, so that a change of the card's clocks meets all of them
                    for kind in kinds:
                        times[kind].append(self._decode_s(runner, kind, batch, context))
                greedy = median(times["greedy"]) if "greedy" in times else float("nan")
                for kind, each in times.items():
                    self._tick(f"{self._model}: {kind}, batch {batch}")
                    took = median(each)
                    cells.append(SamplingCell(self._model, kind, batch, context, took * 1e3, greedy / took))
        finally:
            runner.close()
        return cells

    def _open(self, batch: int, context: int, tokenizer: Path) -> ModelRunner:
        spec = self._spec
        length = context + 2 * (_STEPS + _WARM_UPS)
        kv_bytes = spec.kv_bytes_per_token("bf16") * BLOCK * batch * (-(-length // BLOCK) + 1)
        config = ExecutorConfig(
            kv_bytes=kv_bytes, block_size=BLOCK, max_batch=batch, tokenizer_file=str(tokenizer), eos_token_ids=(2,)
        )
        executor = self._device.executor(PinnedCheckpoint(spec), config)
        limits = SchedulerConfig(spec.context_length, batch, 8192, spec.context_length)
        card = ModelCard(self._model, "", spec, str(tokenizer))
        runner = ModelRunner(card, executor, limits, BLOCK)
        runner.resize(executor.max_blocks)
        return runner

    def _decode_s(self, runner: ModelRunner, kind: str, batch: int, context: int) -> float:
        """Of one iteration, over many that follow each other."""
        sequences = [self._sequence(kind, place, context) for place in range(batch)]
        for sequence in sequences:
            runner.scheduler.enter_as_computed(sequence)
        for _ in range(_WARM_UPS):
            runner.iterate(sequences, goes_on=True)
        started = time.perf_counter()
        for _ in range(_STEPS):
            runner.iterate(sequences, goes_on=True)
        took_s = (time.perf_counter() - started) / _STEPS
        lengths = {len(sequence.tokens) - context for sequence in sequences}
        assert lengths == {_STEPS + _WARM_UPS}, f"{kind}: a sequence ended early, {lengths}"
        for sequence in sequences:
            runner.drop(sequence)
        runner.scheduler.pool.drop_cache()
        return took_s

    def _sequence(self, kind: str, place: int, context: int) -> Tokens:
        self._next_id += 1
        options: dict[str, Any] = KINDS[kind]
        if kind == "schema":
            grammar = Grammar("json_schema", json.dumps(_SCHEMA))
            options = options | {"grammar": grammar} if place < SCHEMA_ROWS else KINDS["top-p + penalties"]
        content = [3 + (7 * i + place) % 250 for i in range(context)]
        sampling = SamplingParams(max_tokens=_MAX_TOKENS, seed=self._next_id, **options)
        return Tokens(self._next_id, f"bench-{self._next_id}", 0, content, context, sampling)


def byte_tokenizer(folder: Path, vocab_size: int) -> Path:
    """A tokenizer.json of bytes and words that nobody writes, for models with random weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = folder / f"bytes-{vocab_size}.json"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: at + 3 for at, letter in enumerate(alphabet)}
    vocabulary |= {f"w{at}": at for at in range(len(vocabulary), vocab_size)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(path))
    return path
