"""Batches over the sudden end of workers, gateways and both: each line is answered once, with the text it has alone."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import openai
import psutil
import pytest
from server_fixture import Server, eventually, running_server
from test_server_batches import completion, ended, results, submit

CONFIG = """
models: {{llama: {{source: {folder}}}}}
server: {{state: {state}, outlive: 60s, resume_timeout: 20s}}
nodes: [{{name: cpu-0, threads: 1, kv_cache: 16MiB}}]
"""
NUM_LINES = 120
LINES = [completion(number, max_tokens=40) for number in range(NUM_LINES)]


@pytest.fixture
def config(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    file = tmp_path / "dovetail.yaml"
    file.write_text(CONFIG.format(folder=tiny_folder("llama"), state=tmp_path / "state"))
    return file


def workers(server: Server) -> list[int]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [one.pid for one in children if "dovetail.worker" in " ".join(one.cmdline())]


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def wait_for(client: openai.OpenAI, batch_id: str, completed: int) -> None:
    def has_so_many() -> bool:
        counts = client.batches.retrieve(batch_id).request_counts
        return counts is not None and counts.completed >= completed

    eventually(has_so_many, 60)


def texts(client: openai.OpenAI, file_id: str | None) -> dict[str, str]:
    return {name: one["response"]["body"]["choices"][0]["text"] for name, one in results(client, file_id).items()}


def test_kills_of_worker_gateway_and_both_lose_and_repeat_nothing(config: Path) -> None:
    with running_server("--config", config) as server:
        client = server.client()
        alone = ended(client, submit(client, LINES).id)
        wanted = texts(client, alone.output_file_id)
        assert len(wanted) == NUM_LINES
        batch_id = submit(client, LINES).id
        wait_for(client, batch_id, 10)
        kill(*workers(server))
        wait_for(client, batch_id, 30)
        kill(server.process.pid)
    with running_server("--config", config) as server:
        client = server.client()
        wait_for(client, batch_id, 60)
        kill(*workers(server), server.process.pid)
    with running_server("--config", config) as server:
        client = server.client()
        batch = ended(client, batch_id)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        assert batch.usage.output_tokens == NUM_LINES * 40
        assert texts(client, batch.output_file_id) == wanted


def test_a_server_that_is_stopped_leaves_its_batch_to_the_next(config: Path) -> None:
    with running_server("--config", config) as server:
        client = server.client()
        batch_id = submit(client, LINES).id
        wait_for(client, batch_id, 10)
        server.terminate()
        assert server.wait() == 0
    with running_server("--config", config) as server:
        batch = ended(server.client(), batch_id)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == NUM_LINES
        assert len(results(server.client(), batch.output_file_id)) == NUM_LINES


def test_a_disk_that_is_full_stops_the_batch_with_a_reason_and_it_goes_on(config: Path) -> None:
    """The kernel's limit on the size of a file stands for a disk that takes no more."""
    with running_server("--config", config) as server:
        client = server.client()
        batch_id = submit(client, LINES).id
        wait_for(client, batch_id, 5)
        files = (config.parent / "state" / "batches" / "files").iterdir()
        output = max(files, key=lambda path: path.stat().st_mtime)
        before = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (output.stat().st_size + 10, before[1]))
        eventually(lambda: "written" in str(progress(client, batch_id)["held_by"]))
        stopped_at = client.batches.retrieve(batch_id).request_counts
        assert output.read_bytes().endswith(b"\n"), "a line was left half written"
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, before)
        batch = ended(client, batch_id)
        assert stopped_at is not None
        assert stopped_at.completed < NUM_LINES
        assert batch.request_counts.completed == NUM_LINES
        assert len(results(client, batch.output_file_id)) == NUM_LINES


def progress(client: openai.OpenAI, batch_id: str) -> dict[str, object]:
    found: dict[str, object] = (client.batches.retrieve(batch_id).model_extra or {})["progress"]
    return found
