"""A worker process: one device, every model instance on it, one iteration at a time. The one place where engine and
store meet.

The shell around `sched` and `node`: it owns the socket, the loader thread and the clock. Between two iterations it
takes in all messages, so that an abort frees its blocks before the next one. It knows tokens, no text.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil
import zmq

from dovetail import messages
from dovetail.errors import DovetailError
from dovetail.machine import memory_bytes, process_age_s, usable_cores
from dovetail.node.rotation import Rotation
from dovetail.sched.blocks import BlockPool
from dovetail.sched.scheduler import Completed, Scheduler, SchedulerConfig
from dovetail.sched.turn import Turn
from dovetail.types import FinishReason, ModelCard, Request, TokenEvent

if TYPE_CHECKING:
    from dovetail.engine.executor import CpuExecutor

log = logging.getLogger("dovetail.worker")

POLL_MS = 1000  # how often an idle worker looks whether its parent lives
STATS_S = 1.0
_WAKE = "inproc://loader"


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
    idle_release_s: float  # an instance without requests for this long gives its KV pages back
    parent: int


@dataclass
class Instance:
    card: ModelCard
    executor: CpuExecutor
    scheduler: Scheduler
    turns: int = 0
    turn_tokens: int = 0
    turn_seconds: float = 0.0
    overhead_seconds: float = 0.0
    idle_since: float | None = None  # None = busy, or its pages are released already
    is_released: bool = True  # no KV page has been written since they were last given back


@dataclass(eq=False)
class Loading:
    """A model on its way."""

    message: messages.Load
    held: list[Request] = field(default_factory=list)  # requests that wait for it


class Worker:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, config.node.encode())
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(config.connect)
        self._wake = self._context.socket(zmq.PULL)
        self._wake.bind(_WAKE)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._instances: dict[str, Instance] = {}
        self._rotation = Rotation()
        self._loading: dict[str, Loading] = {}
        self._load_errors: dict[str, str] = {}  # why a model is not here, for requests that crossed with the failure
        self._loads: queue.Queue[Loading | None] = queue.Queue()
        self._loaded: queue.Queue[tuple[Loading, Instance | None, messages.ToGateway]] = queue.Queue()
        self._running = True
        self._stats_due = 0.0
        self._last_turn_end: float | None = None

    # The loop

    def run(self) -> None:
        threading.Thread(target=self._load_forever, daemon=True, name="loader").start()
        self._send(messages.Hello(self._config.node, os.getpid(), self._config.device, process_age_s()))
        while self._running:
            self._receive(wait=not self._has_work())
            model = self._rotation.next(lambda name: self._instances[name].scheduler.has_work)
            if model is not None:
                self._take_turn(self._instances[model])
            else:
                self._last_turn_end = None
            self._tend(time.monotonic())
        self._close()

    def _has_work(self) -> bool:
        return any(instance.scheduler.has_work for instance in self._instances.values())

    def _take_turn(self, instance: Instance) -> None:
        instance.is_released = False
        scheduler = instance.scheduler
        turn = scheduler.next_turn()
        self._report(instance, scheduler.take_failed() if turn is None else self._execute(instance, turn))

    def _report(self, instance: Instance, completed: Completed) -> None:
        for sequence in completed.ended:
            instance.executor.forget(sequence)
        if completed.events:
            self._send(messages.Tokens(instance.card.name, completed.events))

    def _execute(self, instance: Instance, turn: Turn) -> Completed:
        started = time.monotonic()
        try:
            outcome = instance.executor.run(turn)
        except Exception as error:
            log.error("%s: iteration failed\n%s", instance.card.name, traceback.format_exc())
            return instance.scheduler.fail_turn(f"the iteration failed: {type(error).__name__}")
        ended = time.monotonic()
        if self._last_turn_end is not None:
            instance.overhead_seconds += started - self._last_turn_end
        self._last_turn_end = ended
        instance.turns += 1
        instance.turn_tokens += turn.num_tokens
        instance.turn_seconds += ended - started
        return instance.scheduler.complete(outcome)

    def _tend(self, now: float) -> None:
        """What is due by the clock: statistics, pages of idle instances, a parent that is gone."""
        for instance in self._instances.values():
            if self._tend_idle(instance, now):
                self._stats_due = now  # the last state of a burst is reported at once
        is_busy = self._has_work()
        if is_busy and self._stats_due == float("inf"):  # and so is its start
            self._stats_due = now
        if now >= self._stats_due and self._instances:
            self._send(self._stats())
            self._stats_due = now + STATS_S if is_busy else float("inf")
        if self._config.parent and os.getppid() != self._config.parent:
            log.warning("the gateway is gone, leaving")
            self._running = False

    def _tend_idle(self, instance: Instance, now: float) -> bool:
        """Notice when an instance falls idle (by its last token or by an abort) and when it has been for long enough
        to give its pages back; True if one of the two was now."""
        if instance.scheduler.has_work or instance.is_released:
            instance.idle_since = None
            return False
        if instance.idle_since is None:
            instance.idle_since = now
            return True
        if now - instance.idle_since < self._config.idle_release_s:
            return False
        _release_pages(instance)
        return True

    # Messages

    def _receive(self, wait: bool) -> None:
        """Take in everything that has arrived; wait for something if there is nothing else to do."""
        ready = dict(self._poller.poll(self._patience_ms() if wait else 0))
        if self._wake in ready:
            self._wake.recv()
            self._finish_load()
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(messages.decode_for_worker(frame))

    def _patience_ms(self) -> int:
        dues = [
            i.idle_since + self._config.idle_release_s for i in self._instances.values() if i.idle_since is not None
        ]
        if not dues:
            return POLL_MS
        return max(1, min(POLL_MS, int((min(dues) - time.monotonic()) * 1000) + 1))

    def _handle(self, message: messages.ToWorker) -> None:
        match message:
            case messages.Submit(request):
                self._submit(request)
            case messages.Abort(request_id, choice):
                self._abort(request_id, choice)
            case messages.Load():
                self._load(message)
            case messages.Unload(model):
                self._unload(model)
            case messages.Shutdown():
                self._running = False

    def _submit(self, request: Request) -> None:
        instance = self._instances.get(request.model)
        if instance is not None:
            instance.scheduler.add(request)
        elif request.model in self._loading:
            self._loading[request.model].held.append(request)
        else:
            absent = f"model {request.model} is not loaded on {self._config.node}"
            self._refuse([request], self._load_errors.get(request.model, absent))

    def _abort(self, request_id: str, choice: int | None) -> None:
        for instance in self._instances.values():
            instance.scheduler.abort(request_id, choice)
            self._report(instance, instance.scheduler.take_failed())  # no turn may follow to do it
        if choice is None:
            for loading in self._loading.values():
                loading.held = [request for request in loading.held if request.id != request_id]

    def _load(self, message: messages.Load) -> None:
        name = message.card.name
        if name not in self._instances and name not in self._loading:
            self._loading[name] = Loading(message)
            self._load_errors.pop(name, None)
            self._loads.put(self._loading[name])

    def _unload(self, model: str) -> None:
        loading = self._loading.pop(model, None)  # what comes of it is thrown away
        if loading is not None:
            self._refuse(loading.held, "the model was unloaded")
        instance = self._instances.pop(model, None)
        if instance is not None:
            self._rotation.remove(model)
            events = instance.scheduler.abort_all()
            if events:
                self._send(messages.Tokens(model, tuple(events)))
            instance.executor.close()
        self._send(messages.Unloaded(model))

    def _refuse(self, requests: list[Request], error: str) -> None:
        for request in requests:
            events = tuple(
                TokenEvent(request.id, choice, token=None, finish=FinishReason.ERROR, error=error)
                for choice in range(request.num_choices)
            )
            self._send(messages.Tokens(request.model, events))

    def _send(self, message: messages.ToGateway) -> None:
        self._socket.send(messages.encode(message))

    # Loading, in a thread of its own

    def _load_forever(self) -> None:
        wake = self._context.socket(zmq.PUSH)
        wake.connect(_WAKE)
        while (loading := self._loads.get()) is not None:
            self._loaded.put((loading, *self._build(loading.message)))
            wake.send(b"")
        wake.close()

    def _build(self, message: messages.Load) -> tuple[Instance | None, messages.ToGateway]:
        name = message.card.name
        try:
            return build_instance(message, self._config)
        except DovetailError as error:
            return None, messages.LoadFailed(name, str(error))
        except Exception as error:
            log.error("%s: loading failed\n%s", name, traceback.format_exc())
            return None, messages.LoadFailed(name, f"{name}: {type(error).__name__}: {error}")

    def _finish_load(self) -> None:
        loading, instance, answer = self._loaded.get_nowait()
        assert isinstance(answer, messages.Loaded | messages.LoadFailed)
        if self._loading.get(answer.model) is not loading:  # unloaded before it was there
            if instance is not None:
                instance.executor.close()
            return
        del self._loading[answer.model]
        self._send(answer)
        if instance is None:
            assert isinstance(answer, messages.LoadFailed)
            self._load_errors[answer.model] = answer.error
            self._refuse(loading.held, answer.error)
            return
        self._instances[answer.model] = instance
        self._rotation.add(answer.model)
        for request in loading.held:
            instance.scheduler.add(request)
        self._stats_due = 0.0

    # Reports and the end

    def _stats(self) -> messages.Stats:
        instances = tuple(_instance_stats(instance) for instance in self._instances.values())
        return messages.Stats(self._config.node, psutil.Process().memory_info().rss, instances)

    def _close(self) -> None:
        self._loads.put(None)
        for instance in self._instances.values():
            instance.executor.close()
        self._socket.close()


def build_instance(message: messages.Load, config: WorkerConfig) -> tuple[Instance, messages.Loaded]:
    from dovetail.engine.executor import CpuExecutor, ExecutorConfig
    from dovetail.store import open_checkpoint

    card = message.card
    started = time.monotonic()
    checkpoint = open_checkpoint(card.path)
    opened = time.monotonic()
    context = checkpoint.spec.context_length
    executor = CpuExecutor(
        checkpoint,
        ExecutorConfig(
            kv_bytes=message.kv_bytes or config.kv_bytes or memory_bytes()[0] // 10,
            block_size=config.block_size,
            max_tokens=config.max_batch * context,
            dtype=message.dtype,
            tokenizer_file=card.tokenizer_file,
            eos_token_ids=card.eos_token_ids,
        ),
    )
    checkpoint.close()
    executor.resize(executor.max_blocks)
    pool = BlockPool(executor.max_blocks, config.block_size)
    limits = SchedulerConfig(context, config.max_batch, config.max_turn_tokens)
    instance = Instance(card, executor, Scheduler(limits, pool))
    return instance, messages.Loaded(
        model=card.name,
        dtype=executor.dtype,
        kv_capacity_tokens=executor.max_blocks * config.block_size,
        weight_bytes=executor.weight_bytes,
        mapped=executor.copied_bytes < executor.weight_bytes // 2,
        times=messages.LoadTimes(open_s=opened - started, build_s=time.monotonic() - opened),
    )


def _release_pages(instance: Instance) -> None:
    """Forget cached prefixes and give the pages back; the addresses stay, the next request touches fresh pages."""
    pool = instance.scheduler.pool
    pool.drop_cache()
    pool.check()
    assert pool.num_available == pool.target, "an idle instance holds no block"
    instance.executor.resize(0)
    instance.executor.resize(pool.target)
    instance.idle_since = None
    instance.is_released = True


def _instance_stats(instance: Instance) -> messages.InstanceStats:
    scheduler = instance.scheduler
    return messages.InstanceStats(
        model=instance.card.name,
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        blocks_total=scheduler.pool.target,
        blocks_used=scheduler.pool.num_held,
        blocks_cached=scheduler.pool.num_cached,
        kv_committed_bytes=instance.executor.kv_committed_bytes,
        preemptions=scheduler.num_preemptions,
        prefix_queries=scheduler.prefix_queries,
        prefix_hits=scheduler.prefix_hits,
        turns=instance.turns,
        turn_tokens=instance.turn_tokens,
        turn_seconds=instance.turn_seconds,
        overhead_seconds=instance.overhead_seconds,
    )


def _die_with_parent() -> None:
    """Linux: be killed when the gateway dies, however it dies. Elsewhere the loop notices within a second."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def parse_arguments(arguments: list[str] | None = None) -> WorkerConfig:
    parser = argparse.ArgumentParser(prog="dovetail.worker", description="One device of a Dovetail server.")
    parser.add_argument("--node", default="cpu-0")
    parser.add_argument("--connect", required=True, help="ZeroMQ address of the gateway")
    parser.add_argument("--device", default="cpu", choices=["cpu"])
    parser.add_argument("--threads", type=int, default=0, help="0 = every core that it may use")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--max-turn-tokens", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-bytes", type=int, default=0, help="per model; 0 = a tenth of the machine's memory")
    parser.add_argument("--idle-release-s", type=float, default=30.0)
    parser.add_argument("--parent", type=int, default=0, help="leave when this process is gone")
    return WorkerConfig(**vars(parser.parse_args(arguments)))


def _import_engine() -> None:
    """torch and what is built on it. What an import makes stays: looking through it for garbage meanwhile takes an
    eighth of the time, and looking again in the middle of a burst would be no better."""
    gc.disable()
    from dovetail.engine.torch_import import import_torch_for_worker

    import_torch_for_worker()
    import dovetail.engine.executor
    import dovetail.store  # noqa: F401

    gc.freeze()
    gc.enable()


def main() -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    config = parse_arguments()
    # A signal to the whole group is the gateway's to answer: it lets streams finish, then says Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if config.parent:
        _die_with_parent()
    _import_engine()
    import torch

    torch.set_num_threads(config.threads or usable_cores())
    Worker(config).run()


if __name__ == "__main__":
    main()
