"""What first requests of a fresh server on a GPU wait for: a process of its own, an empty cache of kernels but for what
preparing the model has made, and the same requests again when all of it is warm.

Through HTTP, with random weights, the model preloaded.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import msgspec
import torch

from dovetail_bench.gpu_switches import Say, ask, make_model
from dovetail_bench.servers import OURS, Contender, our_server, running

NAME = "served"
CASES = {"128": (1, 128, 1), "3,900": (1, 3900, 1), "256 × 128": (256, 128, 32), "8 × 3,900": (8, 3900, 32)}
_AGAIN = 3  # times that each is asked for when it is warm


class FirstCase(msgspec.Struct, frozen=True):
    requests: int
    prompt_tokens: int
    answer_tokens: int
    first_s: float  # until the last token of the last answer
    warm_s: float  # the least of the times after it

    @property
    def ratio(self) -> float:
        return self.first_s / self.warm_s


class FirstRequests(msgspec.Struct, frozen=True):
    shape: str
    gpu: str
    prepare_s: float  # `doctor --prepare`, with an empty cache of kernels
    prepared_bytes: int  # that it left there
    ready_s: float  # from the start of the server's process, weights in the page cache
    cases: dict[str, FirstCase]


class FirstBench:
    def __init__(self, folder: Path, shape: str, say: Say) -> None:
        self._folder, self._shape, self._say = folder, shape, say
        self._card = make_model(folder, NAME, shape, 0, say)
        self._kernels = folder / "kernels"

    def run(self) -> FirstRequests:
        environment = {"TRITON_CACHE_DIR": str(self._kernels)}
        started = time.monotonic()
        command = (*OURS, "doctor", "--prepare", "--store", str(self._folder / "store"))
        subprocess.run(command, env=os.environ | environment, stdout=subprocess.DEVNULL, check=False)
        prepare_s = time.monotonic() - started
        prepared = sum(file.stat().st_size for file in self._kernels.rglob("*") if file.is_file())
        self._say(f"prepared in {prepare_s:.1f} s, {prepared / 1e6:.1f} MB")
        cases = {}
        for name, (requests, prompt, answer) in CASES.items():  # each in a process of its own
            with running(self._server(environment), self._folder / "server.log") as server:
                ready_s, port = server.ready_s, server.contender.port
                times = [asyncio.run(_crowd(port, requests, prompt, answer, at)) for at in range(1 + _AGAIN)]
            cases[name] = FirstCase(requests, prompt, answer, times[0], min(times[1:]))
            self._say(f"{name}: first {times[0]:.3f} s, then {', '.join(f'{each:.3f}' for each in times[1:])}")
        gpu = torch.cuda.get_device_name()
        return FirstRequests(self._shape, gpu, round(prepare_s, 2), prepared, round(ready_s, 2), cases)

    def _server(self, environment: dict[str, str]) -> Contender:
        config = {
            "models": {NAME: {"source": NAME, "preload": True}},
            "nodes": [{"name": "gpu-0", "device": "cuda:0"}],
            "store": {"path": str(self._folder / "store"), "host_pool": f"{2 * self._card.size_bytes}B"},
        }
        server = our_server(config, self._folder / "first.yaml", "bf16")
        return msgspec.structs.replace(server, environment=environment)


async def _crowd(port: int, requests: int, prompt: int, answer: int, at: int) -> float:
    """Until the last answer of so many that are asked for at once is complete; no prompt is like another."""
    started = time.perf_counter()
    asked = [ask(port, NAME, 1000 * at + each, prompt, answer) for each in range(requests)]
    heard = await asyncio.gather(*asked)
    problem = next((one.error for one in heard if one.error or one.first_s is None), "")
    assert not problem, problem
    return time.perf_counter() - started
