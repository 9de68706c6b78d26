"""A model instance on a GPU: weights, KV memory and iterations that are launched and collected.

Implements `node.ports.Executor`. Several live in one process and one context and share one stream, so that their
iterations follow each other without the device being waited for as a whole.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from dovetail.engine.adapters import PackedAdapter
from dovetail.engine.devices.cuda.adapters import BoundAdapters, CudaAdapter
from dovetail.engine.devices.cuda.arena import CudaArena
from dovetail.engine.devices.cuda.attention import DecodeScratch
from dovetail.engine.devices.cuda.batch import GreedyRows, MixedAttention, build, only_greedy
from dovetail.engine.devices.cuda.block_table import BlockTable
from dovetail.engine.devices.cuda.chunks import ChunkSteps, chunk_rows
from dovetail.engine.devices.cuda.copier import HostCopier
from dovetail.engine.devices.cuda.graphs import CapturedSteps, DecodeSteps, GraphMemory
from dovetail.engine.devices.cuda.greedy import greedy
from dovetail.engine.devices.cuda.launched import Launched
from dovetail.engine.devices.cuda.model import CudaModel
from dovetail.engine.devices.cuda.sampling import DeviceSampler
from dovetail.engine.devices.cuda.transfer import to_host
from dovetail.engine.devices.cuda.warming import capture_next, compile_kernels, graphs_ahead
from dovetail.engine.devices.cuda.weights import DeviceWeights
from dovetail.engine.dtypes import TORCH_DTYPES
from dovetail.engine.executor import ExecutorConfig, max_blocks
from dovetail.engine.grammar import Grammars
from dovetail.engine.kv_cache import KVCache
from dovetail.engine.prompt_reader import PIECE_TOKENS, PromptReader, reads_prompt
from dovetail.errors import ConfigError, DeviceLost, UnsupportedModel
from dovetail.modelspec import FP8, ModelSpec, activation_dtype
from dovetail.node.ports import Checkpoint
from dovetail.policy.streaming import streamed_layers
from dovetail.sched.turn import Outcome, RowOutcome, Turn, TurnRow

PARKED = 8  # closed executors whose addresses and graphs are kept; each has some megabytes of scratch memory


class SharedStreams:
    """What the models of one device share: a stream for iterations, one each for weights and adapters on their way and
    for layers that are streamed; and the executors of models that have gone, for models of the same shape."""

    def __init__(self, device: torch.device, num_processors: int) -> None:
        self.device = device
        self.num_processors = num_processors
        self.stream = torch.cuda.Stream(device)
        self.adapter_stream = torch.cuda.Stream(device)
        self.slot_stream = torch.cuda.Stream(device)
        self.copier = HostCopier(device)
        self.graph_memory = GraphMemory(device)
        self._parked: list[CudaExecutor] = []
        self._parking = threading.Lock()

    def park(self, executor: CudaExecutor) -> None:
        """It is closed but for its addresses and graphs."""
        with self._parking:
            self._parked.append(executor)
            oldest = self._parked.pop(0) if len(self._parked) > PARKED else None
        if oldest is not None:
            oldest.dismantle()

    def take_parked(self, checkpoint: Checkpoint, config: ExecutorConfig) -> CudaExecutor | None:
        """The one that has just been closed, if it fits: its memory may still be mapped."""
        shape = _shape_of(checkpoint, config)
        with self._parking:
            for executor in reversed(self._parked):
                if executor.shape == shape:
                    self._parked.remove(executor)
                    return executor
        return None

    def check(self) -> None:
        """Whether the device still answers: after a fault every later call fails, of every model."""
        try:
            self.stream.query()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise DeviceLost(f"the GPU {self.device.index} does not answer any longer: {reason}") from error


def lacking_on_gpu(spec: ModelSpec) -> str | None:
    """What a model needs that the GPU's layers do not compute; None = nothing."""
    if spec.encoder is not None:
        return "attention in both directions (an encoder)"
    if spec.parallel_block:
        return "attention and MLP side by side (parallel_block)"
    if not spec.pre_norm:
        return "a layer with norms behind attention and MLP only (pre_norm = false)"
    if spec.mla is not None:
        return "attention over latents (mla)"
    if spec.attention_sinks:
        return "a softmax with a sink (attention_sinks)"
    if spec.moe is not None and (spec.moe.biases or spec.moe.limit or spec.moe.shared_size or spec.moe.groups > 1):
        return "experts with biases, limits, groups or a shared one (moe)"
    return "a norm over all heads of q and k at once (qk_norm_whole)" if spec.qk_norm_whole else None


class CudaExecutor:
    is_pipelined = True

    def __init__(self, checkpoint: Checkpoint, config: ExecutorConfig, device: SharedStreams, max_batch: int) -> None:
        """Takes the checkpoint over: it is closed when its bytes are on the device, or with the model if some stay."""
        self.spec = spec = checkpoint.spec
        _check(spec, config)
        self.shape = _shape_of(checkpoint, config)
        self.level = "cuda"
        self.dtype = gpu_dtype(config.dtype, checkpoint.pieces("embed.weight")[0].dtype)
        dtype = TORCH_DTYPES[activation_dtype(self.dtype)]
        self._device = device
        self.max_blocks = max_blocks(config, spec.kv_bytes_per_token(self.dtype) * config.block_size)
        self._weights = _weights(checkpoint, dtype, device, config, in_fp8=self.dtype == FP8)
        self.arrived_share = self._weights.arrived_share
        self._checkpoint: Checkpoint | None = checkpoint
        self._model: CudaModel | None = CudaModel(spec, self._weights, device.device)
        self.weight_bytes = self.copied_bytes = self._weights.num_bytes
        self._cache = KVCache(spec, dtype, config.block_size, self.max_blocks, arena=self._make_cache_arena)
        shapes = self._model.attention_shapes()
        self._scratch = DecodeScratch(max_batch, shapes[0], device.num_processors, device.device)
        longest = min(spec.context_length, self.max_blocks * config.block_size)
        width = -(-longest // config.block_size) + 1
        capturable = self._weights.has_arrived if self._model.is_capturable else lambda: False
        self._steps = CapturedSteps(capturable, device.graph_memory)
        self._used = torch.cuda.Event()  # the stream is past all that this model has asked of it
        self._adapters = BoundAdapters(dtype, device.device)
        self._table = BlockTable(max_batch, width, device.device)
        shared = (self._model, self._cache.addresses(), self._scratch, self._steps, self._adapters)
        self._attention_of = partial(MixedAttention, shapes, self._scratch, device.num_processors)
        self._decode = DecodeSteps(*shared, max_batch, self._table, device.num_processors)
        self._chunk = ChunkSteps(*shared, max_batch, self._table, device.num_processors)
        self._grammars = _grammars(spec, config)
        self._sampler = DeviceSampler(spec.vocab_size, max_batch, device.device, self._grammars, dtype)
        self._reader = PromptReader()
        self._failed: list[RowOutcome] = []  # rows of the launched iteration that were not computed
        self._reading: list[TurnRow] = []  # rows of the launched iteration whose prompts are read when it is collected
        self._greedy_rows = GreedyRows()
        self._launched: deque[Launched] = deque(maxlen=2)  # not collected; the second follows the first
        self.was_typical = True
        self._graphs_ahead = graphs_ahead(self._model, dtype, self._decode, self._chunk)
        if not self._weights.reads_host:
            compile_kernels(self.shape, self._model, self._cache, self._decode, self._chunk)
        self._sampler.compile()

    def _make_cache_arena(self, size: int) -> CudaArena:
        self._cache_arena = CudaArena(size, self._device.device)
        return self._cache_arena

    @property
    def kv_committed_bytes(self) -> int:
        return self._cache.committed_bytes

    def run(self, turn: Turn) -> Outcome:
        self.launch(turn)
        return self.collect()

    def states(self, row: TurnRow, cache: KVCache) -> Tensor:
        """Of every token of the row."""
        assert self._model is not None, "the executor is closed"
        batch = build(Turn((row,)), cache.block_size, self.spec.head_dim, self._device.device)
        attend = self._attention_of(batch)
        adapted = self._adapters.of(batch.rows)
        return self._model.states(batch.tokens, batch.positions, batch.slots, cache.addresses(), None, attend, adapted)

    def all_logits(self, row: TurnRow, cache: KVCache) -> Iterator[Tensor]:
        assert self._model is not None
        for piece in self.states(row, cache).split(PIECE_TOKENS):
            yield self._model.head(piece).float()

    def launch(self, turn: Turn) -> None:
        """Queue one iteration. Its outcome is collected before the next one of this instance is launched."""
        assert not self._launched, "the last iteration was not collected"
        assert not self._reading
        rows, self._failed = self._adapters.take_failed(turn.rows)
        self._reading = [row for row in rows if reads_prompt(row)]
        if len(rows) < len(turn.rows) or self._reading:
            turn = Turn(tuple(row for row in rows if not reads_prompt(row)))
            if not turn.rows:
                return
        with torch.inference_mode(), torch.cuda.stream(self._device.stream):
            self._launch(list(turn.rows))

    def launch_next(self, turn: Turn) -> bool:
        """Queue the iteration that follows the launched one: its rows are some of that one's, and their tokens what
        that one is about to choose, which the host need not know. Where it has to (a grammar), it is computed as far as
        its logits, and sampled when the next one is launched or this one is collected."""
        if len(self._launched) != 1 or self._reading or self._failed:
            return False
        before = self._launched[0]
        if not before.is_decode:
            return False
        places = {row.sequence: at for at, row in enumerate(before.sampled)}
        rows = list(turn.rows)
        with torch.inference_mode(), torch.cuda.stream(self._device.stream):
            self._sample_late(before)
            self._launch(rows, [places[row.sequence] for row in rows])
        return True

    def _launch(self, rows: list[TurnRow], previous: Sequence[int] = ()) -> None:
        is_decode = self._is_decode(rows)
        sampled = [row for row in rows if row.samples]
        launched = Launched(sampled, torch.cuda.Event(), is_decode, is_typical=True)
        if self._greedy_rows.has_all(sampled) or (not previous and only_greedy(sampled)):
            launched.sampled, _, launched.tokens = self._forward(rows, previous)
        else:
            self._sampler.admit(sampled)
            launched.sampled, logits = self._forward_to_logits(rows, previous)
            # Of those that follow each other by graphs the texts are not known yet.
            if is_decode and self._sampler.needs_text(sampled):
                launched.logits = logits
            else:
                self._sample(launched, logits)
        self._note(launched)

    def _sample(self, launched: Launched, logits: Tensor) -> None:
        rows = launched.sampled
        if launched.is_decode:
            launched.tokens, launched.failures = self._decode.sample(rows, logits, self._sampler)
            launched.reported = self._sampler.report(rows, logits, self._decode.chosen)
            return
        chosen, launched.failures = self._sampler.choose_first(rows, logits)
        launched.reported = self._sampler.report(rows, logits, chosen)
        launched.tokens = to_host(chosen)

    def _sample_late(self, launched: Launched) -> None:
        """What was computed as far as its logits, now that the texts before it are known."""
        if launched.logits is not None:
            if not self._steps.is_last_user():  # another model's iteration came between, in the same memory
                launched.logits = self._decode.logits(launched.sampled)
            self._sample(launched, launched.logits)
            launched.logits = None
            launched.done.record()
            self._used = launched.done

    def _note(self, launched: Launched) -> None:
        launched.is_typical = self._steps.take_known() and self._weights.has_arrived()
        launched.done.record()
        self._used = launched.done
        self._launched.append(launched)

    def discard(self) -> None:
        """What is launched and not collected is not wanted: once it has run, nothing is left of it but keys and values
        that the next iteration of the same sequences writes again."""
        launched, self._launched = self._launched, deque(maxlen=2)
        self._reading, self._failed = [], []
        self._device.check()
        if len(launched) == 2:  # the second has counted what the first chose
            self._sampler.forget_counts(launched[1].sampled)
        for one in launched:
            one.done.synchronize()
        self._device.check()

    def collect(self) -> Outcome:
        """Wait for the iteration, and say what came of it."""
        reading, self._reading = self._reading, []
        outcomes, self._failed = self._failed, []
        if not reading and not outcomes and self._launched:
            return self._collect()
        outcomes += self._collect().rows if self._launched else ()
        with torch.inference_mode(), torch.cuda.stream(self._device.stream):
            for row in reading:
                outcome = self._reader.run(row, self, self._cache, self._grammars)
                outcomes += [] if outcome is None else [outcome]
            self._device.stream.synchronize()
        self.was_typical = False
        self._let_go_of_source()
        return Outcome(tuple(outcomes))

    def _collect(self) -> Outcome:
        launched = self._launched.popleft()
        if launched.logits is not None:
            with torch.inference_mode(), torch.cuda.stream(self._device.stream):
                self._sample_late(launched)
        launched.done.synchronize()
        self.was_typical = launched.is_typical
        self._let_go_of_source()
        if not launched.sampled:
            return Outcome(())
        return launched.outcome(self._grammars)

    def logits(self, turn: Turn) -> dict[int, Tensor]:
        """The same iteration, but the logits of each sampling sequence instead of its token."""
        with torch.inference_mode(), torch.cuda.stream(self._device.stream):
            sampled, logits = self._forward_to_logits(list(turn.rows))
            values = logits[: len(sampled)].float().cpu()
        return {row.sequence: values[at] for at, row in enumerate(sampled)}

    def add_adapter(self, key: str, adapter: PackedAdapter | None, problem: str = "") -> None:
        """From now on rows may name it; it stays its owner's, who closes it when it was removed here. Without one,
        rows that name it fail with the problem."""
        assert adapter is None or isinstance(adapter, CudaAdapter), "as this device packs them"
        self._adapters.add(key, adapter, problem)

    def remove_adapter(self, key: str) -> None:
        self._adapters.remove(key)

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]] = ()) -> None:
        assert num_blocks <= self.max_blocks
        assert not self._launched, "blocks move between iterations"
        with torch.inference_mode(), torch.cuda.stream(self._device.stream):
            self._cache.move(moves)
            self._used = torch.cuda.Event()
            self._used.record()
        self._cache_arena.in_use = (self._used,)  # what moved has been read
        self._cache.resize(num_blocks)

    def forget(self, sequence: int) -> None:
        self._greedy_rows.forget(sequence)
        self._sampler.forget(sequence)
        self._grammars.forget(sequence)
        self._reader.forget(sequence)

    def close(self) -> None:
        """Waits for nothing but its own iterations and copies: memory goes back in the background. Addresses and graphs
        are kept for a model of the same shape, as there are many: fine-tunes of one model, or the same one again."""
        self._used.synchronize()
        self._launched.clear()
        if self._checkpoint is not None:
            self._weights.wait()
        if self._weights.reads_host:  # until here
            self.dismantle()
        if self._checkpoint is not None:
            self._checkpoint.close()
            self._checkpoint = None
        if self._model is None:
            return
        self._adapters.clear()
        self._table.forget()
        self._cache_arena.in_use = (self._used,)
        self._cache.resize(0)
        self._weights.let_go()
        self._device.park(self)

    def reopen(self, checkpoint: Checkpoint, config: ExecutorConfig) -> None:
        """After `close`, with the weights of another model of this shape."""
        self._grammars = _grammars(self.spec, config)
        self._sampler.reset(self._grammars)
        self._reader = PromptReader()
        self._failed, self._reading, self._greedy_rows = [], [], GreedyRows()
        self._checkpoint = checkpoint
        with ExitStack() as undo:
            undo.callback(self.dismantle)
            self._weights.load(checkpoint)
            undo.pop_all()

    def dismantle(self) -> None:
        """All that `close` has kept."""
        self._steps.close()
        del self._decode, self._chunk, self._attention_of, self._scratch, self._table
        self._model = None
        self._weights.close()
        self._cache.close()

    def prepare_next(self) -> bool:
        """Capture one more graph, between two iterations; False if nothing is left to prepare for now."""
        if self._launched or not self._cache.num_blocks or not self._weights.has_arrived():
            return False
        with torch.inference_mode(), torch.cuda.stream(self._device.stream):
            return capture_next(self._graphs_ahead)

    def _let_go_of_source(self) -> None:
        if self._checkpoint is not None and self._weights.has_arrived() and not self._weights.reads_host:
            self._checkpoint.close()
            self._checkpoint = None

    def _forward(
        self, rows: list[TurnRow], previous: Sequence[int] = ()
    ) -> tuple[list[TurnRow], Tensor | None, Tensor | None]:
        """The rows that sample, their logits, and where the largest of each is, on the host when the stream is."""
        if self._is_decode(rows):
            return rows, *self._decode.run(rows, previous)
        sampled, logits, best = self._forward_prompts(rows)
        if not sampled:
            return [], None, None
        return sampled, logits, to_host(greedy(logits)) if best is None else best

    def _forward_to_logits(self, rows: list[TurnRow], previous: Sequence[int] = ()) -> tuple[list[TurnRow], Tensor]:
        """Logits [at least sampled, vocab]."""
        if self._is_decode(rows):
            return rows, self._decode.logits(rows, previous)
        sampled, logits, _ = self._forward_prompts(rows)
        return sampled, logits

    def _forward_prompts(self, rows: list[TurnRow]) -> tuple[list[TurnRow], Tensor, Tensor | None]:
        """Not the rows' own order; tokens only from graphs, which have found the largest logits anyway."""
        assert self._model is not None, "the executor is closed"
        ordered = chunk_rows(rows)
        kind = self._chunk.kind_of(ordered)
        if kind is not None:
            return ordered.sampled, *self._chunk.run(ordered, kind)
        self._steps.note(f"mixed {sum(row.count for row in rows).bit_length()}")
        batch = build(Turn(tuple(rows)), self._cache.block_size, self.spec.head_dim, self._device.device)
        attend = self._attention_of(batch)
        inputs = (batch.tokens, batch.positions, batch.slots, self._cache.addresses(), batch.sampled_at)
        logits = self._model.forward(*inputs, attend, self._adapters.of(batch.rows))
        return batch.sampled, logits, None

    def _is_decode(self, rows: Sequence[TurnRow]) -> bool:
        return len(rows) <= self._decode.max_batch and all(row.count == 1 and row.samples for row in rows)


def _weights(
    checkpoint: Checkpoint, dtype: torch.dtype, device: SharedStreams, config: ExecutorConfig, *, in_fp8: bool
) -> DeviceWeights:
    layers = checkpoint.spec.num_layers
    streamed = streamed_layers(layers, layers if config.resident_layers is None else config.resident_layers)
    return DeviceWeights(
        checkpoint,
        dtype,
        device.device,
        device.copier,
        in_fp8=in_fp8,
        streamed=streamed,
        slot_stream=device.slot_stream,
        in_place=config.in_place,
    )


def _check(spec: ModelSpec, config: ExecutorConfig) -> None:
    if config.kv == "int8":
        raise ConfigError("kv: int8 is for CPUs; a GPU keeps keys and values in the type that it computes in")
    lacking = lacking_on_gpu(spec)
    if lacking is not None:
        raise UnsupportedModel(f"the family {spec.family} runs on CPUs only: {lacking} is not there on GPUs yet")


def _shape_of(checkpoint: Checkpoint, config: ExecutorConfig) -> tuple[object, ...]:
    """What an executor's addresses and graphs depend on: all but the values, and what is known of the text."""
    spec = checkpoint.spec
    pieces = tuple((one.dtype, one.layout, one.shape) for name, _ in spec.tensors() for one in checkpoint.pieces(name))
    return spec, msgspec.structs.replace(config, tokenizer_file="", eos_token_ids=(), library=None), pieces


def _grammars(spec: ModelSpec, config: ExecutorConfig) -> Grammars:
    return Grammars(Path(config.tokenizer_file), spec.vocab_size, config.eos_token_ids, config.library)


def gpu_dtype(name: str, stored: str) -> str:
    """The type to compute in. "auto": the stored one if it has 16 bits, else bf16, which matrix units are made for."""
    if name == "auto":
        return stored if stored in ("bf16", "f16") else "bf16"
    if name not in ("bf16", "f16", "f32", FP8):
        raise ConfigError(f"dtype: {name!r} is none of auto, bf16, f16, f32, fp8, which GPUs compute in")
    if name == FP8 and torch.cuda.get_device_capability() < (8, 9):
        raise ConfigError(f"dtype: fp8: {torch.cuda.get_device_name()} has no products of 8-bit floats")
    return name
