"""A machine that joins with an empty store serves what the head has: real processes, which see different folders."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from drive import Engine, make_executor, make_request
from server_fixture import Server, eventually
from tokenizers import Tokenizer

from dovetail.store import Catalogue
from dovetail.store.format.manifest import partition_files

HOME = Path("/proc/self/cwd/store")  # each process has its own
MODELS = {"llama": "llama", "qwen3": "qwen3", "lost": "llama"}
NUM_TOKENS = 12
PROMPT = "the quick brown fox"


class Head(Server):
    def states(self) -> dict[str, str]:
        return {one["name"]: one["state"] for one in self.get("/api/nodes").json()["data"]}

    def complete(self, model: str, **options: Any) -> dict[str, Any]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        answer: dict[str, Any] = self.post("/v1/completions", body | options).json()
        return answer


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("neighbours"), tiny_folder)


def fill(folder: Path, tiny_folder: Callable[[str], Path]) -> Path:
    """The head's store."""
    for name, source in MODELS.items():
        dtype = "f16" if name == "lost" else "f32"
        Catalogue(folder / "store").pull(str(tiny_folder(source)), name=name, dtype=dtype, layout="plain")
    return folder


@contextmanager
def running_head(folder: Path, *machines: str) -> Iterator[Head]:
    """`machines`: what is said of each when it joins, all at once and as soon as possible."""
    config = folder / "dovetail.yaml"
    models = ", ".join(f"{name}: {{source: {name}, dtype: f64}}" for name in MODELS)
    config.write_text(f"models: {{{models}}}\nstore: {{path: {HOME}}}\n")
    command = [sys.executable, str(Path(__file__).with_name("far_machines.py")), str(config)]
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for machine in machines:
            name, *limit = machine.split()
            (folder / name).mkdir()
            process.stdin.write(" ".join(["join", name, str(folder / name), *limit]) + "\n")
        process.stdin.flush()
        ready = json.loads(process.stdout.readline())
        yield Head(process, ready["url"], ready["models"])
    finally:
        process.terminate()
        process.wait(60)
        log.close()


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[Head]:
    with running_head(folder, "machine") as running:
        yield running


def expected(folder: Path, model: str) -> str:
    """What the head's own copy says, computed here."""
    where = folder / "store" / "models" / model
    tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
    executor = make_executor(where, dtype="f64")
    request = make_request(tokenizer.encode(PROMPT).ids, max_tokens=NUM_TOKENS)
    (tokens,) = Engine(executor).run(request).values()
    executor.close()
    return str(tokenizer.decode(tokens))


def test_a_machine_without_models_fetches_what_it_is_asked_for_and_says_the_same(head: Head, folder: Path) -> None:
    machine = folder / "machine"
    eventually(lambda: head.states() == {"machine": "up"}, 60)
    assert not (machine / "models").exists(), "it has nothing yet"
    assert head.complete("llama")["choices"][0]["text"] == expected(folder, "llama")
    (copy,) = (machine / "models").iterdir()
    assert copy.name.startswith("llama-"), "the other model is nobody's yet"
    assert 'tier="neighbour"' in head.get("/metrics").text, "a cold start from a tier of its own"
    # A grammar needs the tokenizer, which comes with the model.
    text = head.complete("qwen3", guided_regex="[ab]{3}", ignore_eos=False)["choices"][0]["text"]
    assert len(text) == 3
    assert set(text) <= {"a", "b"}
    assert not list((machine / "tmp").iterdir())


def test_a_model_that_cannot_be_fetched_is_an_error_that_says_why_and_comes_when_it_can(
    head: Head, folder: Path
) -> None:
    ((blob, _),) = partition_files(folder / "store" / "models" / "lost")
    aside = blob.rename(folder / "aside")
    error = head.complete("lost")["error"]["message"]
    assert "not to be had from any neighbour" in error
    assert "404" in error
    aside.rename(blob)
    assert head.complete("lost")["choices"][0]["text"] == expected(folder, "lost")
