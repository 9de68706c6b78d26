"""A driver in virtual time: a clock that iterations move, executors that check what they are given, loads on demand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sim_builders import make_latency

from dovetail import messages
from dovetail.cluster.controller import Controller
from dovetail.cluster.remote_cluster import RemoteCluster
from dovetail.engine.preemption import PreemptionPoint
from dovetail.errors import RequestError
from dovetail.eventlog import EventLog
from dovetail.modelspec import ModelSpec
from dovetail.node.events import StartLoad
from dovetail.policy.compositions import SERVED, Composition
from dovetail.policy.latency import Latency
from dovetail.policy.memory import Account, Part
from dovetail.policy.placement import DeviceKind, Hosting, NodeFacts
from dovetail.profiles.live import LiveLatency
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.sched.turn import Outcome, RowOutcome, Turn, TurnRow
from dovetail.types import ModelCard, Request, SamplingParams, Slo, TokenEvent
from dovetail.worker.driver import NodeDriver
from dovetail.worker.runner import ModelRunner
from dovetail.worker.speculation import Speculator

BLOCK = 4
KV_BYTES = 1000  # per token
WEIGHT_BYTES = 1_000_000
SPEC = ModelSpec("llama", 100, 8, 1, 1, 1, 8, 8, 256)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class CheckedExecutor:
    """Keeps in each block which tokens were computed into it, and insists on finding them there. One that is pipelined
    begins with the next iteration before the host has seen the tokens of this one."""

    dtype = "f32"
    weight_bytes = WEIGHT_BYTES
    copied_bytes = 0
    was_typical = True
    preemption: PreemptionPoint | None = None

    def __init__(
        self,
        clock: Clock,
        max_blocks: int,
        fails_on: int | None = None,
        token_s: float = 0.001,
        is_pipelined: bool = False,
    ) -> None:
        self.clock = clock
        self.token_s = token_s
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self.is_closed = False
        self.fails_on = fails_on  # a token at which the iteration breaks
        self.content: dict[int, dict[int, int]] = {}
        self.is_pipelined = is_pipelined
        self.num_ahead = 0  # iterations that were begun before they were asked for
        self.num_discarded = 0
        self._launched: deque[tuple[Outcome, float]] = deque()  # what comes of it, and how long it takes

    @property
    def kv_committed_bytes(self) -> int:
        return self.num_blocks * BLOCK * KV_BYTES

    def launch(self, turn: Turn) -> None:
        assert not self._launched, "the last iteration was not collected"
        self._launched.append(self._compute(turn, {}))

    def launch_next(self, turn: Turn) -> bool:
        if not self.is_pipelined:
            return False
        ((before, _),) = self._launched
        self.num_ahead += 1
        self._launched.append(self._compute(turn, {row.sequence: row.token for row in before.rows}))
        return True

    def discard(self) -> None:
        self.num_discarded += len(self._launched)
        self._launched.clear()

    def collect(self) -> Outcome:
        outcome, seconds = self._launched.popleft()
        self._spend(seconds)
        return outcome

    def _spend(self, left_s: float) -> None:
        """The clock goes on, and others are let in as often as they shall be."""
        while self.preemption is not None and self.preemption.every_s < left_s:
            self.clock.now += self.preemption.every_s
            left_s -= self.preemption.every_s
            self.preemption.preempt()
        self.clock.now += left_s

    def _compute(self, turn: Turn, chosen: dict[int, int]) -> tuple[Outcome, float]:
        assert not self.is_closed
        outcomes = []
        for row in turn.rows:
            tokens = [*row.tokens, chosen[row.sequence]] if chosen else row.tokens
            assert row.end <= len(tokens)
            assert all(block < self.num_blocks for block in row.blocks), "beyond the committed memory"
            for position in range(row.start):
                block, offset = row.blocks[position // BLOCK], position % BLOCK
                assert self.content[block][offset] == tokens[position], "another's block"
            for position in range(row.start, row.end):
                self.content.setdefault(row.blocks[position // BLOCK], {})[position % BLOCK] = tokens[position]
            if self.fails_on in tokens:
                raise ArithmeticError("broken")
            if row.samples:
                outcomes.append(self._chosen(row, tokens))
        return Outcome(tuple(outcomes)), self.token_s * turn.num_tokens + 0.005

    def _chosen(self, row: TurnRow, tokens: Sequence[int]) -> RowOutcome:
        """A draft is computed whole, and its first wrong token ends what comes of it."""
        known, further = list(tokens), []
        for position, token in enumerate(row.draft, row.end):
            self.content.setdefault(row.blocks[position // BLOCK], {})[position % BLOCK] = token
        for token in row.draft:
            if next_token(known) != token:
                break
            known.append(token)
            further.append(RowOutcome(row.sequence, next_token(known)))
        return RowOutcome(row.sequence, next_token(tokens), further=tuple(further))

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]] = ()) -> None:
        assert num_blocks <= self.max_blocks
        assert not self._launched, "blocks move between iterations"
        for source, place in moves:
            content = self.content.pop(source, {}) if self.is_pipelined else self.content.pop(source)
            self.content[place] = content  # empty = held for an iteration that was begun and dropped
        self.num_blocks = num_blocks
        self.content = {block: tokens for block, tokens in self.content.items() if block < num_blocks}

    def forget(self, sequence: int) -> None: ...

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


def next_token(tokens: Sequence[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 97


class Listener:
    """A client's end (`cluster.open_requests.Stream`) of every request of a test."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.failed: list[RequestError] = []
        self.num_resumed = 0
        self.num_closed = 0
        self.placed_s: list[float] = []

    def began(self, placed_s: float) -> None:
        self.placed_s.append(placed_s)

    def put(self, event: TokenEvent, now: float) -> None:
        self.events.append(event)

    def fail(self, error: RequestError) -> None:
        self.failed.append(error)

    def resumed(self) -> None:
        self.num_resumed += 1

    def closed(self) -> None:
        self.num_closed += 1

    def take(self) -> list[TokenEvent]:
        events, self.events = self.events, []
        return events


class Loopback:
    """Gateway and worker in one process: what they say goes through the wire's coding, and arrives at once, or only
    when they have said all that they had to say (`is_late`)."""

    def __init__(
        self,
        driver: NodeDriver,
        composition: Composition,
        clock: Clock,
        log: EventLog | None = None,
        *,
        is_late: bool = False,
    ) -> None:
        self.is_late = is_late
        self.driver = driver
        self.clock = clock
        self.listener = Listener()
        self.awaited: dict[str, set[str]] = {}  # by request: what its first turn waits for
        self._to_worker: deque[bytes] = deque()
        name = driver.home.name
        driver._on_said = self.pass_on
        self.cluster = RemoteCluster([NodeFacts(name, driver.home.kind)], composition, self._send, log)
        self.cluster.joined(name, messages.Hello(name, 1, "virtual", 0.0))

    def _send(self, node: str, message: messages.ToWorker) -> None:
        self._to_worker.append(messages.encode(message))
        if not self.is_late:
            self._answer()

    def pump(self) -> bool:
        """Until nobody has anything to say; True if somebody had."""
        is_quiet = True
        while self._to_worker or self.driver.home.outbox or self._has_news():
            is_quiet = False
            self._answer()
            self.driver.carry_out()
            self._tell()
        return not is_quiet

    def pass_on(self) -> None:
        """What the node has just said of itself, tokens before any word that counts them."""
        if not self.is_late:
            while self.driver.home.mailbox:
                self._tell_tokens()
                for notice in self.driver.take_notices():
                    self._receive(messages.Said((notice,)))

    def _answer(self) -> None:
        while self._to_worker:
            self._handle(messages.decode_for_worker(self._to_worker.popleft()))

    def _has_news(self) -> bool:
        driver = self.driver
        return bool(driver.home.mailbox or driver.report.tokens or driver.report.gone)

    def _handle(self, message: messages.ToWorker) -> None:
        if isinstance(message, messages.Ask):
            awaited = self.awaited.get(message.request.id, ()) if message.request is not None else ()
            answer = self.driver.ask(message.question, message.request, awaited)
            self._receive(messages.Reply(message.number, answer))
        else:
            assert isinstance(message, messages.Command)
            self.driver.obey(message.order)

    def _tell(self) -> None:
        self._tell_tokens()
        report = self.driver.take_report()
        self.gone(report.gone)
        if report.notices:
            self._receive(messages.Said(tuple(report.notices)))

    def _tell_tokens(self) -> None:
        told, self.driver.report.tokens = self.driver.report.tokens, {}
        for model, events in told.items():
            self._receive(messages.Tokens(model, tuple(events)))

    def gone(self, models: list[str]) -> None: ...

    def _receive(self, message: messages.ToGateway) -> None:
        known = messages.decode_for_gateway(messages.encode(message))
        assert isinstance(known, messages.Reply | messages.Said | messages.Tokens)
        self.cluster.received(self.driver.home.name, known, self.clock.now)

    def take_turn(self) -> bool:
        """One iteration, or whatever else is due now; False if there is nothing."""
        self.driver.run_timers()
        self.pump()
        while self._wakes():
            self.pump()  # what comes of it is carried out, and somebody may ask again
        moved = self.driver.take_turn()
        return self.pump() or moved or self.driver.home.is_touched

    def _wakes(self) -> bool:
        """Whether it was time, and something came of it."""
        wake_s = self.cluster.next_wake_s()
        if wake_s is None or wake_s > self.clock.now:
            return False
        self.cluster.wake(self.clock.now)
        return bool(self.driver.home.outbox or self._to_worker or self.listener.events)

    def next_due_s(self) -> float | None:
        dues = (self.cluster.next_wake_s(), self.driver.next_due_s())
        return min((due for due in dues if due is not None), default=None)

    @property
    def has_work(self) -> bool:
        return bool(self.cluster.controller.works) or self.driver.has_work


class Rig:
    """A node with models a, b, c…, its controller, and a loader that waits to be told."""

    def __init__(
        self,
        models: str = "abc",
        *,
        memory: int = 10_000_000,
        max_kv_tokens: int = 2000,
        log: EventLog | None = None,
        token_s: float = 0.001,
        max_batch: int = 8,
        is_late: bool = False,
        is_pipelined: bool = False,
        speculator: Callable[[], Speculator | None] = lambda: None,
        latency: Latency | None = None,
        **parameters: Any,
    ) -> None:
        self.latency = latency or make_latency()
        self.speculator = speculator
        self.token_s = token_s
        self.is_pipelined = is_pipelined
        self.max_batch = max_batch
        self.clock = Clock()
        self.commands: list[StartLoad] = []
        self.max_kv_tokens = max_kv_tokens
        self.executors: list[CheckedExecutor] = []
        self.events: dict[tuple[str, int], list[TokenEvent]] = {}
        self.heard_s: dict[tuple[str, int], list[float]] = {}  # when those came
        self.gone: list[str] = []
        self.fails_on: int | None = None
        policy = SERVED.having(**parameters)
        self.on_halt: Callable[[], None] = lambda: None  # while layers of an iteration are awaited
        self.driver = NodeDriver(
            "node", DeviceKind.CPU, memory, policy, self, self.clock, log, on_halt=lambda: self._halted()
        )
        self.link = Loopback(self.driver, policy, self.clock, log, is_late=is_late)
        self.link.gone = self.gone.extend  # type: ignore[method-assign]
        if log is not None:
            self.driver.home.start_log("virtual")
        for model in models:
            self.register(model)

    def register(self, model: str, keep_alive_s: float = 60.0) -> None:
        self.driver.register(model, self.hosting_of(model, keep_alive_s))
        self.link.pump()

    def hosting_of(self, model: str, keep_alive_s: float) -> Hosting:
        return Hosting(
            WEIGHT_BYTES,
            KV_BYTES,
            LiveLatency(self.latency),
            block_tokens=BLOCK,
            max_kv_tokens=self.max_kv_tokens,
            keep_alive_s=keep_alive_s,
        )

    def _halted(self) -> None:
        self.on_halt()
        self.read()

    @property
    def controller(self) -> Controller:
        return self.link.cluster.controller

    def load(self, command: StartLoad) -> None:
        self.commands.append(command)

    def finish_load(self, index: int = 0) -> None:
        command = self.commands.pop(index)
        self.clock.now += 0.01
        blocks = self.max_kv_tokens // BLOCK
        executor = self.make_executor(command.model, blocks)
        self.executors.append(executor)
        card = ModelCard(command.model, "", SPEC, "")
        limits = SchedulerConfig(4096, self.max_batch, max_turn_tokens=16, max_tokens=self.max_kv_tokens - BLOCK)
        self.driver.loaded(command.instance, ModelRunner(card, executor, limits, BLOCK, speculator=self.speculator()))
        self.read()

    def make_executor(self, model: str, blocks: int) -> CheckedExecutor:
        return CheckedExecutor(self.clock, blocks, self.fails_on, self.token_s, self.is_pipelined)

    def submit(
        self, id: str, model: str = "a", prompt: int = 5, tokens: int = 4, age_s: float = 0.0, **options: Any
    ) -> None:
        slo = Slo(options.pop("ttft_s", None), options.pop("tpot_s", None))
        content = tuple((hash_of(id) + i) % 90 for i in range(prompt))
        sampling = SamplingParams(max_tokens=tokens, seed=0, temperature=0.0)
        request = Request(id, model, content, sampling, options.pop("num_choices", 1), slo, **options)
        self.submit_request(request, age_s)

    def submit_request(self, request: Request, age_s: float = 0.0) -> None:
        self.link.cluster.submit(request, self.link.listener, self.clock.now - age_s, self.clock.now)
        self.read()

    def abort(self, id: str, choice: int | None = None) -> None:
        self.link.cluster.abort(id, choice, self.clock.now)
        self.read()

    def unload(self, model: str) -> None:
        """As a gateway does it: its requests end first."""
        for one in self.link.cluster.requests.of_model(model):
            self.link.cluster.abort(one.request.id, None, self.clock.now)
        self.driver.unregister(model)
        self.read()

    def fail_load(self, index: int = 0) -> None:
        command = self.commands.pop(index)
        is_wanted = command.instance in self.driver.instances_of(command.model)
        self.driver.load_failed(command.instance)
        if is_wanted:
            self.unload(command.model)
        self.read()

    def warm(self, model: str) -> None:
        self.link.cluster.warm(model, self.clock.now)
        self.read()

    def step(self) -> bool:
        moved = self.link.take_turn()
        self.read()
        self.check()
        return moved

    def run(self, limit: int = 2000) -> None:
        """Until nothing is left to do, finishing loads as they come."""
        for _ in range(limit):
            if self.commands:
                self.finish_load()
            elif not self.step() and not self.commands:
                due = self.link.next_due_s()
                if not self.link.has_work or due is None:
                    return
                self.clock.now = max(self.clock.now, due)
        raise AssertionError("it never came to an end")

    def read(self) -> None:
        self.link.pump()
        for event in self.link.listener.take():
            told = self.events.setdefault((event.request_id, event.choice), [])
            assert not told or told[-1].finish is None, "something after the end"
            told.append(event)
            self.heard_s.setdefault((event.request_id, event.choice), []).append(self.clock.now)

    def tokens(self, id: str, choice: int = 0) -> list[int | None]:
        return [event.token for event in self.events[id, choice]]

    def check(self) -> None:
        node = self.driver.home.node
        node.device.ledger.check()
        for id, runner in self.driver.runners.items():
            pool = runner.scheduler.pool
            pool.check()
            instance = node.instances[id]
            assert pool.target * BLOCK >= instance.kv_tokens
            held = node.device.ledger.held_of(Account(Part.KV, id))
            assert runner.executor.kv_committed_bytes <= held, "more memory than the ledger knows of"


def expected(id: str, prompt: int = 5, tokens: int = 4) -> list[int]:
    known = [(hash_of(id) + i) % 90 for i in range(prompt)]
    for _ in range(tokens):
        known.append(next_token(known))
    return known[prompt:]


def hash_of(id: str) -> int:
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(id))
