"""What came with a model, against the server that took it in: templates without end, files that take for ever."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import httpx
import numpy as np
import psutil
import pytest
from server_fixture import Server, eventually, running_server

KEY = {"authorization": "Bearer sk-boss"}
CONFIG = """
models: {{good: {{source: {good}}}, bad: {{source: {bad}}}}}
auth: {{keys: [{{name: boss, key: sk-boss, admin: true}}]}}
store: {{path: {store}, pull_timeout: 60s, pull_memory: 1GiB}}
nodes: [{{threads: 1, kv_cache: 16MiB}}]
"""


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tmp_path = tmp_path_factory.mktemp("strangers")
    bad = tmp_path / "bad"
    shutil.copytree(tiny_folder("llama"), bad)
    settings = json.loads((bad / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (bad / "tokenizer_config.json").write_text(json.dumps(settings))
    config = tmp_path / "dovetail.yaml"
    config.write_text(CONFIG.format(good=tiny_folder("llama"), bad=bad, store=tmp_path / "store"))
    with running_server("--config", config) as running:
        yield running


def chat(server: Server, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return server.post("/v1/chat/completions", body, headers=KEY)


def live_s(server: Server) -> float:
    started = time.monotonic()
    assert server.get("/live").status_code == 200
    return time.monotonic() - started


def write_endless_gguf(path: Path) -> None:
    """Half a million texts of no length, each of which becomes several objects of the package that reads them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("general.tags", [""] * 500_000)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pulling(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "dovetail.store.pull_child" in child.cmdline()]


def test_a_pull_is_a_process_that_a_delete_ends(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "slow.gguf"
    write_endless_gguf(path)
    added = server.post("/api/models", {"name": "slow", "source": str(path)}, headers=KEY)
    assert added.status_code == 202, added.text
    eventually(lambda: pulling(server))
    pulling(server)[0].suspend()  # as one that gets on by no byte, however fast the reader has become
    before = psutil.Process(server.process.pid).memory_info().rss
    times = [live_s(server) for _ in range(20)]
    print(f"/live meanwhile: {max(times) * 1000:.0f} ms at most")
    deleted = httpx.delete(f"{server.url}/api/models/slow", headers=KEY, timeout=30)
    assert deleted.status_code == 200, deleted.text
    eventually(lambda: not pulling(server), timeout_s=5)
    assert psutil.Process(server.process.pid).memory_info().rss - before < 100 << 20
    pulls = server.get("/api/pulls", headers=KEY).json()
    assert "cancelled" in json.dumps(pulls)


def test_a_model_that_is_pulled_beside_is_served(server: Server, tmp_path: Path) -> None:
    from tiny_gguf import save_tiny_gguf

    path = tmp_path / "small.gguf"
    save_tiny_gguf("llama", path)
    assert server.post("/api/models", {"name": "small", "source": str(path)}, headers=KEY).status_code == 202
    eventually(lambda: "small" in [model["id"] for model in server.get("/v1/models", headers=KEY).json()["data"]])
    body = {"model": "small", "prompt": "a", "max_tokens": 3}
    eventually(lambda: server.post("/v1/completions", body, headers=KEY).status_code == 200, timeout_s=60)


def test_at_last_templates_without_end_hold_up_neither_other_chats_nor_the_end_of_the_server(server: Server) -> None:
    assert chat(server, "good").status_code == 200
    answers: list[httpx.Response] = []

    def ask() -> None:
        try:
            answers.append(chat(server, "bad"))
        except httpx.HTTPError:
            return  # the server has ended meanwhile

    first = chat(server, "bad")
    assert first.status_code == 400
    assert first.json()["error"]["code"] == "chat_template_error"
    asking = [threading.Thread(target=ask) for _ in range(8)]
    for thread in asking:
        thread.start()
    times = []
    for _ in range(5):
        times.append(live_s(server))
        assert chat(server, "good").status_code == 200
    print(f"/live meanwhile: {max(times) * 1000:.0f} ms at most")
    server.terminate()
    started = time.monotonic()
    assert server.wait() == 0
    print(f"ended {time.monotonic() - started:.1f} s after the signal")
    for thread in asking:
        thread.join()
