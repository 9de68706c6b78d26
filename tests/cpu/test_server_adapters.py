"""LoRA adapters behind a real server: named, computed together, loaded and unloaded, kept through a worker's death."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from server_fixture import Server, eventually, running_server
from tiny_adapters import merge, save_adapter, write_adapter

from dovetail.native import levels
from dovetail.store import Catalogue

pytestmark = pytest.mark.skipif(len(levels()) == 1, reason="the native kernels were not built")
ADMIN, USER = ({"authorization": f"Bearer sk-{who}"} for who in ("boss", "user"))
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "adapters.md"
PROMPT = "adapters of one model are computed together"


class Adapted(NamedTuple):
    server: Server
    base: Path
    adapters: dict[str, Path]
    event_log: Path

    def say(self, model: str, prompt: str = PROMPT, tokens: int = 24) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.server.post("/v1/completions", body, headers=USER)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        return str(answer.json()["choices"][0]["text"])

    def load(self, name: str, path: Path | str, headers: dict[str, str] = ADMIN, **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(path), **more}
        return self.server.post("/v1/load_lora_adapter", body, headers=headers)

    def unload(self, name: str) -> httpx.Response:
        return self.server.post("/v1/unload_lora_adapter", {"lora_name": name}, headers=ADMIN)

    def planned_bytes(self) -> int:
        node = self.server.get("/api/ps", headers=ADMIN).json()["nodes"][0]
        return int(node["memory_planned_bytes"])


@pytest.fixture(scope="module")
def adapted(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder, base = tmp_path_factory.mktemp("adapted"), tiny_folder("llama")
    adapters = {name: save_adapter(folder / name, base, seed=seed, rank=8) for seed, name in enumerate("abcd")}
    pulled = Catalogue(folder / "store").take(str(adapters["b"]), name="b-pulled")  # comes through the host pool
    offered = {"a": str(adapters["a"]), "b": pulled.name}
    models: dict[str, Any] = {"llama": {"source": str(base), "adapters": offered}}
    for name in "abc":
        models[f"merged-{name}"] = {"source": str(merge(base, adapters[name], folder / f"merged-{name}"))}
    for model in models.values():
        model["dtype"] = "f32"
    keys = [{"name": "boss", "key": "sk-boss", "admin": True}, {"name": "user", "key": "sk-user"}]
    log = folder / "events.jsonl"
    nodes = [{"event_log": str(log), "threads": 1, "kv_cache": "16MiB"}]
    config = {"models": models, "auth": {"keys": keys}, "nodes": nodes, "store": {"path": str(folder / "store")}}
    file = folder / "dovetail.yaml"
    file.write_text(json.dumps(config | {"server": {"resume_timeout": "60s"}}))
    with running_server("--config", file) as server:
        yield Adapted(server, base, adapters, log)


def test_an_adapter_is_a_model_of_its_own_name_with_the_text_of_merged_weights(adapted: Adapted) -> None:
    listed = {one["id"]: one for one in adapted.server.get("/v1/models", headers=USER).json()["data"]}
    assert [listed[name]["parent"] for name in ("llama", "a", "b")] == [None, "llama", "llama"]
    assert listed["a"]["max_model_len"] == listed["llama"]["max_model_len"]
    said = {name: adapted.say(name) for name in ("llama", "a", "b", "merged-a", "merged-b")}
    assert (said["a"], said["b"]) == (said["merged-a"], said["merged-b"])
    assert len({said["llama"], said["a"], said["b"]}) == 3
    states = {one["name"]: one for one in adapted.server.get("/api/models", headers=ADMIN).json()["data"]}
    assert states["a"]["parent"] == "llama"
    assert states["a"]["source"] == str(adapted.adapters["a"])
    assert states["a"]["requests"] == 1
    metrics = adapted.server.get("/metrics", headers=ADMIN).text
    assert re.search(r'dovetail:slo_requests_total\{[^}]*model_name="a"', metrics) is not None
    arrivals = [json.loads(line) for line in adapted.event_log.read_text().splitlines() if '"arrive"' in line]
    assert {one.get("adapter") for one in arrivals if one["model"] == "llama"} == {None, "a", "b"}


def test_answers_of_many_adapters_at_once_are_those_of_each_alone(adapted: Adapted) -> None:
    names = ["llama", "a", "b"] * 5
    alone = {name: adapted.say(name, tokens=40) for name in set(names)}

    async def say_all() -> list[str]:
        way: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
        async with adapted.server.async_client(api_key="sk-user") as client:
            asked = [client.completions.create(model=name, prompt=PROMPT, **way) for name in names]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    assert asyncio.run(say_all()) == [alone[name] for name in names]


def test_an_adapter_comes_and_goes_with_its_memory(adapted: Adapted) -> None:
    adapted.say("llama")
    before = adapted.planned_bytes()
    answer = adapted.load("c", adapted.adapters["c"], base_model_name="llama")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'c' added successfully.")
    assert adapted.say("c") == adapted.say("merged-c")
    eventually(lambda: adapted.planned_bytes() > before)
    assert adapted.load("c", adapted.adapters["c"], base_model_name="llama").status_code == 400
    again = adapted.load("c", adapted.adapters["d"], base_model_name="llama", load_inplace=True)
    assert again.status_code == 200
    assert adapted.say("c") != adapted.say("merged-c")
    assert adapted.unload("c").text == "Success: LoRA adapter 'c' removed successfully."
    assert adapted.unload("c").status_code == 404
    body = {"model": "c", "prompt": "x"}
    assert adapted.server.post("/v1/completions", body, headers=USER).status_code == 404
    adapted.server.post("/api/models/merged-c/unload?force=true", {}, headers=ADMIN)
    eventually(lambda: adapted.say("llama") and adapted.planned_bytes() <= before)


def test_what_is_no_adapter_of_the_model_is_a_400_that_names_file_and_tensor(adapted: Adapted, tmp_path: Path) -> None:
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    first, second = np.ones((4, 48), np.float32), np.ones((48, 4), np.float32)

    def refused(name: str, tensors: dict[str, Any] | None, **config: Any) -> str:
        folder = tmp_path / name
        found = {f"{module}.lora_A.weight": first, f"{module}.lora_B.weight": second} if tensors is None else tensors
        write_adapter(folder, found, **({"r": 4, "target_modules": ["q_proj"]} | config))
        answer = adapted.load(name, folder, base_model_name="llama")
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["message"])

    head = {f"base_model.model.lm_head.lora_{one}.weight": each for one, each in (("A", first), ("B", second))}
    wide = {f"{module}.lora_A.weight": np.ones((4, 40), np.float32), f"{module}.lora_B.weight": second}
    problem = refused("head", head)
    assert "adapter_model.safetensors: lm_head.lora_A.weight" in problem
    assert "q_proj" in problem
    assert "q_proj.lora_A.weight has shape [4, 40]" in refused("wide", wide)
    assert "adapter_model.safetensors" in refused("rank", None, r=5)
    assert "use_dora = True" in refused("dora", None, use_dora=True)
    assert "init_lora_weights = 'pissa'" in refused("pissa", None, init_lora_weights="pissa")
    pickled = write_adapter(tmp_path / "pickled", {f"{module}.lora_A.weight": first}, r=4, target_modules=["q_proj"])
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    assert "pickle" in adapted.load("pickled", pickled, base_model_name="llama").json()["error"]["message"]
    nowhere = adapted.load("nowhere", "no/such/folder", base_model_name="llama")
    assert "dovetail pull" in nowhere.json()["error"]["message"]
    assert adapted.load("x", adapted.adapters["a"], base_model_name="nosuch").status_code == 404
    assert "base_model_name" in adapted.load("x", adapted.adapters["a"]).json()["error"]["message"]
    assert adapted.load("x", adapted.adapters["a"], base_model_name="b").status_code == 400  # an adapter of an adapter
    assert adapted.load("merged-a", adapted.adapters["a"], base_model_name="llama").status_code == 409
    assert adapted.load("x", adapted.adapters["a"], headers=USER, base_model_name="llama").status_code == 403


def test_an_adapter_that_is_gone_when_it_is_needed_fails_its_own_requests(adapted: Adapted, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "gone", adapted.base)
    assert adapted.load("gone", folder, base_model_name="llama").status_code == 200
    (folder / "adapter_model.safetensors").unlink()
    body = {"model": "gone", "prompt": PROMPT, "max_tokens": 4}
    answer = adapted.server.post("/v1/completions", body, headers=USER)
    assert answer.status_code == 500
    assert "adapter_model.safetensors" in answer.json()["error"]["message"]
    assert adapted.say("a") == adapted.say("merged-a")
    adapted.unload("gone")


def test_an_answer_goes_on_with_its_adapter_after_its_worker_died(adapted: Adapted) -> None:
    expected = adapted.say("b", tokens=150)
    (node,) = adapted.server.get("/api/ps", headers=ADMIN).json()["nodes"]
    way: dict[str, Any] = {"max_tokens": 150, "temperature": 0, "extra_body": {"ignore_eos": True}}
    stream = adapted.server.client(api_key="sk-user").completions.create(model="b", prompt=PROMPT, stream=True, **way)
    text, is_killed = "", False
    for chunk in stream:
        text += chunk.choices[0].text if chunk.choices else ""
        if not is_killed:
            os.kill(node["pid"], signal.SIGKILL)
            is_killed = True
    assert text == expected


def test_the_example_in_the_documentation_works_as_written(adapted: Adapted) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", DOCS.read_text(), re.DOTALL)
    script = next(block for block in blocks if "load_lora_adapter" in block)
    script = script.replace("http://127.0.0.1:8000", adapted.server.url).replace(
        "/path/to/my-adapter", str(adapted.adapters["d"])
    )
    script = script.replace("$DOVETAIL_API_KEY", "sk-boss").replace("smollm2-135m-instruct", "llama")
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "added successfully" in done.stdout
    assert '"model":"my-adapter"' in done.stdout
    assert "removed successfully" in done.stdout
