"""Our engine as a contender of `bench engines`: scheduler and executor in a child process, as a worker has them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from dovetail import __version__
from dovetail.engine.dtypes import compute_dtype
from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.machine import kept_dtype
from dovetail.native import select
from dovetail.store.checkpoints import open_checkpoint
from dovetail_bench.engine_child import prompt, serve
from dovetail_bench.fidelity import logits_of
from dovetail_bench.roofline import measure_roofline
from dovetail_bench.steps import Steps

_BLOCK = 16


class Ours:
    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._steps: Steps | None = None
        self.native_share: float | None = None  # of the last measurement

    def prepare(self, command: dict[str, Any]) -> dict[str, Any]:
        self._path = Path(command["path"])
        checkpoint = open_checkpoint(self._path)
        spec, tokens = checkpoint.spec, max(command["longest"], command["most"] * command["each"]) + _BLOCK
        dtype = compute_dtype("auto", checkpoint.pieces("embed.weight")[0].dtype)
        kv_bytes = (tokens + _BLOCK * command["most"]) * spec.kv_bytes_per_token(dtype)
        executor = CpuExecutor(checkpoint, ExecutorConfig(kv_bytes=kv_bytes, block_size=_BLOCK))
        executor.resize(executor.max_blocks)
        self._steps = Steps(executor, _BLOCK)
        self._vocab_size: int = command["vocab_size"]
        about = f"dovetail {__version__}, computes in {executor.dtype}, level {executor.level}"
        return {"weight_bytes": executor.weight_bytes, "about": about, "evidence": f"level {executor.level}"}

    def score(self, command: dict[str, Any]) -> dict[str, Any]:
        """Logits behind each of the tokens, [tokens, vocab], into a file."""
        checkpoint = open_checkpoint(self._path)
        np.save(command["target"], logits_of(checkpoint, command["tokens"]).numpy())
        checkpoint.close()
        return {}

    def roofline(self, command: dict[str, Any]) -> dict[str, Any]:
        best = measure_roofline(
            compute_dtype("auto", kept_dtype("bf16")), select().level, scale=command.get("scale", 1.0)
        )
        fields: dict[str, Any] = msgspec.structs.asdict(best)
        return fields

    def ttft(self, size: int, salt: int) -> tuple[float, int | None]:
        taken = self._run().first_token(self._prompt(salt, 0, size))
        self.native_share = taken.native_share
        return taken.seconds, taken.token

    def tpot(self, size: int, salt: int, length: int, steps: int) -> float:
        taken = self._run().further_tokens([self._prompt(salt, index, length) for index in range(size)], steps)
        self.native_share = taken.native_share
        return taken.seconds / (taken.tokens / size)

    def _prompt(self, salt: int, index: int, length: int) -> list[int]:
        tokens: list[int] = prompt(salt, index, length, self._vocab_size)  # type: ignore[no-untyped-call]
        return tokens

    def _run(self) -> Steps:
        assert self._steps is not None, "prepare comes first"
        return self._steps


if __name__ == "__main__":
    serve(lambda: Ours(int(sys.argv[1])))  # type: ignore[no-untyped-call]
