"""A GPU's worker that is killed, a card that is gone, a card without memory: nobody waits for ever, and what can go on
elsewhere does.

A card goes for one server alone: that runs in a mount namespace of its own, in which the card's file is covered.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
import server_fixture
from server_fixture import Server, eventually, one_of_many, running_server

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
NUM_STREAMS, NUM_TOKENS = 50, 200
GPU = '{{name: gpu-0, device: "cuda:0", memory: {memory}}}'
CPU = "{{name: cpu-0, device: cpu, threads: 2, memory: 256MiB}}"
CONFIG = """
models: {{llama: {{source: {folder}, dtype: f32}}}}
nodes: [{nodes}]
server: {{resume_timeout: {resume}, max_resumptions: 3}}
"""


@contextmanager
def serving(tmp_path: Path, folder: Path, *nodes: str, memory: str = "2GiB", resume: str = "60s") -> Iterator[Server]:
    config = tmp_path / "dovetail.yaml"
    written = ", ".join(nodes).format(memory=memory)
    config.write_text(CONFIG.format(folder=folder, nodes=written, resume=resume))
    with running_server("--config", config, log=tmp_path / "log") as server:
        yield server


async def read(client: openai.AsyncOpenAI, index: int, seen: list[int]) -> str:
    text = ""
    try:
        async for piece in one_of_many(client, index, NUM_TOKENS):
            seen[index] += 1
            text += piece
    except (openai.APIError, openai.APIStatusError) as error:
        return f"error: {error}"
    return text


async def read_all(server: Server, disturb: Callable[[], None] | None = None) -> list[str]:
    seen = [0] * NUM_STREAMS
    async with server.async_client(timeout=120) as client:
        tasks = [asyncio.create_task(read(client, index, seen)) for index in range(NUM_STREAMS)]
        while disturb is not None and sum(map(bool, seen)) < NUM_STREAMS // 4 and not any(one.done() for one in tasks):
            await asyncio.sleep(0.002)
        if disturb is not None:
            await asyncio.to_thread(disturb)
        return await asyncio.gather(*tasks)


def node(server: Server, name: str) -> dict[str, Any]:
    return next(one for one in server.status()["nodes"] if one["name"] == name)


def kill(server: Server) -> None:
    os.kill(node(server, "gpu-0")["pid"], signal.SIGKILL)


def test_fifty_streams_go_on_when_the_worker_of_a_gpu_is_killed(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with serving(tmp_path, tiny_folder("llama"), GPU) as server:
        undisturbed = asyncio.run(read_all(server))
        assert not any(text.startswith("error") for text in undisturbed)
        started = time.monotonic()
        assert asyncio.run(read_all(server, lambda: kill(server))) == undisturbed
        print(f"50 of 50 identical, {time.monotonic() - started:.1f} s with the kill")
        assert node(server, "gpu-0")["state"] == "up"


@pytest.fixture
def own_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are started have their own view of the file system."""
    if os.geteuid() or shutil.which("unshare") is None or not Path("/dev/nvidia0").exists():
        pytest.skip("covering a card's file takes root, unshare and /dev/nvidia0")
    monkeypatch.setattr(server_fixture, "COMMAND", ["unshare", "--mount", *server_fixture.COMMAND])


def take_card(server: Server) -> None:
    """No later process of this server can open a card; then the one that has it open ends."""
    for file in Path("/dev").glob("nvidia[0-9]*"):
        inside = ["nsenter", "--target", str(server.process.pid), "--mount", "mount", "--bind", "/dev/null", str(file)]
        subprocess.run(inside, check=True, timeout=20)
    kill(server)


def test_what_a_card_had_that_is_gone_goes_on_at_another_node(
    tiny_folder: Callable[[str], Path], tmp_path: Path, own_mounts: None
) -> None:
    with serving(tmp_path, tiny_folder("llama"), GPU, CPU) as server:
        undisturbed = asyncio.run(read_all(server))
        texts = asyncio.run(read_all(server, lambda: take_card(server)))
        assert sum(ours == other for ours, other in zip(texts, undisturbed, strict=True)) >= NUM_STREAMS - 1
        assert not any(text.startswith("error") for text in texts), "nobody is sent away"
        assert node(server, "gpu-0")["state"] != "up"


def test_where_there_is_no_other_node_every_stream_ends_with_a_reason(
    tiny_folder: Callable[[str], Path], tmp_path: Path, own_mounts: None
) -> None:
    with serving(tmp_path, tiny_folder("llama"), GPU, resume="10s") as server:
        asyncio.run(read_all(server))
        started = time.monotonic()
        texts = asyncio.run(read_all(server, lambda: take_card(server)))
        print(f"the last stream ended after {time.monotonic() - started:.1f} s")
        cut = [text for text in texts if text.startswith("error")]
        assert cut
        assert all("worker" in text for text in cut), cut[0]
        eventually(lambda: "sees no GPU" in (tmp_path / "log").read_text(), 60.0)  # its process may still be starting


@contextmanager
def leaving(free_bytes: int) -> Iterator[None]:
    """All but so much of the card is taken by somebody else, namely by this process."""
    taken = [torch.empty(max(torch.cuda.mem_get_info()[0] - free_bytes, 1), dtype=torch.uint8, device="cuda")]
    try:
        yield
    finally:
        taken.clear()
        torch.cuda.empty_cache()


def test_a_node_has_no_more_of_a_card_than_others_leave(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with leaving(4 << 30), serving(tmp_path, tiny_folder("llama"), GPU, memory="16GiB") as server:
        (one,) = server.get("/api/nodes").json()["data"]
        assert one["memory_bytes"] < 4 << 30
        assert not any(text.startswith("error") for text in asyncio.run(read_all(server)))
    assert "were asked for" in (tmp_path / "log").read_text()


def test_where_a_card_becomes_full_every_stream_ends_and_later_ones_are_answered(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """A worker that cannot have what it was promised ends, says why, and starts again with what is there."""
    with serving(tmp_path, tiny_folder("llama"), GPU, memory="16GiB", resume="10s") as server:
        with leaving(8 << 20):
            texts = asyncio.run(read_all(server))
        failed = {text for text in texts if text.startswith("error")}
        print(f"{len(failed)} kinds of errors: {sorted(failed)[:3]}; log: {(tmp_path / 'log').read_text()[-1500:]}")
        eventually(lambda: node(server, "gpu-0")["state"] == "up", timeout_s=90.0)
        assert not any(text.startswith("error") for text in asyncio.run(read_all(server)))


BROKEN = """
import sys
from pathlib import Path
import torch
from dovetail.engine.devices.cuda.device import CudaDevice
from dovetail.engine.executor import ExecutorConfig
from dovetail.errors import DeviceLost
from dovetail.sched.turn import Turn, TurnRow
from dovetail.store import open_checkpoint
from dovetail.types import SamplingParams

device = CudaDevice("cuda:0")
executor = device.executor(open_checkpoint(Path(sys.argv[1])), ExecutorConfig(kv_bytes=1 << 24, dtype="f32"))
executor.resize(executor.max_blocks)
turn = Turn((TurnRow(0, [1, 2, 3], 0, 3, [0], 3, SamplingParams(max_tokens=9, seed=0, temperature=0.0), samples=True),))
executor.run(turn)
wrong = torch.tensor([1 << 40], device="cuda")
torch.zeros(4, device="cuda").index_put_((wrong,), torch.ones(1, device="cuda"))  # a fault on the device
try:
    executor.run(turn)
except Exception as error:
    try:
        executor.discard()
    except DeviceLost as lost:
        print("lost:", lost, flush=True)
import os
os._exit(0)
"""


def test_a_fault_on_the_device_is_known_as_its_loss(tiny_folder: Callable[[str], Path]) -> None:
    command = [sys.executable, "-c", BROKEN, str(tiny_folder("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "lost: the GPU 0 does not answer any longer" in done.stdout, done.stderr[-2000:]
