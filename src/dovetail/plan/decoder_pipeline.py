"""The master of a decoder-only model in stages: schedules iterations as a worker does, and passes hidden states on.

Tokens and block tables go to every stage, so that each keeps the keys and values of its own layers; hidden states go
from stage to stage; the last one chooses the tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.errors import EngineFailed
from dovetail.modelspec import ModelSpec
from dovetail.plan.chains import decoder, even_cuts
from dovetail.plan.decoder_stage import BLOCK, turn_of
from dovetail.plan.frames import Call, Spec
from dovetail.plan.limits import threads_of
from dovetail.plan.processes import FunctionProcess
from dovetail.sched.blocks import BlockPool
from dovetail.sched.fcfs import FcfsScheduler
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.sched.turn import Outcome, RowOutcome, Turn
from dovetail.types import Request


@dataclass(frozen=True)
class TurnRun:
    """One iteration: how many tokens it computed, and where its time went."""

    tokens: int
    seconds: float
    stages_s: tuple[float, ...]

    @property
    def passing_s(self) -> float:
        return self.seconds - sum(self.stages_s)


class DecoderPipeline:
    """Owns its stage processes until close()."""

    def __init__(self, spec: ModelSpec, stages: list[FunctionProcess], kv_tokens: int) -> None:
        config = SchedulerConfig(context_length=spec.context_length)
        self._scheduler = FcfsScheduler(config, BlockPool(-(-kv_tokens // BLOCK), BLOCK))
        self._stages = stages
        self.runs: list[TurnRun] = []

    @classmethod
    async def start(
        cls, path: Path, spec: ModelSpec, num_stages: int, vcpus: float, kv_tokens: int = 4096
    ) -> DecoderPipeline:
        """Stages of about equal arithmetic, each with so many vCPUs."""
        cuts = even_cuts([layer.flops for layer in decoder(spec).layers], num_stages)
        specs = [Spec(str(path), first, end, threads_of(vcpus), kv_tokens=kv_tokens) for first, end in cuts]
        starting = (FunctionProcess.start(stage, vcpus) for stage in specs)
        started = await asyncio.gather(*starting, return_exceptions=True)
        stages = [stage for stage in started if isinstance(stage, FunctionProcess)]
        failed = next((error for error in started if isinstance(error, BaseException)), None)
        if failed is not None:
            await asyncio.gather(*(stage.close() for stage in stages))
            raise failed
        return cls(spec, stages, kv_tokens)

    @property
    def functions(self) -> list[FunctionProcess]:
        return list(self._stages)

    async def generate(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """Tokens of each, by id; all of them share iterations."""
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        for request in requests:
            self._scheduler.add(request)
        while self._scheduler.has_work:
            turn = self._scheduler.next_turn()
            if turn is None:
                raise EngineFailed("nothing can run: the stages' KV memory is too small")
            for event in self._scheduler.complete(await self._run(turn)).events:
                if event.error:
                    raise EngineFailed(event.error)
                if event.token is not None:
                    tokens[event.request_id].append(event.token)
        return tokens

    async def _run(self, turn: Turn) -> Outcome:
        started, encoded = time.perf_counter(), turn_of(turn)
        shape: tuple[int, ...] = ()
        chosen: tuple[int, ...] = ()
        payload, seconds = b"", []
        for stage in self._stages:
            answer, payload = await stage.call(Call(shape=shape, turn=encoded), payload)
            shape, chosen = answer.shape, answer.tokens
            seconds.append(answer.seconds)
        self.runs.append(TurnRun(turn.num_tokens, time.perf_counter() - started, tuple(seconds)))
        sampled = sorted(row.sequence for row in turn.rows if row.samples)
        return Outcome(tuple(RowOutcome(at, token) for at, token in zip(sampled, chosen, strict=True)))

    async def close(self) -> None:
        await asyncio.gather(*(stage.close() for stage in self._stages))
