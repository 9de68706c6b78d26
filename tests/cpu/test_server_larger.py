"""A server with models that are larger than its node: it answers from the disk with the same text, beside others."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_fixture import Server, running_server

from dovetail.types import ModelCard

CONFIG = """
models:
  large: {{source: {model}}}
  whole: {{source: {folder}}}
nodes:
  - {{name: cpu-0, memory: 64MiB, event_log: {log}}}
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("larger") / "decisions.jsonl"


@pytest.fixture(scope="module")
def server(smollm2: ModelCard, tiny_folder: object, log: Path) -> Iterator[Server]:
    config = log.parent / "dovetail.yaml"
    config.write_text(CONFIG.format(model=smollm2.name, folder=tiny_folder("llama"), log=log))  # type: ignore[operator]
    with running_server("--config", config, log=log.parent / "server.log") as running:
        yield running


def complete(server: Server, model: str, prompt: str, tokens: int) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_the_text_is_that_of_a_server_with_room(
    server: Server, smollm2_server: Server, smollm2: ModelCard, log: Path
) -> None:
    assert smollm2.size_bytes > 80 << 20
    for prompt, tokens in (("The capital of France is", 24), ("words " * 300, 8)):
        assert complete(server, "large", prompt, tokens) == complete(smollm2_server, smollm2.name, prompt, tokens)
    assert "large is larger than the node" in (log.parent / "server.log").read_text()
    hostings = [line for line in map(json.loads, log.read_text().splitlines()) if line.get("event") == "hosting"]
    (layers,) = {line["model"] for line in hostings if "layer_s" in line}
    assert layers == "large"
    assert all(line["weight_bytes"] < 64 << 20 for line in hostings)


def test_neighbours_are_answered_meanwhile(server: Server) -> None:
    texts: list[str] = []
    asking = [
        threading.Thread(target=lambda at=at: texts.append(complete(server, "large", f"{at}: once upon a time", 40)))
        for at in range(3)
    ]
    for one in asking:
        one.start()
    alone = complete(server, "whole", "beside", 60)
    assert {complete(server, "whole", "beside", 60) for _ in range(4)} == {alone}
    for one in asking:
        one.join()
    assert len(texts) == 3
    node = server.node()
    assert {model["name"] for model in node["models"]} >= {"large", "whole"}


def test_a_request_whose_client_leaves_in_the_middle_frees_what_it_held(server: Server) -> None:
    client = server.client(timeout=120)
    stream = client.completions.create(model="large", prompt="a long tale", max_tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    assert complete(server, "large", "The capital of France is", 5)


def test_targets_that_the_disk_cannot_keep_are_refused(server: Server) -> None:
    body = {"model": "large", "prompt": "fast", "max_tokens": 4}
    answer = server.post("/v1/completions", body, headers={"x-slo-tpot-ms": "0.01"})
    assert answer.status_code == 503, answer.text
