"""An instance of a group: one function process, or a master's pipeline of stage workers (P6).

The master lives in the dispatcher: it cuts a stage's input into the workers' rows, waits for the slowest, and joins
what comes back for the next stage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dovetail.errors import EngineFailed
from dovetail.plan.chains import Chain, RowShare, shares
from dovetail.plan.frames import Call, Spec
from dovetail.plan.limits import threads_of
from dovetail.plan.processes import FunctionProcess

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class StageSize:
    """Layers [first, end) on so many workers of so many vCPUs."""

    first: int
    end: int
    workers: int
    vcpus: float


@dataclass(frozen=True)
class StageRun:
    """Seconds that each worker of a stage computed, and the stage took as the master sees it."""

    workers_s: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class InstanceRun:
    output: Array
    seconds: float  # end to end
    stages: tuple[StageRun, ...]

    @property
    def passing_s(self) -> float:
        """What was not computing: sockets, copies, waiting for a worker's turn."""
        return self.seconds - sum(max(stage.workers_s) for stage in self.stages)


class Instance:
    """Owns its processes until close()."""

    def __init__(self, chain: Chain, sizes: Sequence[StageSize], stages: list[list[FunctionProcess]]) -> None:
        self._chain = chain
        self._sizes = tuple(sizes)
        self._stages = stages
        self._shares = [_shares(chain, size) for size in sizes]

    @classmethod
    async def start(cls, chain: Chain, sizes: Sequence[StageSize], device: str = "cpu") -> Instance:
        """All functions side by side."""
        wanted = [size for size in sizes for _ in range(size.workers)]
        files = [_model_of(chain, size) for size in wanted]
        specs = [
            Spec(file, size.first, size.end, threads_of(size.vcpus), device)
            for file, size in zip(files, wanted, strict=True)
        ]
        starting = (FunctionProcess.start(spec, size.vcpus) for spec, size in zip(specs, wanted, strict=True))
        started = await asyncio.gather(*starting, return_exceptions=True)
        functions = [function for function in started if isinstance(function, FunctionProcess)]
        failed = next((error for error in started if isinstance(error, BaseException)), None)
        if failed is not None:
            await asyncio.gather(*(function.close() for function in functions))
            raise failed
        stages: list[list[FunctionProcess]] = []
        for size in sizes:
            stages.append(functions[: size.workers])
            functions = functions[size.workers :]
        return cls(chain, sizes, stages)

    @property
    def functions(self) -> list[FunctionProcess]:
        return [function for stage in self._stages for function in stage]

    @property
    def start_s(self) -> float:
        return max(function.start_s for function in self.functions)

    async def run(self, x: Array) -> InstanceRun:
        started = time.perf_counter()
        runs = []
        for size, functions, parts in zip(self._sizes, self._stages, self._shares, strict=True):
            x, run = await self._stage(size, functions, parts, x)
            runs.append(run)
        return InstanceRun(x, time.perf_counter() - started, tuple(runs))

    async def _stage(
        self, size: StageSize, functions: list[FunctionProcess], parts: Sequence[RowShare | None], x: Array
    ) -> tuple[Array, StageRun]:
        started = time.perf_counter()
        calls = (
            _call(function, size, worker, x if part is None else x[:, :, part.inputs[0] : part.inputs[1]])
            for worker, (function, part) in enumerate(zip(functions, parts, strict=True))
        )
        answers = await asyncio.gather(*calls)
        outputs = [output for _, output in answers]
        joined = outputs[0] if len(outputs) == 1 else np.concatenate(outputs, axis=2)
        run = StageRun(tuple(seconds for seconds, _ in answers), time.perf_counter() - started)
        return joined, run

    def resize(self, vcpus: float) -> None:
        """Resizes every worker, for measurements; the next run has as many threads."""
        self._sizes = tuple(replace(size, vcpus=vcpus) for size in self._sizes)
        for function in self.functions:
            function.limit.resize(vcpus)

    async def ended(self) -> None:
        """Returns when one of its processes has ended: it can run no more."""
        ends = [asyncio.ensure_future(function.ended()) for function in self.functions]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    def kill(self) -> None:
        """kill -9 of its first process, for `apply --kill`."""
        self.functions[0].kill()

    async def close(self) -> None:
        await asyncio.gather(*(function.close() for function in self.functions))


async def _call(function: FunctionProcess, size: StageSize, worker: int, x: Array) -> tuple[float, Array]:
    sent = np.ascontiguousarray(x)
    call = Call(len(sent), tuple(sent.shape), size.workers, worker, threads_of(size.vcpus))
    answer, output = await function.call(call, sent.data.cast("B"))
    if answer.error:
        raise EngineFailed(answer.error)
    return answer.seconds, np.frombuffer(output, dtype=np.float32).reshape(answer.shape)


def _model_of(chain: Chain, size: StageSize) -> str:
    """What a function process is told to open."""
    if not chain.file:
        return chain.name
    from dovetail.plan.onnx_graph import stage_file

    return str(stage_file(chain, size.first, size.end))


def _shares(chain: Chain, size: StageSize) -> list[RowShare] | list[None]:
    return [None] if size.workers == 1 else shares(chain.layers[size.first : size.end], size.workers)
