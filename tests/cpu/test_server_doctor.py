"""`doctor --server` on a real server: sound, refusing, with a worker that was killed, drained, with a file that was
refused, and with a damaged model. What it says and where the runbook goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import openai
import pytest
from server_fixture import Server, eventually, run_command, running_server
from store_builders import flip_bit, stored, writable_blob

from dovetail.cli.doctor_server import diagnose
from dovetail.cli.symptoms import Finding

CONFIG = """
models: {{llama: {{source: {source}}}}}
auth: {{keys: [{{name: boss, key: sk-boss, admin: true}}]}}
server: {{max_queue: 8}}
nodes: [{{name: only, threads: 1, kv_cache: 16MiB}}]
"""
KEY = {"authorization": "Bearer sk-boss"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[[str], Path]) -> Path:
    file = tmp_path_factory.mktemp("doctor") / "dovetail.yaml"
    file.write_text(CONFIG.format(source=tiny_folder("llama")))
    return file


@pytest.fixture(scope="module")
def server(config: Path) -> Iterator[Server]:
    with running_server("--config", config, "--store", config.with_name("store")) as running:
        yield running


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_API_KEY", "sk-boss")


def found(server: Server, symptom: str) -> list[Finding]:
    return [finding for finding in diagnose(server.url).findings if finding.symptom == symptom]


def test_a_sound_server_has_nothing_wrong(server: Server) -> None:
    client = server.client(api_key="sk-boss")
    assert client.completions.create(model="llama", prompt="a", max_tokens=2).choices
    diagnosis = diagnose(server.url)
    assert (diagnosis.findings, diagnosis.not_seen) == ([], {})
    said = run_command("doctor", "--server", server.url, env={**os.environ})
    assert (said.returncode, "nothing of the runbook applies" in said.stdout) == (0, True)


def test_what_the_key_may_not_see_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_API_KEY", "sk-nobody")
    diagnosis = diagnose(server.url)
    assert diagnosis.not_seen["/api/ps"].startswith("401")
    assert diagnosis.not_seen["/metrics"].startswith("401")


def test_refusals_are_counted_with_their_code(server: Server) -> None:
    def ask() -> None:
        options = {"max_tokens": 100, "n": 8, "extra_body": {"ignore_eos": True}}
        with suppress(openai.OpenAIError):
            server.client(api_key="sk-boss").completions.create(model="llama", prompt="a", **options)

    asking = [threading.Thread(target=ask) for _ in range(4)]  # each wants all eight places
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
    (finding,) = found(server, "refusals")
    assert not finding.is_urgent
    assert "requests under /v1 were refused (503 or 429): queue_full" in finding.seen


def test_a_worker_that_was_killed_is_told(server: Server) -> None:
    (node,) = server.get("/api/ps", headers=KEY).json()["nodes"]
    os.kill(node["pid"], signal.SIGKILL)
    eventually(lambda: any("ended 1 times" in finding.seen for finding in found(server, "nodes")), timeout_s=60)
    (memory,) = found(server, "memory")
    assert "dmesg" in memory.do
    eventually(lambda: server.get("/health").status_code == 200, timeout_s=60)


def test_a_drained_server_is_urgent_and_the_command_fails(server: Server) -> None:
    assert server.post("/api/nodes/only/drain", {}, headers=KEY).status_code == 200
    said = run_command("doctor", "--server", server.url, "--json", env={**os.environ})
    assert said.returncode == 1
    urgent = [finding for finding in json.loads(said.stdout)["findings"] if finding["is_urgent"]]
    assert {finding["symptom"] for finding in urgent} == {"refusals", "nodes"}
    assert any("dovetail leave only --undo" in finding["do"] for finding in urgent)
    assert urgent[0]["section"] == "docs/guide/runbook.md#refusals"
    assert server.post("/api/nodes/only/resume", {}, headers=KEY).status_code == 200


def test_a_file_that_was_refused_is_told(server: Server, config: Path) -> None:
    config.write_text(config.read_text() + "nonsense: 1\n")
    server.hang_up()
    eventually(lambda: any("nonsense" in finding.seen for finding in found(server, "upgrade")))


def test_damage_names_the_model_and_the_command(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "source"))
    model = stored(source, tmp_path / "store")
    flip_bit(writable_blob(model.path), 9000)
    text = CONFIG.format(source="m").replace("{llama:", "{m:") + f"store: {{path: {tmp_path / 'store'}}}\n"
    (tmp_path / "dovetail.yaml").write_text(text)
    with running_server("--config", tmp_path / "dovetail.yaml") as server:
        eventually(lambda: found(server, "damage"), timeout_s=60)
        (finding,) = found(server, "damage")
        assert "dovetail store verify" in finding.do


def test_no_server_and_another_server_are_one_line() -> None:
    said = run_command("doctor", "--server", "http://127.0.0.1:9", env={**os.environ})
    assert (said.returncode, said.stderr.count("\n")) == (1, 1)
    assert "no server at http://127.0.0.1:9" in said.stderr
    assert "runbook.md#no-answer" in said.stderr
