"""A model instance on a CPU: weights, KV memory and one method that computes one iteration.

Implements `node.ports.Executor`. Knows one model, keeps no clock, and decides nothing about who runs when. Several live
in one process without knowing of each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from dovetail.engine.adapters import AdapterMatrices, PackedAdapter
from dovetail.engine.dtypes import TORCH_DTYPES, compute_dtype
from dovetail.engine.grammar import Grammars
from dovetail.engine.kv_cache import KVCache
from dovetail.engine.late_rows import LateRows, late_rows_of, wait_for_rows
from dovetail.engine.layer_source import LayerSource, LayerWalk, source_of
from dovetail.engine.model import DecoderModel
from dovetail.engine.native_model import READABLE_LAYOUTS, NativeCall, NativeModel, can_run, readable_types
from dovetail.engine.preemption import PreemptionPoint
from dovetail.engine.prompt_reader import PromptReader, reads_prompt
from dovetail.engine.runner import TorchModel
from dovetail.engine.sampler import sample
from dovetail.engine.verify import verify
from dovetail.engine.weights import Kind, Weights, from_read_only_memory
from dovetail.errors import ConfigError, OutOfMemory, UnsupportedModel
from dovetail.layouts import BY_ROWS, CELLS, GGUF
from dovetail.modelspec import KvKind, ModelSpec
from dovetail.native import TORCH, Ops, select
from dovetail.native.kernel_self_test import trusted_layouts
from dovetail.node.ports import Checkpoint
from dovetail.sched.turn import Outcome, RowOutcome, Turn, TurnRow

log = logging.getLogger("dovetail.engine")


class ExecutorConfig(msgspec.Struct, frozen=True):
    kv_bytes: int  # upper limit of KV memory
    block_size: int = 16
    max_tokens: int = 0  # KV memory for more tokens than this is never of use; 0 = no such limit
    dtype: str = "auto"
    kv: KvKind = "auto"
    weights: Literal["resident", "mapped", "auto"] = "auto"  # auto = in place where the checkpoint allows it
    resident_layers: int | None = None  # on a GPU; the others are streamed from host memory. None = all
    in_place: bool = False  # those are not copied: kernels read them in host memory, where codes need no unpacking
    level: str = "auto"  # of the kernels
    max_batch: int = 0  # rows of one iteration that buffers are made for; 0 = what suits the device
    tokenizer_file: str = ""  # for structured output
    eos_token_ids: tuple[int, ...] = ()
    library: Any = None  # GrammarLibrary of the process; None = its own


class OnCallersCores:
    """How iterations are launched where the cores that compute are the caller's own: nothing happens before the outcome
    is asked for, and nothing would be gained by beginning with the next one."""

    is_pipelined = False
    was_typical = True

    def __init__(self) -> None:
        self._launched: Turn | None = None

    def run(self, turn: Turn) -> Outcome:
        self.launch(turn)
        return self.collect()

    def launch(self, turn: Turn) -> None:
        self._launched = turn

    def launch_next(self, turn: Turn) -> bool:
        return False

    def discard(self) -> None:
        self._launched = None

    def collect(self) -> Outcome:
        turn, self._launched = self._launched, None
        assert turn is not None, "nothing was launched"
        return self._compute(turn)

    def _compute(self, turn: Turn) -> Outcome:
        raise NotImplementedError


class CpuExecutor(OnCallersCores):
    def __init__(self, checkpoint: Checkpoint, config: ExecutorConfig) -> None:
        super().__init__()
        spec = checkpoint.spec
        self.spec = spec
        self.dtype = compute_dtype(config.dtype, checkpoint.pieces("embed.weight")[0].dtype)
        dtype = TORCH_DTYPES[self.dtype]
        ops = _ops(dtype, config.level)
        self.level = ops.level
        self._kernels = ops.kernels
        self._broken: dict[str, str] = {}  # adapters that rows cannot be computed with, and why
        if config.kv == "int8" and ops.kernels is None:
            raise ConfigError(f"kv: int8 needs native kernels, and torch's level is what runs {self.dtype} here")
        in_place = checkpoint.in_place if config.weights == "auto" else config.weights == "mapped"
        weights = _weights(checkpoint, dtype, "mapped" if in_place else "resident", ops)
        self.late_rows: LateRows | None = late_rows_of(checkpoint, weights)
        self.layer_source: LayerSource | None = source_of(checkpoint, weights)
        with from_read_only_memory():
            self._model: NativeModel | TorchModel | None = _model(spec, weights, dtype, ops)
        if self.layer_source is not None:
            self._model.walk = LayerWalk(self.layer_source, spec.num_layers)
        self.weight_bytes = weights.num_bytes
        self.copied_bytes = weights.copied_bytes
        self.max_blocks = max_blocks(config, spec.kv_bytes_per_token(self.dtype, config.kv) * config.block_size)
        self._cache = KVCache(spec, dtype, config.block_size, self.max_blocks, config.kv)
        self._grammars = Grammars(Path(config.tokenizer_file), spec.vocab_size, config.eos_token_ids, config.library)
        self._reader = PromptReader()

    @property
    def kv_committed_bytes(self) -> int:
        return self._cache.committed_bytes

    def _compute(self, turn: Turn) -> Outcome:
        if self._broken and any(row.adapter in self._broken for row in turn.rows):
            return self._without_broken(turn)
        return self._forward_and_sample(turn)

    def _without_broken(self, turn: Turn) -> Outcome:
        failed = [row for row in turn.rows if row.adapter in self._broken]
        outcomes = [RowOutcome(row.sequence, 0, error=self._broken[row.adapter]) for row in failed if row.samples]
        rest = tuple(row for row in turn.rows if row.adapter not in self._broken)
        return Outcome((*outcomes, *(self._forward_and_sample(Turn(rest)).rows if rest else ())))

    def _forward_and_sample(self, turn: Turn) -> Outcome:
        reading = [row for row in turn.rows if reads_prompt(row)]
        with torch.inference_mode():
            if not reading:
                return Outcome(tuple(self._sample(turn)))
            rest = Turn(tuple(row for row in turn.rows if not reads_prompt(row)))
            outcomes = self._sample(rest) if rest.rows else []
            assert self._model is not None, "the executor is closed"
            for row in reading:
                self._await_rows(Turn((row,)))
                outcome = self._reader.run(row, self._model, self._cache, self._grammars, self.preemption)
                outcomes += [] if outcome is None else [outcome]
            return Outcome(tuple(outcomes))

    def _sample(self, turn: Turn) -> list[RowOutcome]:
        if any(row.draft for row in turn.rows):
            return verify(turn, self._forward, self._choose)
        sampled, logits, best = self._forward(turn)
        return sample(logits, sampled, self._grammars, best, self._kernels) if sampled else []

    def _choose(self, logits: torch.Tensor, rows: list[TurnRow], best: Sequence[int] | None) -> list[RowOutcome]:
        return sample(logits, rows, self._grammars, best, self._kernels)

    def logits(self, turn: Turn) -> dict[int, torch.Tensor]:
        """The same iteration, but the logits of each sampling sequence instead of its token."""
        with torch.inference_mode():
            sampled, logits, _ = self._forward(turn)
            return {row.sequence: logits[at] for at, row in enumerate(sampled)}

    def add_adapter(self, key: str, adapter: PackedAdapter | None, problem: str = "") -> None:
        """From now on rows may name it; what it takes is the caller's to count. Rows that name one that there is a
        problem with, or that cannot be computed with here, fail with that."""
        try:
            if adapter is None or not isinstance(self._model, NativeModel):
                raise UnsupportedModel(
                    problem or f"adapters need native kernels; {self.level} computes this model here"
                )
            assert isinstance(adapter, AdapterMatrices), "as this device packs them"
            self._model.add_adapter(key, adapter)
        except UnsupportedModel as error:
            self._broken[key] = str(error)

    def remove_adapter(self, key: str) -> None:
        self._broken.pop(key, None)
        if isinstance(self._model, NativeModel) and self._model.has_adapter(key):
            self._model.remove_adapter(key)

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]] = ()) -> None:
        assert num_blocks <= self.max_blocks
        self._cache.move(moves)
        self._cache.resize(num_blocks)

    @property
    def preemption(self) -> PreemptionPoint | None:
        return self._model.preemption if isinstance(self._model, NativeModel) else None

    @preemption.setter
    def preemption(self, preemption: PreemptionPoint | None) -> None:
        if isinstance(self._model, NativeModel):  # torch's level does not stop
            self._model.preemption = preemption

    def wrap_native(self, wrap: Callable[[NativeCall], NativeCall]) -> bool:
        """For who measures: from now on native calls go through what `wrap` makes of them. False = there are none."""
        if not isinstance(self._model, NativeModel):
            return False
        self._model.call = wrap(self._model.call)
        return True

    def forget(self, sequence: int) -> None:
        self._grammars.forget(sequence)
        self._reader.forget(sequence)

    def close(self) -> None:
        self._model = None
        if self.layer_source is not None:
            self.layer_source.close()
        self._cache.close()

    def _forward(self, turn: Turn) -> tuple[list[TurnRow], torch.Tensor, list[int] | None]:
        assert self._model is not None, "the executor is closed"
        self._await_rows(turn)
        return self._model.forward(turn, self._cache)

    def _await_rows(self, turn: Turn) -> None:
        if self.late_rows is not None:
            wait_for_rows(self.late_rows, turn)
            if self.late_rows.is_complete:
                self.late_rows = None


def serves_as_stored(dtype: str, form: str) -> bool:
    """Whether a model computed in `dtype` is served from matrices of this type or layout as they lie."""
    ops = _ops(TORCH_DTYPES[dtype], "auto")
    if form == dtype or ops.kernels is None:
        return form == dtype
    if form in TORCH_DTYPES:
        return TORCH_DTYPES[form] in readable_types(TORCH_DTYPES[dtype])
    needed = {GGUF: READABLE_LAYOUTS, "int4": CELLS.values()}.get(form, [CELLS.get(form, form)])
    return set(needed) <= set(trusted_layouts(ops.level, READABLE_LAYOUTS))


def _ops(dtype: torch.dtype, level: str) -> Ops:
    ops = select(level)
    return ops if ops.kernels is None or can_run(dtype) else TORCH


def _weights(checkpoint: Checkpoint, dtype: torch.dtype, kind: Kind, ops: Ops) -> Weights:
    if ops.kernels is None:
        return Weights(checkpoint, dtype, kind, ops)
    stored = _matrix_layouts(checkpoint)
    if stored & BY_ROWS.keys():
        log.warning("weights are in the order of an earlier release and are copied at the start; pull the model again")
    is_quantised = any(BY_ROWS.get(layout, layout) in READABLE_LAYOUTS for layout in stored)
    layouts = trusted_layouts(ops.level, READABLE_LAYOUTS) if is_quantised else ()
    return Weights(checkpoint, dtype, kind, ops, readable_types(dtype), layouts)


def _matrix_layouts(checkpoint: Checkpoint) -> set[str]:
    """Of the matrices of the last layer, which has experts if any has; those may be quantised alone."""
    last = f"layers.{checkpoint.spec.num_layers - 1}."
    named = (name for name, shape in checkpoint.spec.tensors() if name.startswith(last) and len(shape) > 1)
    return {checkpoint.pieces(name)[0].layout for name in named}


def _model(spec: ModelSpec, weights: Weights, dtype: torch.dtype, ops: Ops) -> NativeModel | TorchModel:
    if ops.kernels is not None:
        return NativeModel(spec, weights, dtype, ops.kernels, ops.level)
    return TorchModel(DecoderModel(spec, weights, dtype, ops), ops)


def max_blocks(config: ExecutorConfig, block_bytes: int) -> int:
    blocks = config.kv_bytes // block_bytes
    if config.max_tokens:
        blocks = min(blocks, -(-config.max_tokens // config.block_size))
    if blocks == 0:
        raise OutOfMemory(f"KV memory of {config.kv_bytes:,} bytes is less than one block of {block_bytes:,}")
    return blocks
