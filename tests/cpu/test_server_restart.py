"""A gateway that is killed and started again: its workers are there with their models, and what was said of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_fixture import Server, eventually, read_one_of_many, running_server

from dovetail.cluster.durable import SqliteDurable
from dovetail.errors import ConfigError
from dovetail.local_token import token_for

CONFIG = """
models:
  llama: {{source: {folder}, dtype: f64, keep_alive: 600s}}
server: {{state: {state}, outlive: 60s}}
nodes:
  - {{name: left, threads: 1, memory: 64MiB}}
"""
NUM_STREAMS = 4
NUM_TOKENS = 200
BODY = {"model": "llama", "prompt": "so it goes", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def config(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    file = tmp_path / "dovetail.yaml"
    file.write_text(CONFIG.format(folder=tiny_folder("llama"), state=tmp_path / "state"))
    return file


def nodes(server: Server) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in server.get("/api/nodes").json()["data"]}


def text(server: Server) -> str:
    answer = server.post("/v1/completions", BODY)
    assert answer.status_code == 200, answer.text
    said: str = answer.json()["choices"][0]["text"]
    return said


def post(server: Server, path: str, body: dict[str, Any] | None = None) -> None:
    headers = {"authorization": f"Bearer {token_for(server.url)}"}
    httpx.post(server.url + path, headers=headers, json=body, timeout=60).raise_for_status()


def metric(server: Server, name: str) -> float:
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(f"dovetail:{name}")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def is_alive(pid: int) -> bool:
    """Nobody may be there to take an orphan's end in."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def kill(server: Server) -> None:
    server.process.kill()
    server.process.wait()


async def read_all(front: Server, seen: list[int]) -> list[str]:
    async with front.async_client(timeout=300) as client:
        reads = [read_one_of_many(client, index, NUM_TOKENS, seen) for index in range(len(seen))]
        return await asyncio.gather(*reads)


def begin_streams(front: Server) -> tuple[Future[list[str]], list[int]]:
    """From a thread of their own; returns what they will have said, and how far each has come."""
    seen, said = [0] * NUM_STREAMS, Future[list[str]]()

    def run() -> None:
        try:
            said.set_result(asyncio.run(read_all(front, seen)))
        except Exception as error:
            said.set_exception(error)

    threading.Thread(target=run).start()
    return said, seen


def kill_under_streams(server: Server, front: Server) -> Future[list[str]]:
    """Returns what the streams of the front will have said."""
    said, seen = begin_streams(front)
    eventually(lambda: min(seen) > 2 or said.done(), timeout_s=60)
    kill(server)
    return said


def test_a_killed_gateway_finds_its_workers_with_their_models_and_a_front_loses_no_stream(
    config: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with (
        running_server("--config", config) as first,
        running_server(tmp_path / "state", "--config", config, verb="front") as front,
    ):
        undisturbed = begin_streams(front)[0].result(120)
        post(first, "/api/models", {"name": "added", "source": str(tiny_folder("llama"))})
        before = {name: node["pid"] for name, node in nodes(first).items()}
        streams = kill_under_streams(first, front)
        with running_server("--config", config) as second:
            assert streams.result(120) == undisturbed, "every client got all of its text"
            assert {name: node["pid"] for name, node in nodes(second).items()} == before, "no worker was started"
            assert metric(second, "model_load_seconds_count") == 0, "nothing was loaded"
            assert text(second) == text(front)
            assert metric(second, "cold_starts_total") == 0
            assert "added" in second.get("/v1/models").text
            both = front.post("/v1/completions", BODY | {"n": 2})
            assert len({one["text"] for one in both.json()["choices"]}) == 1
            unknown = front.post("/v1/completions", BODY | {"max_tokens": 10**9})
            assert unknown.status_code == 400
            kill(second)
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        with running_server("--config", config) as third:
            eventually(lambda: nodes(third)["left"]["models"])  # it was ready, and nobody has asked for it
            after = {node["pid"] for node in nodes(third).values()}
            assert after.isdisjoint(before.values())
            assert metric(third, "model_load_seconds_count") == 1
        assert not any(is_alive(pid) for pid in after), "a server that is stopped takes its workers along"


def test_a_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    SqliteDurable(folder).close()
    (folder / "state.db").write_bytes(b"nonsense" * 1000)
    with pytest.raises(ConfigError, match=r"state\.db"):
        SqliteDurable(folder)
    with pytest.raises(ConfigError, match="longer than"):
        SqliteDurable(tmp_path / ("long" * 30))


def test_facts_are_there_for_the_next_one_whatever_became_of_the_last(tmp_path: Path) -> None:
    first = SqliteDurable(tmp_path / "state")
    first.put("worker", "left", {"pid": 1})
    first.put("worker", "right", None)
    first.drop("worker", "right")
    with pytest.raises(ConfigError, match="another server uses"):
        SqliteDurable(tmp_path / "state")
    reader = sqlite3.connect(tmp_path / "state" / "state.db")
    assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert reader.execute("SELECT name, value FROM facts").fetchall() == [("left", '{"pid": 1}')]
    reader.close()
    first.close()
    second = SqliteDurable(tmp_path / "state")
    assert second.all("worker") == {"left": {"pid": 1}}
    assert second.get("worker", "right") is None
    second.close()
