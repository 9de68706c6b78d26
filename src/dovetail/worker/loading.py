"""Loads models in a thread of its own, the most urgent first, so that loading never stalls the turns of others."""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dovetail import messages
from dovetail.engine.devices import Arriving, Device
from dovetail.engine.grammar_library import GrammarLibrary
from dovetail.errors import DovetailError
from dovetail.modelspec import KvKind
from dovetail.node.events import StartLoad
from dovetail.node.ports import Checkpoint
from dovetail.policy.placement import DeviceKind
from dovetail.policy.startup import LoadTimes
from dovetail.policy.streaming import SLOTS, ResidentLayers, streamed_layers
from dovetail.profiles.live import LiveLatency
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.store.loading.loader import LoaderConfig, Ticket
from dovetail.types import ModelCard, Speculation
from dovetail.worker.draft_model import DraftModel
from dovetail.worker.due_queue import DueQueue
from dovetail.worker.fetching import Fetched, Fetcher
from dovetail.worker.runner import ModelRunner
from dovetail.worker.speculation import Speculator
from dovetail.worker.weight_cache import Tier, WeightCache

if TYPE_CHECKING:
    from dovetail.engine.executor import ExecutorConfig

log = logging.getLogger("dovetail.worker")

OFF = Speculation("off")
EARLY_S = 0.05  # that a first prompt may wait for the last weights, on the device that others wait for too
LOOK_S = 0.001  # how often weights on their way are looked at
PROGRESS_S = 0.25  # how often a load that runs is spoken of


@dataclass(frozen=True)
class DraftConfig:
    """How to build the draft model of an instance."""

    card: ModelCard
    dtype: str
    kv_bytes: int  # as many blocks as the model itself has
    latency: LiveLatency


@dataclass(frozen=True)
class InstanceConfig:
    """How to build an instance of one model."""

    card: ModelCard
    dtype: str
    kv_bytes: int
    block_size: int
    max_batch: int
    max_turn_tokens: int
    max_tokens: int  # longest sequence that the node can hold
    kv: KvKind = "auto"
    max_adapters: int = 0  # in one iteration; 0 = any number
    speculation: Speculation = OFF
    draft: DraftConfig | None = None
    residency: ResidentLayers | None = None  # of the model; None = all of its layers stay on the device
    unloaded_bytes: int = 0  # of it, that are not loaded but read from the disk with every iteration
    files: LoaderConfig = field(default_factory=LoaderConfig)  # how the disk is read
    verify: bool = False  # compare weights that are mapped without a pool with their checksums

    @property
    def size_bytes(self) -> int:
        """Of all weights that are loaded."""
        return sum(card.size_bytes for card in self.cards) - self.unloaded_bytes

    @property
    def cards(self) -> tuple[ModelCard, ...]:
        """Of the model, and of its draft."""
        return (self.card, self.draft.card) if self.draft is not None else (self.card,)


class LoadResult(NamedTuple):
    instance: int
    model: str
    runner: ModelRunner | None
    loaded: messages.Loaded | None
    error: str
    is_cancelled: bool = False  # nothing is wrong with it: nobody waited any more


class _Current(NamedTuple):
    """What is being loaded. Replaced as a whole, so that the other thread sees one state or the next."""

    config: InstanceConfig
    tickets: tuple[Ticket, ...] = ()

    @property
    def progress(self) -> messages.Loading:
        done = sum(ticket.arrived_bytes for ticket in self.tickets)
        return messages.Loading(self.config.card.name, done, self.config.size_bytes)


class LoaderThread:
    """`load` hands in, `results` gives back; `wake` is called from the thread for every result."""

    def __init__(
        self,
        config_of: Callable[[str], InstanceConfig | None],
        wake: Callable[[], None],
        device: Device,
        weight_cache: WeightCache | None = None,
        grammars: GrammarLibrary | None = None,
        is_busy: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_busy`: whether a model that is ready has requests; asked from the thread."""
        self._grammars = grammars
        self._is_busy = is_busy
        self.results: queue.Queue[LoadResult] = queue.Queue()
        self.times = LoadTimes()  # of the loads seen
        self.progress_due_s = 0.0  # when a load that runs is spoken of next
        self.fetcher: Fetcher | None = None  # of models that this machine lacks, where there may be such
        self._config_of = config_of
        self._wake = wake
        self._device = device
        self._weight_cache = weight_cache
        self._orders: DueQueue[tuple[StartLoad, Fetched | None]] = DueQueue()  # with what had to be fetched first
        self._current: _Current | None = None
        self._arrivals = weight_cache.arrivals(self.fetched) if weight_cache is not None else None
        self._thread = threading.Thread(target=self._run, daemon=True, name="loader")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._orders.stop()
        if self._arrivals is not None:
            self._arrivals.stop()

    def load(self, command: StartLoad) -> None:
        """What is fetched first keeps nobody waiting whose weights are here."""
        config = self._config_of(command.model)
        if self.fetcher is not None and config is not None and self.fetcher.lacks(*config.cards):
            self.fetcher.fetch(command, *config.cards)
        elif config is not None and (arriving := self._arriving(config)):
            assert self._arrivals is not None
            self._arrivals.wait_for(command, arriving[0])
        else:
            self._orders.put(command.due_s, (command, None))

    def fetched(self, command: StartLoad, end: Fetched) -> None:
        """From the thread that fetched it, or waited for it."""
        config = self._config_of(command.model)
        is_here = not (end.error or end.is_cancelled)
        if is_here and config is not None and self._arrivals is not None and (draft := self._arriving(config)):
            self._arrivals.wait_for(command, draft[0])
        else:
            self._orders.put(command.due_s, (command, end))

    @property
    def is_loading(self) -> bool:
        is_fetching = self.fetcher is not None and self.fetcher.progress is not None
        return self._current is not None or is_fetching or (self._arrivals is not None and self._arrivals.is_waiting)

    def take_progress(self, now: float) -> list[messages.Loading]:
        """Of the load and the fetch that run now, if they were not spoken of a moment ago."""
        current, fetcher = self._current, self.fetcher
        if now < self.progress_due_s:
            return []
        self.progress_due_s = now + PROGRESS_S
        fetched = fetcher.progress if fetcher is not None else None
        found = [one for one in (current.progress if current is not None else None, fetched) if one is not None]
        return [*found, *(self._arrivals.progress() if self._arrivals is not None else [])]

    def expected_s(self, config: InstanceConfig) -> float:
        """L6: what a load would take, by where the weights are now; a draft's are small beside them."""
        card = config.card
        tier: Tier = "disk"
        if self.fetcher is not None and self.fetcher.lacks(*config.cards):
            tier = "neighbour"
        elif self._arriving(config):
            tier = "remote"
        elif self._weight_cache is not None:
            with suppress(DovetailError, OSError):  # what is wrong with them the load itself will say
                tier = self._weight_cache.tier_of(card.path)
        return self.times.expected_s(card.name, tier, config.size_bytes)

    def _arriving(self, config: InstanceConfig) -> list[ModelCard]:
        """Of the model and its draft, what is still downloading."""
        if self._arrivals is None:
            return []
        with suppress(DovetailError, OSError):  # what is wrong with them the load itself will say
            return self._arrivals.find(*config.cards)
        return []

    def _run(self) -> None:
        for command, fetched in self._orders:
            self.results.put(self._load(command, fetched))
            self._wake()

    def _load(self, command: StartLoad, fetched: Fetched | None) -> LoadResult:
        name = command.model
        started = time.monotonic()
        if fetched is not None and (fetched.error or fetched.is_cancelled):
            return LoadResult(command.instance, name, None, None, fetched.error, fetched.is_cancelled)
        config = self._config_of(name)
        if config is None:
            return LoadResult(command.instance, name, None, None, "the model was unloaded")
        self._current = _Current(config)
        try:
            runner, loaded = build_runner(config, self._device, self._weight_cache, self._grammars, self._watch)
            self._await_weights(runner, started)
        except DovetailError as error:
            return LoadResult(command.instance, name, None, None, str(error))
        except Exception as error:  # whatever a checkpoint can do wrong, the worker lives on
            log.error("%s: loading failed\n%s", name, traceback.format_exc())
            return LoadResult(command.instance, name, None, None, f"{name}: {type(error).__name__}: {error}")
        finally:
            self._current = None
        seconds = time.monotonic() - started
        if fetched is not None:
            loaded, seconds = _with_fetch(loaded, fetched), seconds + fetched.seconds
        self.times.observe(name, loaded.tier, config.size_bytes, seconds)
        return LoadResult(command.instance, name, runner, loaded, "")

    def _await_weights(self, runner: ModelRunner, started: float) -> None:
        """What computes while weights arrive holds the device for that long. So others who compute are not held at all,
        and where nobody does, a first prompt begins with the first layers, if the last ones come soon."""
        executor = runner.executor
        if not isinstance(executor, Arriving):
            return
        while (share := executor.arrived_share()) < 1.0:
            left_s = (time.monotonic() - started) * (1.0 - share) / max(share, 0.01)
            if left_s < EARLY_S and not self._is_busy():
                return
            time.sleep(LOOK_S)

    def _watch(self, tickets: Sequence[Ticket]) -> None:
        assert self._current is not None
        self._current = self._current._replace(tickets=(*self._current.tickets, *tickets))


OnPlace = Callable[[Sequence[Ticket]], None]


def _with_fetch(loaded: messages.Loaded, fetched: Fetched) -> messages.Loaded:
    times = msgspec.structs.replace(loaded.times, open_s=loaded.times.open_s + fetched.seconds)
    return msgspec.structs.replace(loaded, tier=fetched.tier, times=times)


def build_runner(
    config: InstanceConfig,
    device: Device,
    weight_cache: WeightCache | None = None,
    grammars: GrammarLibrary | None = None,
    on_place: OnPlace = lambda _: None,
) -> tuple[ModelRunner, messages.Loaded]:
    card = config.card
    started = time.monotonic()
    checkpoint, tier = _open(config, card, device, weight_cache, on_place)
    opened = time.monotonic()
    context = checkpoint.spec.context_length
    executor = device.executor(checkpoint, _executor_config(config, card, config.dtype, config.kv_bytes, grammars))
    whole = card.spec.encoder is not None
    limits = SchedulerConfig(context, config.max_batch, config.max_turn_tokens, config.max_tokens, whole)
    # A device that begins with an iteration before it has seen the last one's tokens cannot propose what follows them.
    speculates = config.speculation.mode != "off" and not executor.is_pipelined and not whole
    draft = _draft_model(config, device, weight_cache, on_place) if speculates else None
    speculator = Speculator(config.speculation, draft) if speculates else None
    runner = ModelRunner(card, executor, limits, config.block_size, config.max_adapters, speculator)
    return runner, messages.Loaded(
        model=card.name,
        dtype=executor.dtype,
        kv_capacity_tokens=config.max_tokens,
        weight_bytes=executor.weight_bytes + (draft.executor.weight_bytes if draft is not None else 0),
        mapped=executor.copied_bytes < executor.weight_bytes // 2,
        times=messages.LoadTimes(open_s=opened - started, build_s=time.monotonic() - opened),
        tier=tier,
    )


def _draft_model(
    config: InstanceConfig, device: Device, weight_cache: WeightCache | None, on_place: OnPlace
) -> DraftModel | None:
    """None also where it cannot be loaded: nobody needs a draft."""
    draft = config.draft
    if draft is None:
        return None
    try:
        checkpoint, _ = _open(config, draft.card, device, weight_cache, on_place)
        executor = device.executor(
            checkpoint, _executor_config(config, draft.card, draft.dtype, draft.kv_bytes, grammars=None)
        )
    except (DovetailError, OSError) as error:
        log.error("%s: its draft model %s cannot be loaded: %s", config.card.name, draft.card.name, error)
        return None
    spec = checkpoint.spec
    return DraftModel(executor, draft.latency, spec.context_length, (spec.vocab_size, config.card.spec.vocab_size))


def _open(
    config: InstanceConfig, card: ModelCard, device: Device, weight_cache: WeightCache | None, on_place: OnPlace
) -> tuple[Checkpoint, Tier]:
    from dovetail.store import open_checkpoint
    from dovetail.store.checking import check_weights
    from dovetail.store.format.manifest import is_stored, read_manifest
    from dovetail.store.loading.streamed import open_streamed

    if card is config.card and config.residency is not None and device.kind is DeviceKind.CPU:
        streamed = streamed_layers(card.spec.num_layers, config.residency.layers)
        return open_streamed(Path(card.path), streamed, SLOTS, config.files, verify=config.verify), "disk"
    if weight_cache is not None:
        return weight_cache.open(card.path, on_place)
    if config.verify and is_stored(Path(card.path)):
        check_weights(Path(card.path), read_manifest(Path(card.path)))
    return open_checkpoint(card.path), "disk"


def _executor_config(
    config: InstanceConfig, card: ModelCard, dtype: str, kv_bytes: int, grammars: GrammarLibrary | None
) -> ExecutorConfig:
    from dovetail.engine.executor import ExecutorConfig

    residency = config.residency if card is config.card else None
    return ExecutorConfig(
        kv_bytes=kv_bytes,
        block_size=config.block_size,
        dtype=dtype,
        kv=config.kv,
        resident_layers=residency.layers if residency is not None else None,
        in_place=residency is not None and residency.in_place,
        tokenizer_file=card.tokenizer_file,
        eos_token_ids=card.eos_token_ids,
        max_batch=config.max_batch,
        library=grammars,
    )
