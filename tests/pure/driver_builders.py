"""A driver in virtual time: a clock that iterations move, executors that check what they are given, loads on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sim_builders import make_latency

from dovetail.eventlog import EventLog
from dovetail.modelspec import ModelSpec
from dovetail.node.events import StartLoad
from dovetail.policy.knobs import Knobs
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.profiles.live import LiveLatency
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.sched.turn import Outcome, RowOutcome, Turn
from dovetail.types import ModelCard, Request, SamplingParams, Slo, TokenEvent
from dovetail.worker.driver import NodeDriver
from dovetail.worker.policy import real_knobs
from dovetail.worker.runner import ModelRunner

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
    """Keeps in each block which tokens were computed into it, and insists on finding them there."""

    dtype = "f32"
    weight_bytes = WEIGHT_BYTES
    copied_bytes = 0

    def __init__(self, clock: Clock, max_blocks: int, fails_on: int | None = None, token_s: float = 0.001) -> None:
        self.clock = clock
        self.token_s = token_s
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self.is_closed = False
        self.fails_on = fails_on  # a token at which the iteration breaks
        self.content: dict[int, dict[int, int]] = {}

    @property
    def kv_committed_bytes(self) -> int:
        return self.num_blocks * BLOCK * KV_BYTES

    def launch(self, turn: Turn) -> None:
        self.launched = turn

    def collect(self) -> Outcome:
        turn = self.launched
        assert not self.is_closed
        self.clock.now += self.token_s * turn.num_tokens + 0.005
        for row in turn.rows:
            assert all(block < self.num_blocks for block in row.blocks), "beyond the committed memory"
            for position in range(row.start):
                block, offset = row.blocks[position // BLOCK], position % BLOCK
                assert self.content[block][offset] == row.tokens[position], "another's block"
            for position in range(row.start, row.end):
                self.content.setdefault(row.blocks[position // BLOCK], {})[position % BLOCK] = row.tokens[position]
            if self.fails_on in row.tokens:
                raise ArithmeticError("broken")
        rows = [RowOutcome(row.sequence, next_token(row.tokens)) for row in turn.rows if row.samples]
        return Outcome(tuple(rows))

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]] = ()) -> None:
        assert num_blocks <= self.max_blocks
        for source, place in moves:
            self.content[place] = self.content.pop(source)
        self.num_blocks = num_blocks
        self.content = {block: tokens for block, tokens in self.content.items() if block < num_blocks}

    def forget(self, sequence: int) -> None: ...

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


def next_token(tokens: Sequence[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 97


class Rig:
    """A driver with models a, b, c… and a loader that waits to be told."""

    def __init__(
        self,
        models: str = "abc",
        *,
        memory: int = 10_000_000,
        max_kv_tokens: int = 2000,
        log: EventLog | None = None,
        token_s: float = 0.001,
        max_batch: int = 8,
        **knobs: Any,
    ) -> None:
        self.token_s = token_s
        self.max_batch = max_batch
        self.clock = Clock()
        self.commands: list[StartLoad] = []
        self.max_kv_tokens = max_kv_tokens
        self.executors: list[CheckedExecutor] = []
        self.events: dict[tuple[str, int], list[TokenEvent]] = {}
        self.gone: list[str] = []
        self.fails_on: int | None = None
        policy = Knobs(**{**_values(real_knobs("dovetail")), **knobs})
        self.driver = NodeDriver("node", DeviceKind.CPU, memory, policy, self, self.clock, log)
        if log is not None:
            self.driver.runtime.start_log(self.driver.home, "virtual")
        for model in models:
            self.register(model)

    def register(self, model: str, keep_alive_s: float = 60.0) -> None:
        hosting = Hosting(
            WEIGHT_BYTES,
            KV_BYTES,
            LiveLatency(make_latency()),
            block_tokens=BLOCK,
            max_kv_tokens=self.max_kv_tokens,
            keep_alive_s=keep_alive_s,
        )
        self.driver.register(model, hosting)

    def load(self, command: StartLoad) -> None:
        self.commands.append(command)

    def finish_load(self, index: int = 0) -> None:
        command = self.commands.pop(index)
        self.clock.now += 0.01
        executor = CheckedExecutor(self.clock, self.max_kv_tokens // BLOCK, self.fails_on, self.token_s)
        self.executors.append(executor)
        card = ModelCard(command.model, "", SPEC, "")
        limits = SchedulerConfig(4096, self.max_batch, max_turn_tokens=16, max_tokens=self.max_kv_tokens - BLOCK)
        self.driver.loaded(command.instance, ModelRunner(card, executor, limits, BLOCK))

    def submit(
        self, id: str, model: str = "a", prompt: int = 5, tokens: int = 4, age_s: float = 0.0, **options: Any
    ) -> None:
        slo = Slo(options.pop("ttft_s", None), options.pop("tpot_s", None))
        content = tuple((hash_of(id) + i) % 90 for i in range(prompt))
        sampling = SamplingParams(max_tokens=tokens, seed=0, temperature=0.0)
        request = Request(id, model, content, sampling, options.pop("num_choices", 1), slo, **options)
        self.driver.submit(request, self.clock.now - age_s)
        self.read()

    def step(self) -> bool:
        moved = self.driver.take_turn()
        self.read()
        self.check()
        return moved

    def run(self, limit: int = 2000) -> None:
        """Until nothing is left to do, finishing loads as they come."""
        for _ in range(limit):
            if self.commands:
                self.finish_load()
            elif not self.step() and not self.commands:
                due = self.driver.next_due_s()
                if not self.driver.has_work or due is None:
                    return
                self.clock.now = max(self.clock.now, due)
        raise AssertionError("it never came to an end")

    def read(self) -> None:
        report = self.driver.take_report()
        self.gone += report.gone
        for events in report.tokens.values():
            for event in events:
                told = self.events.setdefault((event.request_id, event.choice), [])
                assert not told or told[-1].finish is None, "something after the end"
                told.append(event)

    def tokens(self, id: str, choice: int = 0) -> list[int | None]:
        return [event.token for event in self.events[id, choice]]

    def check(self) -> None:
        node = self.driver.home.node
        node.residency.ledger.check()
        for id, runner in self.driver.runners.items():
            pool = runner.scheduler.pool
            pool.check()
            instance = node.instances[id]
            assert pool.target * BLOCK >= instance.kv_tokens
            held = node.residency.ledger.held_of((id, "kv"))
            assert runner.executor.kv_committed_bytes <= held, "more memory than the ledger knows of"


def expected(id: str, prompt: int = 5, tokens: int = 4) -> list[int]:
    known = [(hash_of(id) + i) % 90 for i in range(prompt)]
    for _ in range(tokens):
        known.append(next_token(known))
    return known[prompt:]


def hash_of(id: str) -> int:
    return sum(ord(letter) * (i + 1) for i, letter in enumerate(id))


def _values(knobs: Knobs) -> dict[str, Any]:
    return {name: getattr(knobs, name) for name in knobs.__dataclass_fields__}
