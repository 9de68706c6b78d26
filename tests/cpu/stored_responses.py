"""Memory of the gateway over many stored responses: `stored_responses.py [COUNT] [--json]`. Fails if it keeps growing.

Two keys store responses of every shape beside each other: short ones, conversations that go on, fields that nobody
knows with an emoji, deep ones, reasoning items, large metadata, a megabyte now and then, and responses in the
background, half of which are cancelled, some of these twice, some after they have ended.
"""

from __future__ import annotations

import json
import random
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

KEYS = ("a", "b")
THREADS = 4
LARGE = 1_900_000  # characters; a body may have 2 MiB


def shape_of(draw: random.Random, last: str | None) -> tuple[str, dict[str, Any]]:
    kind = draw.choice(["plain", "goes on", "emoji", "deep", "reasoning", "metadata", "background", "background"])
    size = LARGE if draw.random() < 0.02 else draw.randrange(20_000)
    message = {"role": "user", "content": "ab"}
    if kind == "goes on" and last is not None:
        return kind, {"input": "more", "previous_response_id": last}
    if kind == "emoji":
        return kind, {"input": [message | {"note": "😀" + "x" * (size // 4)}]}
    if kind == "deep":
        return kind, {"input": [message | {"note": [{"a": ["x" * size]}]}]}
    if kind == "reasoning":
        return kind, {"input": [{"type": "reasoning", "content": [], "encrypted_content": "x" * size}, message]}
    if kind == "metadata":
        return kind, {"input": "ab", "metadata": {"note": "x" * min(size, 100_000)}}
    if kind == "background":
        return kind, {
            "input": "ab",
            "background": True,
            "top_logprobs": 20,
            "include": ["message.output_text.logprobs"],
        }
    return "plain", {"input": "ab"}


class Clients:
    def __init__(self, server: Server, count: int) -> None:
        self.answers: Counter[str] = Counter()
        self.stored = 0
        self._server, self._left = server, count
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(THREADS)]

    def run(self, every: int) -> list[tuple[int, int]]:
        """Responses stored and resident bytes of the gateway, after every so many."""
        rows, next_at = [(0, resident(self._server))], every
        for thread in self._threads:
            thread.start()
        while any(thread.is_alive() for thread in self._threads):
            time.sleep(0.05)
            if self.stored >= next_at:
                rows.append((self.stored, resident(self._server)))
                next_at += every
        time.sleep(3)  # what was taken for large bodies goes back a second after the last
        return [*rows, (self.stored, resident(self._server))]

    def _ask(self, number: int) -> None:
        draw, last = random.Random(number), None
        headers = {"authorization": f"Bearer sk-{KEYS[number % len(KEYS)]}"}
        with httpx.Client(base_url=self._server.url, headers=headers, timeout=60) as client:
            while self._take():
                kind, options = shape_of(draw, last)
                body = {"model": "llama", "max_output_tokens": 4, "temperature": 0} | options
                answer = client.post("/v1/responses", json=body)
                self._count(f"{kind}: {answer.status_code}", is_stored=answer.status_code == 200)
                if answer.status_code != 200:
                    last = None
                    continue
                last = answer.json()["id"] if kind != "background" else last
                for _ in range(draw.randrange(3) if kind == "background" else 0):
                    time.sleep(draw.random() * 0.02)
                    path = f"/v1/responses/{answer.json()['id']}/cancel"
                    self._count(f"cancel: {client.post(path).status_code}", is_stored=False)

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def _count(self, outcome: str, *, is_stored: bool) -> None:
        with self._lock:
            self.answers[outcome] += 1
            self.stored += is_stored


def resident(server: Server) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


def main(count: int, as_json: bool) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny("llama", folder / "llama")
        keys = [{"name": key, "key": f"sk-{key}"} for key in KEYS]
        file = folder / "dovetail.yaml"
        file.write_text(json.dumps({"models": {"llama": {"source": str(folder / "llama")}}, "auth": {"keys": keys}}))
        with running_server("--config", file, "--kv-cache", "64MiB", log=folder / "log") as server:
            clients = Clients(server, count)
            rows = clients.run(max(count // 10, 1))
            seen = {key: of_another(server, key) for key in KEYS}
    half = max(size for stored, size in rows if stored <= count // 2)
    growth = max(size for _, size in rows) - half
    if as_json:
        print(json.dumps({"rows": rows, "answers": clients.answers, "still_there": seen}, indent=1))
    else:
        print("\n".join(f"{stored:6d} stored: {size / 1e6:.0f} MB" for stored, size in rows))
        print(", ".join(f"{outcome} × {number}" for outcome, number in sorted(clients.answers.items())))
        print(f"grew by {growth / 1e6:.0f} MB in the second half; a new response of each key is there: {seen}")
    return 0 if growth < 32e6 and all(seen.values()) else 1


def of_another(server: Server, key: str) -> bool:
    """Whether a response of the key that is stored now can be got, and by no other key."""
    headers = {"authorization": f"Bearer sk-{key}"}
    asked = server.post("/v1/responses", {"model": "llama", "input": "ab", "max_output_tokens": 2}, headers=headers)
    path = f"/v1/responses/{asked.json()['id']}"
    other = {"authorization": f"Bearer sk-{'b' if key == 'a' else 'a'}"}
    return server.get(path, headers=headers).status_code == 200 and server.get(path, headers=other).status_code == 404


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    sys.exit(main(numbers[0] if numbers else 10_000, "--json" in sys.argv))
