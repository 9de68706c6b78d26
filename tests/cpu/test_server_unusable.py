"""What no retry mends, and nodes that cannot serve: said once, in every place where an operator looks, and no request
waits for it. At the end a shutdown that says what it cut."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import openai
import pytest
import torch
from server_fixture import Server, eventually, run_command, running_server

KEY = {"authorization": "Bearer sk-boss"}
CONFIG = """
models: {{llama: {{source: {source}}}}}
auth: {{keys: [{{name: boss, key: sk-boss, admin: true}}]}}
server: {{drain_timeout: 500ms}}
nodes:
  - {{name: good, threads: 1, kv_cache: 16MiB}}
  - {{name: bad, device: "cuda:0"}}
"""
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the node is usable here")


@pytest.mark.parametrize(
    ("options", "environment", "says"),
    [
        ((), {"DOVETAIL_KERNELS": "z80"}, "DOVETAIL_KERNELS: unknown kernel level 'z80': this machine has torch"),
        pytest.param(("--device", "cuda:0"), {}, "device cuda:0: ", marks=needs_no_gpu),
    ],
)
def test_a_setting_that_no_retry_mends_ends_the_server_with_a_line(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str], says: str
) -> None:
    store = ("--store", str(tmp_path), "--port", "0")
    done = run_command("serve", *store, *options, env={**os.environ, **environment})
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert says in line
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("unusable") / "log"


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], log: Path) -> Iterator[Server]:
    config = log.with_name("dovetail.yaml")
    config.write_text(CONFIG.format(source=tiny_folder("llama")))
    with running_server("--config", config, "--store", log.with_name("store"), log=log) as running:
        yield running


@needs_no_gpu
def test_a_node_that_cannot_be_used_is_marked_and_the_others_serve(server: Server, log: Path) -> None:
    client = server.client(api_key="sk-boss")
    assert client.completions.create(model="llama", prompt="a", max_tokens=2).choices
    assert server.get("/health").json()["status"] == "ok"
    nodes = {node["name"]: node for node in server.get("/api/nodes", headers=KEY).json()["data"]}
    assert (nodes["good"]["state"], nodes["good"]["problem"], nodes["bad"]["state"]) == ("up", None, "failed")
    assert "device cuda:0: " in nodes["bad"]["problem"]
    shown = run_command("ps", env={**os.environ, "DOVETAIL_API_KEY": "sk-boss", "DOVETAIL_URL": server.url}).stdout
    assert "bad failed: device cuda:0: " in shown
    assert {node["name"]: node["starts"] for node in server.get("/api/ps", headers=KEY).json()["nodes"]}["bad"] == 1
    assert log.read_text().count("it is not started again, the others serve") == 1


@needs_no_gpu
def test_requests_are_refused_at_once_while_every_node_is_drained(server: Server) -> None:
    client = server.client(api_key="sk-boss")
    assert server.post("/api/nodes/good/drain", {}, headers=KEY).status_code == 200
    shown = {node["name"]: node["state"] for node in server.get("/api/ps", headers=KEY).json()["nodes"]}
    assert shown["good"] == "drained"
    health = server.get("/health")
    assert (health.status_code, "all are drained" in health.json()["status"]) == (503, True)
    with pytest.raises(openai.InternalServerError, match="no node can serve: all are drained; resume one"):
        client.completions.create(model="llama", prompt="a", max_tokens=2, timeout=10)
    assert server.post("/api/nodes/good/resume", {}, headers=KEY).status_code == 200
    assert server.get("/health").status_code == 200
    assert client.completions.create(model="llama", prompt="a", max_tokens=2).choices


@needs_no_gpu
def test_at_last_a_shutdown_says_what_it_waits_for_and_what_it_cut(server: Server, log: Path) -> None:
    def ask() -> None:
        client, options = server.client(api_key="sk-boss"), {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
        with suppress(openai.OpenAIError):  # the shutdown's
            for _ in range(1000):
                client.completions.create(model="llama", prompt="a", n=8, **options)

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: server.get("/api/nodes/good", headers=KEY).json()["unfinished"])
    server.terminate()
    assert server.wait() == 0
    asking.join(60)
    text = log.read_text()
    assert "shutting down: waiting up to 0.5 s for 8 answers to end" in text
    assert "drained: " in text
