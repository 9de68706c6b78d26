"""Batches on a disk that is full: a small one of its own, so that the kernel says it, not a stand-in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest
from server_fixture import Server, eventually, running_server
from test_server_batch_restarts import kill, progress, wait_for
from test_server_batches import completion, ended, results, submit, text_of, upload

CONFIG = """
models: {{llama: {{source: {folder}}}}}
nodes: [{{name: cpu-0, threads: 1, kv_cache: 16MiB}}]
batch: {{folder: {disk}/batches}}
"""
NUM_LINES = 120
LINES = [completion(number, max_tokens=20) for number in range(NUM_LINES)]
NO_ROOM = "No space left on device"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Of 96 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def config(tiny_folder: Callable[[str], Path], disk: Path, tmp_path: Path) -> Path:
    file = tmp_path / "dovetail.yaml"
    file.write_text(CONFIG.format(folder=tiny_folder("llama"), disk=disk))
    return file


def fill(disk: Path, but_bytes: int = 0) -> Path:
    """All of it, but so much."""
    ballast = disk / "ballast"
    number = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while os.write(number, bytes(4096)):
            pass
    os.ftruncate(number, os.fstat(number).st_size - but_bytes)
    os.close(number)
    return ballast


def all_answered(client: openai.OpenAI, batch_id: str, count: int = NUM_LINES) -> None:
    batch = ended(client, batch_id)
    assert batch.status == "completed", batch
    assert batch.request_counts.completed == count
    assert len(results(client, batch.output_file_id)) == count


def test_lines_wait_with_the_reason_and_go_on_when_there_is_room(config: Path, disk: Path) -> None:
    with running_server("--config", config) as server:
        client = server.client()
        batch_id = submit(client, LINES).id
        wait_for(client, batch_id, 5)
        ballast = fill(disk)
        eventually(lambda: NO_ROOM in str(progress(client, batch_id)["held_by"]))
        counts = client.batches.retrieve(batch_id).request_counts
        assert counts is not None
        assert counts.completed < NUM_LINES
        refused = httpx.post(f"{server.url}/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_full")
        assert server.post("/v1/completions", LINES[0]["body"]).status_code == 200
        ballast.unlink()
        all_answered(client, batch_id)


@pytest.mark.parametrize("count", [1000, 20_000], ids=["in the server", "in a process of its own"])
def test_a_check_waits_with_the_reason_and_goes_on_when_there_is_room(config: Path, disk: Path, count: int) -> None:
    """There is room for the record of the batch, and none for the index of its lines."""
    lines = [completion(number, max_tokens=1) for number in range(count)]
    with running_server("--config", config) as server:
        client = server.client()
        file = upload(client, text_of(lines))
        ballast = fill(disk, but_bytes=12 << 10)
        batch = client.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
        eventually(lambda: NO_ROOM in str(progress(client, batch.id)["held_by"]))
        assert client.batches.retrieve(batch.id).status == "validating"
        ballast.unlink()
        eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        client.batches.cancel(batch.id)
        batch = ended(client, batch.id)
        assert batch.request_counts.completed + batch.request_counts.failed == count


def test_a_batch_that_waits_for_room_can_be_cancelled(config: Path, disk: Path) -> None:
    with running_server("--config", config) as server:
        client = server.client()
        file = upload(client, text_of([completion(number) for number in range(20_000)]))
        ballast = fill(disk, but_bytes=12 << 10)
        batch = client.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
        eventually(lambda: NO_ROOM in str(progress(client, batch.id)["held_by"]))
        ballast.unlink()
        client.batches.cancel(batch.id)
        assert ended(client, batch.id).status == "cancelled"


def test_a_server_that_is_started_on_a_full_disk_goes_on_when_there_is_room(config: Path, disk: Path) -> None:
    with running_server("--config", config) as server:
        batch_id = submit(server.client(), LINES).id
        wait_for(server.client(), batch_id, 5)
        kill(server.process.pid)
    ballast = fill(disk)
    with running_server("--config", config) as server:
        eventually(lambda: NO_ROOM in reason(server, batch_id))
        ballast.unlink()
        all_answered_eventually(server, batch_id)


def reason(server: Server, batch_id: str) -> str:
    """Why the batch does not get on."""
    answer = server.get(f"/v1/batches/{batch_id}")
    if answer.status_code == 200:
        return str(answer.json()["progress"]["held_by"])
    assert answer.json()["error"]["code"] == "batches_unavailable", answer.text
    return str(answer.json()["error"]["message"])


def all_answered_eventually(server: Server, batch_id: str) -> None:
    eventually(lambda: server.get(f"/v1/batches/{batch_id}").status_code == 200)
    all_answered(server.client(), batch_id)
