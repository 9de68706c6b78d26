"""What the checks of every client share: where the server is, what is asked, and how the outcome is told.

Runs in the client's own environment, so it needs nothing but Python.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Callable
from typing import Any

URL = os.environ.get("DOVETAIL_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("DOVETAIL_MODEL", "smollm2-135m-instruct")
QUESTION = "Please name the capital of Germany."
WANTED = "Berlin"  # in the answer
TEXTS = ["a cat on a mat", "a dog in the fog", "a cat on a mat"]
CITY_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_forecast", "description": "The weather of a city", "parameters": CITY_SCHEMA},
}

# Calls are asked for one at a time: the small model writes one after the other until its limit otherwise.
_checks: list[tuple[str, Callable[[], None]]] = []


def check(area: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Of an area of the table; what raises does not work."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        _checks.append((area, function))
        return function

    return add


def check_call(name: str, arguments: str | dict[str, object]) -> None:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_forecast", name
    assert set(given) == {"city", "days"}, given
    assert isinstance(given["city"], str), given
    assert given["days"] in range(1, 10), given


def check_vectors(vectors: list[list[float]]) -> None:
    first, second, again = vectors
    assert len(first) > 100
    assert max(abs(a - b) for a, b in zip(first, again, strict=True)) < 1e-5
    assert sum(a * b for a, b in zip(first, second, strict=True)) < 0.9999


def batch_lines(count: int, model: str = MODEL, max_tokens: int = 16) -> bytes:
    """A file of so many requests, as for OpenAI's batches."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": max_tokens}
    body |= {"temperature": 0}
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(count)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def too_long_line() -> bytes:
    """One that fails when it runs."""
    line = json.loads(batch_lines(1))
    line["custom_id"] = "too-long"
    line["body"]["messages"][0]["content"] = "far too long " * 9000
    return json.dumps(line).encode() + b"\n"


def check_answers(output: str, count: int) -> None:
    """Of `batch_lines`, each once."""
    found = [json.loads(line) for line in output.splitlines()]
    assert {one["custom_id"] for one in found} == {f"line-{number}" for number in range(count)}, found
    assert len(found) == count
    for one in found:
        assert WANTED in one["response"]["body"]["choices"][0]["message"]["content"], one


def ended(retrieve: Callable[[], Any], timeout_s: float = 300.0) -> Any:
    """A batch when it has ended."""
    until_s = time.monotonic() + timeout_s
    while (batch := retrieve()).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until_s, batch
        time.sleep(0.2)
    return batch


def run(package: str) -> None:
    """One JSON line per check."""
    print(json.dumps({"version": importlib.metadata.version(package)}))
    for area, function in _checks:
        error = ""
        try:
            function()
        except Exception as failure:  # whatever a foreign client raises is what is looked for
            error = f"{type(failure).__name__}: {failure}"
        print(
            json.dumps({"area": area, "check": function.__name__, "error": " ".join(error.split())[:400]}), flush=True
        )
