"""LoRA adapters behind a server whose only node is a GPU: texts of merged weights, loaded and unloaded while it runs,
kept through the death of the worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tiny_adapters import merge, save_adapter

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from server_fixture import Server, eventually, running_server

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ADMIN = {"authorization": "Bearer sk-boss"}
PROMPT = "adapters of one model are computed together"
NAMES = ["llama", "a", "b"]


class Adapted:
    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.server.post(path, body, headers=ADMIN)

    def say(self, model: str, tokens: int = 24) -> str:
        body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def node(self) -> dict[str, Any]:
        (one,) = self.server.get("/api/ps", headers=ADMIN).json()["nodes"]
        return dict(one)

    async def say_all(self, names: list[str], disturb: Callable[[], None] | None = None, tokens: int = 40) -> list[str]:
        way: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "extra_body": {"ignore_eos": True}}
        async with self.server.async_client(api_key="sk-boss") as client:
            asked = [asyncio.create_task(client.completions.create(model=name, prompt=PROMPT, **way)) for name in names]
            if disturb is not None:
                await asyncio.sleep(0.05)
                disturb()
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]


@pytest.fixture(scope="module")
def adapted(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder, base = tmp_path_factory.mktemp("adapted"), tiny_folder("llama")
    adapters = {name: save_adapter(folder / name, base, seed=seed, rank=8) for seed, name in enumerate("abc")}
    models: dict[str, Any] = {"llama": {"source": str(base), "adapters": {name: str(adapters[name]) for name in "ab"}}}
    for name in "abc":
        models[f"merged-{name}"] = {"source": str(merge(base, adapters[name], folder / f"merged-{name}"))}
    for model in models.values():
        model["dtype"] = "f32"
    nodes = [{"name": "gpu-0", "device": "cuda:0", "memory": "2GiB"}]
    keys = [{"name": "boss", "key": "sk-boss", "admin": True}]
    config = {"models": models, "nodes": nodes, "auth": {"keys": keys}, "server": {"resume_timeout": "60s"}}
    file = folder / "dovetail.yaml"
    file.write_text(json.dumps(config))
    with running_server("--config", file, log=folder / "log") as server:
        yield Adapted(server, folder)


def test_a_gpu_alone_serves_a_model_and_its_adapters_with_the_texts_of_merged_weights(adapted: Adapted) -> None:
    texts = {name: adapted.say(name) for name in NAMES}
    assert len(set(texts.values())) == len(NAMES)
    for name in "ab":
        assert texts[name] == adapted.say(f"merged-{name}")
    names = NAMES * 6
    assert asyncio.run(adapted.say_all(names, tokens=24)) == [texts[name] for name in names]


def test_an_adapter_comes_and_goes_with_its_memory(adapted: Adapted) -> None:
    def planned() -> int:
        adapted.say("llama")  # after an answer the node says what it has
        return int(adapted.node()["memory_planned_bytes"])

    text = adapted.say("merged-c")
    for name in "abc":
        adapted.post(f"/api/models/merged-{name}/unload?force=true", {})
    seen = [planned()]
    eventually(lambda: seen.append(planned()) or len(set(seen[-4:])) == 1 < len(seen) - 3)
    body = {"lora_name": "c", "lora_path": str(adapted.folder / "c"), "base_model_name": "llama"}
    assert adapted.post("/v1/load_lora_adapter", body).status_code == 200
    assert adapted.say("c") == text
    before = seen[-1]
    eventually(lambda: seen.append(planned()) or seen[-1] == before + (2 << 20))
    assert adapted.post("/v1/unload_lora_adapter", {"lora_name": "c"}).status_code == 200
    eventually(lambda: seen.append(planned()) or seen[-1] == before)


def test_answers_go_on_with_their_adapters_after_the_worker_died(adapted: Adapted) -> None:
    names = NAMES * 4
    expected = {name: adapted.say(name, tokens=200) for name in NAMES}

    def kill() -> None:
        os.kill(adapted.node()["pid"], signal.SIGKILL)

    assert asyncio.run(adapted.say_all(names, kill, tokens=200)) == [expected[name] for name in names]
