"""A model computed step by step, schedule → run → complete, with scheduler and executor as a worker has them; how long
that takes, and how much of it inside the native call.

No other model, no messages, no text: what a step costs beyond these is the worker's and the gateway's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from dovetail.engine.executor import CpuExecutor
from dovetail.engine.native_model import NativeCall
from dovetail.errors import DovetailError
from dovetail.sched.blocks import BlockPool
from dovetail.sched.fcfs import FcfsScheduler
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.types import Request, SamplingParams, TokenEvent


class StepFailed(DovetailError):
    pass


class Taken(msgspec.Struct, frozen=True):
    seconds: float  # in all
    native_share: float | None  # of them inside native calls; None = the model runs on torch's operators
    tokens: int  # that came
    token: int | None = None  # the last of them


class Steps:
    def __init__(self, executor: CpuExecutor, block_size: int = 16) -> None:
        self._executor = executor
        config = SchedulerConfig(context_length=executor.spec.context_length)
        self._scheduler = FcfsScheduler(config, BlockPool(executor.max_blocks, block_size))
        self._is_native = executor.wrap_native(self._timed)
        self._native_s = 0.0
        self._requests = 0

    def first_token(self, prompt: Sequence[int]) -> Taken:
        self._add(prompt, 1)
        return self._run()

    def further_tokens(self, prompts: Sequence[Sequence[int]], steps: int) -> Taken:
        """`steps` times one more token for each, after their first ones, which do not count."""
        for prompt in prompts:
            self._add(prompt, steps + 1)
        begun: set[str] = set()
        while len(begun) < len(prompts):
            begun.update(event.request_id for event in self._step())
        return self._run()

    def _add(self, prompt: Sequence[int], new_tokens: int) -> None:
        self._requests += 1
        sampling = SamplingParams(max_tokens=new_tokens, seed=0, temperature=0.0)
        self._scheduler.add(Request(str(self._requests), "bench", tuple(prompt), sampling))

    def _run(self) -> Taken:
        """To the end of all that is there."""
        events: tuple[TokenEvent, ...] = ()
        tokens, self._native_s = 0, 0.0
        started = time.perf_counter()
        while self._scheduler.has_work:
            events = self._step()
            tokens += len(events)
        seconds = time.perf_counter() - started
        return Taken(seconds, self._native_s / seconds if self._is_native else None, tokens, events[-1].token)

    def _step(self) -> tuple[TokenEvent, ...]:
        turn = self._scheduler.next_turn()
        if turn is None:
            raise StepFailed("nothing can run: the KV memory is too small")
        events = self._scheduler.complete(self._executor.run(turn)).events
        for event in events:
            if event.error:
                raise StepFailed(event.error)
        return events

    def _timed(self, call: NativeCall) -> NativeCall:
        def timed(*arguments: object) -> bool:
            started = time.perf_counter()
            done = call(*arguments)
            self._native_s += time.perf_counter() - started
            return done

        return timed
