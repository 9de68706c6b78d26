"""The shell of a worker: socket, loader thread and clock around `driver`, which computes what the runtime decides.

Between two iterations it takes in messages (all of them, unless that would hold another model's answers), so that an
abort frees its blocks before the next one. It knows tokens, no text.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil
import zmq

from dovetail import messages
from dovetail.engine.devices import Device
from dovetail.engine.devices.opening import open_device
from dovetail.eventlog import open_log
from dovetail.machine import memory_bytes, preferred_dtype, process_age_s, release_memory
from dovetail.node.protocol import Propose
from dovetail.policy.compositions import SERVED
from dovetail.policy.headroom import INFINITY
from dovetail.pulse import Pulse
from dovetail.store.loading.loader import LoaderConfig
from dovetail.worker.adapters import AdapterCache
from dovetail.worker.driver import NodeDriver, is_shared
from dovetail.worker.fetching import NeighbourSharing
from dovetail.worker.grammar_thread import GrammarThread
from dovetail.worker.hosting import Profiles
from dovetail.worker.instances import hosting_of, instance_config
from dovetail.worker.loading import InstanceConfig, LoaderThread, LoadResult
from dovetail.worker.rejoin import ReadyModels, wait_for_gateway, withdraw_all
from dovetail.worker.remote_link import take_keys
from dovetail.worker.runner import ModelRunner
from dovetail.worker.weight_cache import WeightCache
from dovetail.worker.wire import Wire, take_in

log = logging.getLogger("dovetail.worker")

POLL_MS = 1000  # how often an idle worker looks whether its parent lives
STATS_S = 1.0
MIN_NEWS = 0.2  # a load that is expected to take this much more or less than was told is told anew
INTAKE_S = 0.0015  # messages take no longer than this between two iterations that several models wait for
TEND_S = 0.05  # how often a busy worker looks at what is due by the clock
LOW_MEMORY_SHARE = 0.03  # less than this much of the host's memory available is pressure
_WAKE = "inproc://wake"
# What wakes: a grammar that was compiled, an adapter that was read, or else a model that was loaded
_GRAMMAR, _ADAPTER = b"grammar", b"adapter"


@dataclass(frozen=True)
class WorkerConfig:
    node: str
    connect: str
    device: str
    threads: int
    max_batch: int
    max_turn_tokens: int
    block_size: int
    kv_bytes: int
    memory_bytes: int  # weights and KV of everything that is ready; 0 = three quarters of the machine
    idle_release_s: float  # an instance without requests for this long gives its KV pages back
    max_stall: float  # token times that an answer waits for work of other models
    profiles: str  # folder of measured profiles; empty = none
    event_log: str  # file; empty = none
    pool: int  # descriptor of the host pool; -1 = none: files are mapped
    host_keep_alive: float  # seconds after which pool memory that nobody uses is given back; negative = never
    direct_io: str
    readers: int
    parent: int  # leave when this process is gone; 0 = no matter who is
    outlive: float = 0.0  # seconds that it waits for a gateway to come back, with its models; 0 = leave with it
    verify: str = "off"  # load: weights are compared with their checksums when they are loaded
    max_adapters: int = 0  # in one iteration; 0 = any number
    pulse: str = ""  # file that whoever started this process watches; empty = nobody does


class Worker:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._pulse = Pulse(Path(config.pulse) if config.pulse else None)
        self._instance_configs: dict[str, InstanceConfig] = {}
        self._device = open_device(config.device, config.threads)
        self._weight_cache = _attach_weight_cache(config, self._device)
        self._grammars = GrammarThread(lambda: self._grammar_waker.send(_GRAMMAR))
        self._loader = LoaderThread(
            self._instance_configs.get,
            lambda: self._waker.send(b""),
            self._device,
            self._weight_cache,
            self._grammars.library,
            self._is_busy,
        )
        self._loader.start()
        keys = take_keys()
        self._sharing = NeighbourSharing(config.connect, keys, self._loader.fetched)
        self._loader.fetcher = self._sharing.fetcher
        self._wire = Wire(config.node, config.connect, keys)
        self._wake = self._wire.context.socket(zmq.PULL)
        self._wake.bind(_WAKE)
        self._waker, self._grammar_waker, self._adapter_waker = (self._wire.context.socket(zmq.PUSH) for _ in range(3))
        for waker in (self._waker, self._grammar_waker, self._adapter_waker):
            waker.connect(_WAKE)
        self._wire.poller.register(self._wake, zmq.POLLIN)
        self._profiles = _open_profiles(config, self._device)
        self._log = open_log(Path(config.event_log)) if config.event_log else None
        self._driver = NodeDriver(
            config.node,
            self._device.kind,
            self._device.node_bytes(config.memory_bytes),
            SERVED.having(max_stall=config.max_stall),
            self._loader,
            self._clock,
            self._log,
            on_pause=self._pause,
            pulse=self._pulse,
            on_growth=self._fit_pool,
            on_launch=self._tell,
            on_halt=self._pause,
            on_adapter=lambda runner, key: self._adapters.bind(runner, key),
        )
        self._adapters = AdapterCache(
            self._driver, self._device, self._weight_cache, lambda: self._adapter_waker.send(_ADAPTER)
        )
        self._ready = ReadyModels()
        self._moved: set[str] = set()  # models whose weights are elsewhere than when a load was last estimated
        self._process = psutil.Process()
        self._running = True
        self._stats_due = self._pressure_due = self._tend_due = 0.0

    # The loop

    def run(self) -> None:
        self._driver.home.start_log(self._profiles.device)
        self._greet()
        if not self._profiles.exist:
            self._profiles.prepare(self._device.compute_dtype("auto", preferred_dtype()))
        is_idle = True
        while self._running:
            self._pulse.beat()
            self._receive(wait=is_idle and not self._driver.prepare_next())
            is_idle = not self._driver.take_turn() and not self._driver.home.is_touched
            if is_idle:  # else it is told while the next iteration runs
                self._tell()
            self._tend(self._clock())
        self._close()

    def _clock(self) -> float:
        """The gateway's."""
        return time.monotonic() + self._wire.offset_s

    def _greet(self) -> None:
        capacity, models = self._driver.home.node.device.ledger.capacity, tuple(self._instance_configs)
        kind, device = self._device.kind, self._config.device
        more = process_age_s(), kind, capacity, models, self._sharing.address
        self._send(messages.Hello(self._config.node, os.getpid(), device, *more))

    def _rejoin(self) -> None:
        """The gateway is gone or out of reach; its models stay for the next one."""
        withdraw_all(self._driver)
        self._ready.cut(self._instance_configs)
        self._running = wait_for_gateway(self._wire, self._pulse.beat, self._config.outlive, self._is_orphan)
        if self._running:
            self._greet()

    def _is_busy(self) -> bool:
        """A model has requests; by any thread."""
        return any(runner.scheduler.has_work for runner in tuple(self._driver.runners.values()))

    def _is_orphan(self) -> bool:
        return self._config.parent > 0 and os.getppid() != self._config.parent

    def _pause(self) -> None:
        self._receive(wait=False)
        self._tell()

    def _tell(self) -> None:
        """What has come of the last iteration, one message per model."""
        report = self._driver.take_report()
        for model, events in report.tokens.items():
            self._send(messages.Tokens(model, tuple(events)))
        for model in report.gone:
            self._ready.remove(model)
            if model in self._instance_configs:
                self._send(messages.Reclaimed(model))
                self._moved.add(model)
            self._stats_due = 0.0
        if report.notices:
            self._send(messages.Said(tuple(report.notices)))
        if report.gone and not self._driver.runners:
            release_memory()

    def _tend(self, now: float) -> None:
        """What is due by the clock: statistics, pages of idle instances, the host's memory, a parent that is gone."""
        is_busy = self._driver.has_work
        if is_busy and now < self._tend_due:
            return
        self._tend_due = now + TEND_S
        self._adapters.tend()
        for progress in self._loader.take_progress(now):
            if progress.model in self._instance_configs:
                self._send(progress)
        self._sharing.tend(self._driver)
        while self._moved:
            _expect_load(self._driver, self._loader, self._instance_configs.get(self._moved.pop()))
        for runner in tuple(self._driver.runners.values()):
            if runner.reads_layers and self._profiles.heard_speed(runner.card, runner.disk_speed):
                _expect_faster(self._driver, self._profiles, self._instance_configs.get(runner.card.name))
            if _tend_idle(runner, now, self._config.idle_release_s):
                self._stats_due = now  # the last state of a burst is reported at once
        if is_busy and self._stats_due == INFINITY:  # and so is its start
            self._stats_due = now
        if now >= self._stats_due and self._instance_configs:
            self._send(self._stats())
            self._stats_due = now + STATS_S if is_busy else INFINITY
        if now >= self._pressure_due:
            self._pressure_due = now + STATS_S
            _watch_host(self._driver, self._adapters, self._weight_cache)
            if self._weight_cache is not None and self._config.host_keep_alive >= 0:
                self._weight_cache.trim(self._config.host_keep_alive)
        if self._is_orphan():
            log.warning("the gateway is gone, leaving")
            self._running = False

    def _fit_pool(self, free_bytes: int) -> None:
        """One ledger for weights, KV and the host pool: models between uses have what is left of it."""
        if self._weight_cache is not None:
            self._weight_cache.fit(free_bytes)

    # Messages

    def _receive(self, wait: bool) -> None:
        """Take in everything that has arrived; wait for something if there is nothing else to do. Where several models
        have requests, no longer than `INTAKE_S`: a flood for one of them does not hold the others' tokens."""
        ready = self._wire.wait(self._patience_ms() if wait else 0)
        if self._wire.is_cut(ready):
            self._rejoin()
            return
        if ready:  # tokens go out before any word that counts them
            self._tell()
        if self._wake in ready:
            woken_by = self._wake.recv()
            if woken_by == _GRAMMAR:
                self._take_compiled()
            elif woken_by == _ADAPTER:
                self._take_adapter()
            else:
                self._take_load(self._loader.results.get_nowait())
        if self._wire.has_news(ready):
            until = self._clock() + INTAKE_S
            take_in(self._wire.receive, self._take, lambda: self._clock() >= until and is_shared(self._driver))

    def _take(self, message: messages.ToWorker) -> None:
        self._handle(message)
        self._driver.carry_out()

    def _patience_ms(self) -> int:
        idle = [runner.idle_since for runner in self._driver.runners.values() if runner.idle_since is not None]
        dues = [since + self._config.idle_release_s for since in idle]
        due = self._driver.next_due_s()
        if due is not None:
            dues.append(due)
        if self._loader.is_loading:
            dues.append(self._loader.progress_due_s)
        if not dues:
            return POLL_MS
        return max(0, min(POLL_MS, int((min(dues) - self._clock()) * 1000) + 1))

    def _handle(self, message: messages.ToWorker) -> None:
        match message:
            case messages.Ask():
                self._ask(message)
            case messages.Command(order, tokens):
                self._driver.obey(order, tokens)
            case messages.Load():
                self._register(message)
            case messages.Unload(model):
                self._unload(model)
            case messages.DropAdapter(key):
                self._adapters.doom(key)
            case messages.Neighbours(addresses):
                self._sharing.heard(addresses)
            case messages.Shutdown():
                self._running = False

    def _ask(self, message: messages.Ask) -> None:
        answer = self._driver.ask(message.question, message.request, self._awaited(message))
        self._send(messages.Reply(message.number, answer))

    def _awaited(self, message: messages.Ask) -> list[str]:
        """What the request that is proposed has no turn before. A grammar whose tokenizer is still to be fetched is
        compiled with its first iteration."""
        question, request = message.question, message.request
        config = self._instance_configs.get(request.model) if request is not None else None
        if request is None or config is None or not isinstance(question, Propose):
            return []
        id, card = question.request.id, config.card
        has_tokenizer = not self._sharing.lacks(card)
        awaited = ["grammar"] if has_tokenizer and self._grammars.awaits(id, request, card) else []
        return [*awaited, "adapter"] if self._adapters.awaits(id, request.adapter, card, config.dtype) else awaited

    def _take_adapter(self) -> None:
        for id, is_there in self._adapters.take():
            if is_there:
                self._driver.prepared(id, "adapter")
            else:
                self._driver.unprepared(id)

    def _take_compiled(self) -> None:
        for id in self._grammars.take():
            self._driver.prepared(id, "grammar")

    def _register(self, message: messages.Load) -> None:
        name, message = message.card.name, self._sharing.localised(message)
        known = self._instance_configs.get(name)
        if known is not None and known.card != message.card:  # pulled again since
            self._driver.unregister(name)
            known = None
        if known is not None and self._driver.instances_of(name):  # what is ready keeps its form
            layers = message.card.spec.num_layers
            share = (layers if known.residency is None else known.residency.layers) / layers
            same = {"dtype": known.dtype, "kv": known.kv, "speculation": known.speculation, "resident_share": share}
            message = msgspec.structs.replace(message, **same)
        config = self._instance_configs[name] = instance_config(
            message, self._config, self._device, self._driver.home.node.device.ledger.capacity, self._profiles
        )
        self._device.expect_models(sum(one.size_bytes for one in self._instance_configs.values()))
        keep_alive_s = message.keep_alive_s if message.keep_alive_s >= 0 else INFINITY
        hosting = hosting_of(config, self._profiles, keep_alive_s, self._loader.expected_s(config))
        if (loaded := self._ready.again(name, self._driver)) is not None:
            self._send(loaded)
        self._driver.register(name, hosting)

    def _unload(self, model: str) -> None:
        self._instance_configs.pop(model, None)
        self._driver.unregister(model)
        self._tell()
        self._send(messages.Unloaded(model))

    def _take_load(self, result: LoadResult) -> None:
        is_wanted = result.instance in self._driver.instances_of(result.model)  # else it was unloaded on its way
        if result.runner is not None:
            assert result.loaded is not None
            self._driver.loaded(result.instance, result.runner)
            if is_wanted:
                self._send(self._ready.add(result.loaded))
                self._stats_due = 0.0
                self._moved.update(self._instance_configs if result.loaded.tier == "neighbour" else [result.model])
            return
        self._driver.load_failed(result.instance)
        if result.is_cancelled:
            self._send(messages.Reclaimed(result.model))
        elif is_wanted:
            self._send(messages.LoadFailed(result.model, result.error))
            self._driver.unregister(result.model)
            self._instance_configs.pop(result.model, None)
        self._tell()

    def _send(self, message: messages.ToGateway) -> None:
        self._wire.send(message)

    # Reports and the end

    def _stats(self) -> messages.Stats:
        return stats_of(self._driver, self._config.node, self._process.memory_info().rss, self._wire.offset_s)

    def _close(self) -> None:
        self._loader.stop()
        self._sharing.close()
        for runner in self._driver.runners.values():
            runner.close()
        self._adapters.close()
        if self._weight_cache is not None:
            self._weight_cache.close()
        if self._log is not None:
            self._log.close()
        self._wire.close()


def _watch_host(driver: NodeDriver, adapters: AdapterCache, weight_cache: WeightCache | None) -> None:
    """The pool gives way before a model that is ready does."""
    total, available = memory_bytes()
    if available >= total * LOW_MEMORY_SHARE:
        return
    dropped = adapters.drop_idle()
    dropped += weight_cache.drop_unused() if weight_cache is not None else 0
    closed = 0 if dropped else driver.relieve()
    left, given = available >> 20, dropped >> 20
    log.warning("the host has %d MB left; %d MB of the pool dropped, %d idle models closed", left, given, closed)


def _open_profiles(config: WorkerConfig, device: Device) -> Profiles:
    files = LoaderConfig(direct_io=config.direct_io, readers=config.readers)  # type: ignore[arg-type]
    return Profiles(Path(config.profiles) if config.profiles else None, device, files)


def _attach_weight_cache(config: WorkerConfig, device: Device) -> WeightCache | None:
    verify = config.verify == "load"
    if config.pool < 0:
        return None
    return WeightCache.attach(config.pool, config.direct_io, config.readers, device, verify=verify)


def _tend_idle(runner: ModelRunner, now: float, release_s: float) -> bool:
    """Notice when an instance falls idle (by its last token or by an abort) and when it has been for long enough to
    give its pages back; True if one of the two was now."""
    if runner.scheduler.has_work or runner.is_released:
        runner.idle_since = None
        return False
    if runner.idle_since is None or runner.idle_turns != runner.meter.turns:  # it was busy for less than `TEND_S`
        runner.idle_since, runner.idle_turns = now, runner.meter.turns
        return True
    if now - runner.idle_since < release_s:
        return False
    runner.release_pages()
    return True


def stats_of(driver: NodeDriver, node: str, rss_bytes: int, offset_s: float) -> messages.Stats:
    """`offset_s`: what the gateway's clock is ahead."""
    instances: dict[str, messages.InstanceStats] = {}
    for id, runner in driver.runners.items():
        instance, name = driver.home.node.instances[id], runner.card.name
        instances[name] = runner.stats(
            len(instance.running), len(instance.waiting) + len(instance.patient) + len(instance.suspended)
        )
    gaps = sorted(driver.home.gaps.seconds)
    ledger = driver.home.node.device.ledger
    return messages.Stats(
        node,
        rss_bytes,
        tuple(instances.values()),
        memory_budget_bytes=ledger.capacity,
        memory_planned_bytes=ledger.planned,
        resizes=driver.resizes,
        resize_seconds=driver.resize_s,
        overhead_p50_s=gaps[len(gaps) // 2] if gaps else 0.0,
        overhead_p99_s=gaps[len(gaps) * 99 // 100] if gaps else 0.0,
        spans=tuple(
            msgspec.structs.replace(span, started_s=span.started_s + offset_s)
            for runner in driver.runners.values()
            for span in runner.take_spans()
        ),
    )


def _expect_load(driver: NodeDriver, loader: LoaderThread, config: InstanceConfig | None) -> None:
    """A model was loaded, or has gone: what its next load will take is told anew if that is news."""
    hosting = driver.hostings.get(config.card.name) if config is not None else None
    if config is None or hosting is None:
        return
    load_s = loader.expected_s(config)
    if abs(load_s - hosting.load_s) > MIN_NEWS * max(load_s, hosting.load_s):
        driver.register(config.card.name, replace(hosting, load_s=load_s))


def _expect_faster(driver: NodeDriver, profiles: Profiles, config: InstanceConfig | None) -> None:
    """The disk that its layers come from is faster than was thought."""
    hosting = driver.hostings.get(config.card.name) if config is not None else None
    if config is not None and hosting is not None:
        log.info("%s", profiles.explain_streaming(config.card, config.dtype, config.residency))
        latency = profiles.latency(config.card, config.dtype, config.kv, config.residency)
        driver.register(config.card.name, replace(hosting, latency=latency))
