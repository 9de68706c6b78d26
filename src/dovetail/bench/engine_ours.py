"""Our engine as a contender of `bench engines`: scheduler and executor in a child process, as a worker has them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from dovetail import __version__
from dovetail.bench.engine_child import prompt, serve
from dovetail.bench.roofline import measure_roofline
from dovetail.engine.dtypes import compute_dtype
from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.errors import DovetailError
from dovetail.native import select
from dovetail.sched.blocks import BlockPool
from dovetail.sched.scheduler import Scheduler, SchedulerConfig
from dovetail.store.checkpoints import open_checkpoint
from dovetail.types import Request, SamplingParams, TokenEvent

_BLOCK = 16


class TurnFailed(DovetailError):
    pass


class Ours:
    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._executor: CpuExecutor | None = None
        self._scheduler: Scheduler | None = None

    def prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        checkpoint = open_checkpoint(Path(command["path"]))
        spec, tokens = checkpoint.spec, max(command["longest"], command["most"] * command["each"]) + _BLOCK
        dtype = compute_dtype("auto", checkpoint.pieces("embed.weight")[0].dtype)
        kv_bytes = (tokens + _BLOCK * command["most"]) * spec.kv_bytes_per_token(dtype)
        executor = CpuExecutor(checkpoint, ExecutorConfig(kv_bytes=kv_bytes, block_size=_BLOCK))
        executor.resize(executor.max_blocks)
        config = SchedulerConfig(context_length=spec.context_length)
        self._executor = executor
        self._scheduler = Scheduler(config, BlockPool(executor.max_blocks, _BLOCK))
        self._vocab_size: int = command["vocab_size"]
        about = f"dovetail {__version__}, computes in {executor.dtype}, level {executor.level}"
        return {"weight_bytes": executor.weight_bytes, "about": about, "evidence": f"level {executor.level}"}

    def roofline(self, command: dict[str, Any]) -> dict[str, Any]:
        best = measure_roofline(compute_dtype("auto", "bf16"), select().level, scale=command.get("scale", 1.0))
        fields: dict[str, Any] = msgspec.structs.asdict(best)
        return fields

    def ttft(self, size: int, salt: int) -> tuple[float, int | None]:
        self._add(0, salt, size, 1)
        events: tuple[TokenEvent, ...] = ()
        started = time.perf_counter()
        while self._has_work():
            events = self._turn()
        return time.perf_counter() - started, events[-1].token

    def tpot(self, size: int, salt: int, length: int, steps: int) -> float:
        for index in range(size):
            self._add(index, salt, length, steps + 1)
        begun: set[str] = set()
        while len(begun) < size:
            begun.update(event.request_id for event in self._turn())
        num_tokens = 0
        started = time.perf_counter()
        while self._has_work():
            num_tokens += len(self._turn())
        return (time.perf_counter() - started) / (num_tokens / size)

    def _add(self, index: int, salt: int, length: int, new_tokens: int) -> None:
        assert self._scheduler is not None
        tokens = tuple(prompt(salt, index, length, self._vocab_size))  # type: ignore[no-untyped-call]
        sampling = SamplingParams(max_tokens=new_tokens, seed=0, temperature=0.0)
        self._scheduler.add(Request(f"{salt}-{index}", "bench", tokens, sampling))

    def _has_work(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.has_work

    def _turn(self) -> tuple[TokenEvent, ...]:
        assert self._scheduler is not None
        assert self._executor is not None
        turn = self._scheduler.next_turn()
        if turn is None:
            raise TurnFailed("nothing can run: the KV memory is too small")
        events = self._scheduler.complete(self._executor.run(turn)).events
        for event in events:
            if event.error:
                raise TurnFailed(event.error)
        return events


if __name__ == "__main__":
    serve(lambda: Ours(int(sys.argv[1])))  # type: ignore[no-untyped-call]
