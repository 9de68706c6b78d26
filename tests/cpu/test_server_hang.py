"""Workers that hang and requests that kill: what everybody else sees of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from server_fixture import Server, eventually, running_server

NUM_STREAMS = int(os.environ.get("DOVETAIL_STREAMS", "12"))  # check-all takes 50
NUM_TOKENS = 100
HANG_S = 3.0
# Rounding shall not decide a draw; and patient, because this machine may be busy with other tests.
CONFIG = """
models: {{llama: {{source: {folder}, dtype: f64}}}}
server: {{resume_timeout: 60s}}
nodes: [{{name: cpu-0, threads: 1, kv_cache: 64MiB, hang_timeout: {hang}s}}]
"""
# Ends the worker, by a signal that nobody can catch, in every iteration that computes a prompt with these tokens.
POISON = (3, 1, 4, 1, 5)
SABOTAGE = f"""
import os, signal, sys
if "dovetail.worker" in sys.orig_argv:
    from dovetail.engine.executor import CpuExecutor
    launch = CpuExecutor.launch
    def fatal(self, turn):
        for row in turn.rows:
            if tuple(row.tokens[:{len(POISON)}]) == {POISON} and len(row.tokens) > {len(POISON)} + 8:
                os.kill(os.getpid(), signal.SIGKILL)
        return launch(self, turn)
    CpuExecutor.launch = fatal
"""


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("config")
    (folder / "sitecustomize.py").write_text(SABOTAGE)
    config = folder / "dovetail.yaml"
    config.write_text(CONFIG.format(folder=tiny_folder("llama"), hang=HANG_S))
    with running_server("--config", config, environment={"PYTHONPATH": str(folder)}) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[str]:
    texts, _ = asyncio.run(read_all(server))
    assert len(set(texts)) == NUM_STREAMS
    return texts


async def read(client: openai.AsyncOpenAI, index: int, seen: list[float]) -> str:
    """The text of one stream; `seen` says when each of its events came."""
    options: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index}
    stream = await client.completions.create(
        model="llama",
        prompt=f"stream {index} of many",
        max_tokens=NUM_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
        **options,
    )
    text = ""
    async for chunk in stream:
        seen.append(time.monotonic())
        text += "".join(choice.text for choice in chunk.choices)
    return text


async def read_all(
    server: Server, disturb: Callable[[], None] | None = None, beside: Callable[[], None] = lambda: None
) -> tuple[list[str], float]:
    """All texts, and the longest time that any stream stood still. `beside` is asked for with them."""
    seen: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    async with server.async_client(timeout=300) as client:
        tasks = [asyncio.create_task(read(client, index, seen[index])) for index in range(NUM_STREAMS)]
        beside()
        while disturb is not None and not all(seen):
            await asyncio.sleep(0.005)
        if disturb is not None:
            disturb()
        texts = await asyncio.gather(*tasks)
    return texts, max(after - before for times in seen for before, after in pairwise(times))


def resumptions(server: Server) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("dovetail:request_resumptions_total"))


def test_streams_go_on_with_the_same_text_when_the_worker_hangs(server: Server, undisturbed: list[str]) -> None:
    starts, pid = server.node()["starts"], server.node()["pid"]
    disturbed, gap_s = asyncio.run(read_all(server, lambda: os.kill(pid, signal.SIGSTOP)))
    print(f"{NUM_STREAMS} streams, longest gap {gap_s:.1f} s with a hang timeout of {HANG_S:g} s")
    assert disturbed == undisturbed
    assert gap_s > HANG_S  # it did hang
    assert server.node()["starts"] == starts + 1
    eventually(lambda: server.blocks_used() == 0)


def test_an_idle_worker_that_hangs_is_replaced_before_anybody_needs_it(server: Server) -> None:
    pid = server.node()["pid"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: server.node()["pid"] not in (None, pid))
    eventually(lambda: server.get("/health").status_code == 200)


def test_a_poison_request_ends_alone(server: Server, undisturbed: list[str]) -> None:
    """Its neighbours say the same as without it, and it is not tried for as long as they live."""
    starts, resumed = server.node()["starts"], resumptions(server)

    async def both() -> tuple[list[str], openai.APIStatusError]:
        async with server.async_client(timeout=300) as client:
            poisoned: list[asyncio.Task[Any]] = []

            def poison() -> None:
                request = client.completions.create(
                    model="llama", prompt=list(POISON), max_tokens=50, temperature=0, extra_body={"ignore_eos": True}
                )
                poisoned.append(asyncio.ensure_future(request))

            texts, _ = await read_all(server, beside=poison)
            with pytest.raises(openai.InternalServerError) as caught:
                await poisoned[0]
            return texts, caught.value

    texts, error = asyncio.run(both())
    assert texts == undisturbed
    assert error.code == "worker_lost"
    assert resumptions(server) - resumed > NUM_STREAMS // 2  # they were there when it happened
    eventually(lambda: server.node()["starts"] == starts + 2)  # once in company, once alone
    eventually(lambda: server.get("/health").status_code == 200)
