"""Grammars that take long to compile, or for ever: what other streams see of them, and what their senders are told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from server_fixture import Server, running_server

LONG = "((x{1000}){1000}){1000}"  # forces a text without end, which nobody spells out beforehand
SLOW: list[dict[str, Any]] = [
    {"guided_json": {"type": "integer", "multipleOf": 4999999}},
    {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}},
]
GOOD: list[dict[str, Any]] = [
    {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"guided_json": {"type": "string", "pattern": "^[ab]{2,4}$"}},
    {"guided_regex": "(yes|no)"},
    {"guided_regex": LONG},
    {"guided_choice": ["red", "green"]},
]


def ask(client: openai.OpenAI, extra: dict[str, Any], **options: Any) -> str:
    answer = client.completions.create(model="qwen3", prompt="a", max_tokens=48, extra_body=extra, **options)
    return "|".join(choice.text for choice in answer.choices)


@pytest.fixture
def gaps(tiny_server: Server) -> Iterator[list[float]]:
    """How long another model's stream stood still, each time, while the test ran."""
    times: list[float] = []
    stop = threading.Event()

    def read() -> None:
        client = tiny_server.client()
        while not stop.is_set():
            stream = client.completions.create(
                model="llama", prompt="b", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in stream:
                times.append(time.monotonic())
                if stop.is_set():
                    break
            stream.close()

    reader = threading.Thread(target=read)
    reader.start()
    while len(times) < 20:
        time.sleep(0.01)
    found: list[float] = []
    yield found
    stop.set()
    reader.join()
    found.extend(after - before for before, after in pairwise(times))
    print(f"longest gap of the other stream: {max(found) * 1000:.0f} ms")


def test_a_grammar_without_end_is_refused_and_the_refusal_remembered(tiny_server: Server, gaps: list[float]) -> None:
    client = tiny_server.client(max_retries=8)  # a check that got no processor is asked for again
    for extra in SLOW:
        started = time.monotonic()
        with pytest.raises(openai.UnprocessableEntityError, match="does not compile"):
            ask(client, extra, n=2)
        first_s = time.monotonic() - started
        for _ in range(3):
            with pytest.raises(openai.UnprocessableEntityError, match="does not compile"):
                ask(client, extra, n=2)
        again_s = time.monotonic() - started - first_s
        print(f"{json.dumps(extra)[:60]}: {first_s:.1f} s, then {again_s / 3:.3f} s")
        assert again_s < max(first_s, 1.0)


@pytest.mark.parametrize("extra", GOOD)
def test_others_are_followed_by_every_choice(tiny_server: Server, extra: dict[str, Any]) -> None:
    client = tiny_server.client()
    for _ in range(2):  # compiled, then known
        texts = ask(client, extra, n=3, temperature=1.0, seed=5).split("|")
        assert len(texts) == 3
        for text in texts:
            if "guided_choice" in extra:
                assert text in extra["guided_choice"]
            elif extra.get("guided_regex") == LONG:
                assert text.strip("x") == "" != text
            elif "guided_regex" in extra:
                assert text in ("yes", "no")
            elif extra["guided_json"]["type"] == "string":
                assert json.loads(text).strip("ab") == ""
            else:
                assert text.startswith('{"a": ')


def test_a_request_that_is_given_up_while_its_grammar_is_compiled_leaves_nothing(tiny_server: Server) -> None:
    client = tiny_server.client(timeout=0.02)
    with pytest.raises(openai.APITimeoutError):
        ask(client, {"guided_regex": "a{1,400}b{1,400}c{1,400}d"}, n=4)
    assert ask(tiny_server.client(), {"guided_regex": "(yes|no)"}) in ("yes", "no")
    assert tiny_server.blocks_used() == 0


def test_a_check_without_processor_is_a_503_and_the_grammar_is_taken_afterwards(
    tiny_folder: Callable[[str], Path],
) -> None:
    """Of a server that has just become ready: the process that checks grammars is there by then."""
    asked = {"model": "llama", "prompt": "a", "max_tokens": 8, "guided_regex": "[ab]{2,4}"}
    with running_server(tiny_folder("llama"), "--kv-cache", "4MiB", "--threads", "1") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        (checker,) = (one for one in children if any(part.endswith(".grammar_check") for part in one.cmdline()))
        checker.suspend()  # a machine so busy that it gets nothing
        refused = server.post("/v1/completions", asked)
        assert refused.status_code == 503, refused.text
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "grammar_check_timeout"
        assert "busy machine" in refused.json()["error"]["message"]
        client = server.client(max_retries=8)  # which keeps to Retry-After
        text = (
            client.completions.create(model="llama", prompt="a", max_tokens=8, extra_body={"guided_regex": "[ab]{2,4}"})
            .choices[0]
            .text
        )
        assert text.strip("ab") == "" != text
