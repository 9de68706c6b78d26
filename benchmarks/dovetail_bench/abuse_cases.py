"""Noisy neighbours: what one client can do to a server, each for as long as it is told. Add one by `@case`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

_TIMEOUT_S = 60.0
COLD_MODELS = 4  # whose tokenizers nobody has read
_BYTES = 1_900_000  # of a large body; the default limit is 2 MiB


@dataclass(frozen=True)
class Target:
    url: str
    key: str  # of the noisy client
    model: str  # that it asks; the probe asks another
    looping: str = ""  # a model whose chat template does not end
    admin_key: str = ""
    folder: Path = Path()  # for files

    @property
    def cold(self) -> list[str]:
        """Models that nobody has asked yet, each with a tokenizer of its own."""
        return cold_models(self.looping)

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        return parts.hostname, parts.port or 80

    def head(self, path: str, length: int) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        lines += [f"Authorization: Bearer {self.key}", f"Content-Length: {length}"]
        return "\r\n".join([*lines, "", ""]).encode()


def cold_models(looping: str) -> list[str]:
    return [f"{looping}-{number}" for number in range(COLD_MODELS)]


Noise = Callable[[Target, float], Awaitable[None]]  # makes noise until this time of the monotonic clock
CASES: dict[str, tuple[str, Noise]] = {}  # by name: what it is, and how it is made


def case(name: str, what: str) -> Callable[[Noise], Noise]:
    def register(noise: Noise) -> Noise:
        assert name not in CASES, name
        CASES[name] = (what, noise)
        return noise

    return register


async def _repeat(target: Target, until: float, path: str, bodies: Sequence[bytes], clients: int) -> None:
    """So many clients, each sending one body after the other; whoever waits for an answer at the end leaves."""
    headers = {"authorization": f"Bearer {target.key}", "content-type": "application/json"}
    limits = httpx.Limits(max_connections=clients)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        while time.monotonic() < until:
            with suppress(httpx.HTTPError):
                await client.post(path, content=bodies[number % len(bodies)], headers=headers)
            number += 1

    async with httpx.AsyncClient(base_url=target.url, timeout=_TIMEOUT_S, limits=limits) as client:
        tasks = [asyncio.create_task(one(client, number)) for number in range(clients)]
        await asyncio.wait(tasks, timeout=until - time.monotonic())
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)


async def _open_many(target: Target, until: float, number: int, said: bytes, again: bytes = b"") -> None:
    """So many sockets that say something and then (every half second) a little more, or nothing."""
    writers: list[asyncio.StreamWriter] = []
    try:
        while time.monotonic() < until:
            for _ in range(min(100, number - len(writers))):
                with suppress(OSError):
                    _, writer = await asyncio.open_connection(*target.address)
                    writers.append(writer)
                    writer.write(said)
            for writer in list(writers):
                if writer.is_closing():
                    writers.remove(writer)
                elif again:
                    writer.write(again)
            await asyncio.sleep(0.2)
    finally:
        for writer in writers:
            writer.transport.abort()


def _filled(before: str, item: str, after: str, size: int = _BYTES) -> bytes:
    return (before + ",".join([item] * (size // (len(item) + 1))) + after).encode()


def _chat(target: Target, **fields: Any) -> bytes:
    message = {"role": "user", "content": "hi"}
    return json.dumps({"model": target.model, "messages": [message], "max_tokens": 1} | fields).encode()


@case("nothing", "no noise at all, to see what the probe sees by itself")
async def nothing(target: Target, until: float) -> None:
    await asyncio.sleep(until - time.monotonic())


@case("busy-core", "no request either, but a process that computes: what a core less does to the probe")
async def busy_core(target: Target, until: float) -> None:
    while time.monotonic() < until:
        await asyncio.sleep(0)  # which is all that it does


@case("wrong-ids", "4 clients with wrong token ids, as many as are taken")
async def wrong_ids(target: Target, until: float) -> None:
    ok = f'{{"model":"{target.model}","prompt":['
    bodies = [_filled(ok, "-1", "]}", 480_000), _filled(ok + "[", '"x"', "]]}"), _filled(ok, "7", ",-1]}", 320_000)]
    await _repeat(target, until, "/v1/completions", bodies, 4)


@case("empty-lists", "4 clients with 1.9 MB of [],[],… as tools and documents")
async def empty_lists(target: Target, until: float) -> None:
    start = f'{{"model":"{target.model}","messages":[{{"role":"user","content":"hi"}}],'
    bodies = [_filled(f'{start}"{field}":[{{"a":[', "[]", "]}]}") for field in ("tools", "documents")]
    bodies.append(_filled(f'{start}"documents":[{{"a":[', "[]", "]}]}", 48_000))  # as many as are taken
    await _repeat(target, until, "/v1/chat/completions", bodies, 4)


@case("many-messages", "8 clients with 4,096 tiny messages each")
async def many_messages(target: Target, until: float) -> None:
    messages = [{"role": ("user", "assistant")[index % 2], "content": "a"} for index in range(4096)]
    await _repeat(target, until, "/v1/chat/completions", [_chat(target, messages=messages)], 8)


@case("many-prompts", "4 clients with 256 prompts of 4,000 characters each, which do not fit")
async def many_prompts(target: Target, until: float) -> None:
    prompts = [f"Prompt {index}. " + "Some words, and more. " * 180 for index in range(256)]
    body = {"model": target.model, "prompt": prompts, "max_tokens": 1_000_000}
    await _repeat(target, until, "/v1/completions", [json.dumps(body).encode()], 4)


@case("large-text", "4 clients with chats of 1.9 MB of text")
async def large_text(target: Target, until: float) -> None:
    messages = [{"role": "user", "content": "Hello, world. " * (_BYTES // 14)}]
    await _repeat(target, until, "/v1/chat/completions", [_chat(target, messages=messages)], 4)


@case("endless-headers", "8 sockets that send headers without end, and no key")
async def endless_headers(target: Target, until: float) -> None:
    async def one() -> None:
        while time.monotonic() < until:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(*target.address)
                writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n")
                try:
                    while time.monotonic() < until:
                        writer.write(b"X-Noise: " + b"a" * 8000 + b"\r\n")
                        await writer.drain()
                finally:
                    writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(8)))


@case("silent-sockets", "3,000 sockets that say nothing")
async def silent_sockets(target: Target, until: float) -> None:
    await _open_many(target, until, 3000, b"")


@case("slow-headers", "500 sockets that send a header now and then")
async def slow_headers(target: Target, until: float) -> None:
    await _open_many(target, until, 500, b"GET /live HTTP/1.1\r\n", b"X-Slow: 1\r\n")


@case("half-bodies", "100 bodies of 1.9 MB that stop before their end")
async def half_bodies(target: Target, until: float) -> None:
    await _open_many(target, until, 100, target.head("/v1/completions", _BYTES) + b" " * (_BYTES - 10))


@case("tokenize", "12 clients with texts of a quarter of a megabyte for /tokenize")
async def tokenize(target: Target, until: float) -> None:
    text = "Some words, and more of them. " * 8_500
    body = json.dumps({"model": target.model, "prompt": text}).encode()
    await _repeat(target, until, "/tokenize", [body], 12)


@case("tokenize-and-leave", "clients that leave a text at /tokenize and go, 20 a second")
async def tokenize_and_leave(target: Target, until: float) -> None:
    body = json.dumps({"model": target.model, "prompt": "Some words, and more. " * 11_000}).encode()
    while time.monotonic() < until:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(*target.address)
            writer.write(target.head("/tokenize", len(body)) + body)
            await writer.drain()
            writer.close()
        await asyncio.sleep(0.05)


@case("cold-tokenizers", "a client that asks models of which nobody has read the tokenizer, one after the other")
async def cold_tokenizers(target: Target, until: float) -> None:
    pause_s = max(until - time.monotonic(), 0.0) / (COLD_MODELS + 1)
    for name in target.cold:
        await asyncio.sleep(pause_s)
        asked = dataclasses.replace(target, model=name)
        body = json.dumps({"model": name, "prompt": "hi"}).encode()
        await _repeat(asked, min(time.monotonic() + pause_s / 2, until), "/tokenize", [body], 1)


@case("unknown-models", "8 clients that ask for models that are not there")
async def unknown_models(target: Target, until: float) -> None:
    bodies = [json.dumps({"model": f"no-such-{i}", "prompt": "a"}).encode() for i in range(64)]
    await _repeat(target, until, "/v1/completions", bodies, 8)


@case("wrong-keys", "8 clients that guess keys")
async def wrong_keys(target: Target, until: float) -> None:
    guess = Target(target.url, "sk-guess", target.model)
    await _repeat(guess, until, "/v1/completions", [b"{}"], 8)


@case("deep-nesting", "4 clients with lists in lists, and strings of nested JSON")
async def deep_nesting(target: Target, until: float) -> None:
    deep = "[" * 900 + "]" * 900
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep * 1}}
    calls = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    bodies = [b'{"a":' + b"[" * 500_000, _chat(target, messages=calls), _chat(target, guided_json=deep)]
    await _repeat(target, until, "/v1/chat/completions", bodies, 4)


@case("long-prompts", "4 clients with prompts of a thousand tokens, each a new one")
async def long_prompts(target: Target, until: float) -> None:
    texts = (f"{number}. " + "Some words, and more of them. " * 140 for number in range(64))
    bodies = [json.dumps({"model": target.model, "prompt": text, "max_tokens": 4}).encode() for text in texts]
    await _repeat(target, until, "/v1/completions", bodies, 4)


@case("many-answers", "4 clients with 128 prompts twice each, which would fill any queue")
async def many_answers(target: Target, until: float) -> None:
    prompts = [f"Prompt {number}: once" for number in range(128)]
    body = {"model": target.model, "prompt": prompts, "n": 2, "max_tokens": 16, "temperature": 1}
    await _repeat(target, until, "/v1/completions", [json.dumps(body).encode()], 4)


@case("log-probabilities", "2 clients that want twenty log-probabilities of every token of a long prompt")
async def log_probabilities(target: Target, until: float) -> None:
    text = "Some words, and more of them. " * 140
    body = {"model": target.model, "prompt": text, "max_tokens": 1, "prompt_logprobs": 20}
    bodies = [json.dumps(body | {"prompt": f"{number}. {text}"}).encode() for number in range(16)]
    await _repeat(target, until, "/v1/completions", bodies, 2)


@case("embeddings", "2 clients with 512 texts to embed as numbers")
async def embeddings(target: Target, until: float) -> None:
    body = {"model": target.model, "input": [f"text {number}" for number in range(512)]}
    await _repeat(target, until, "/v1/embeddings", [json.dumps(body).encode()], 2)


@case("rerank", "2 clients with 512 documents to order")
async def rerank(target: Target, until: float) -> None:
    body = {"model": target.model, "query": "words", "documents": [f"text {number}" for number in range(512)]}
    await _repeat(target, until, "/v1/rerank", [json.dumps(body).encode()], 2)


@case("hard-grammars", "4 clients with multiples of primes, nested repetitions and thousands of optional properties")
async def hard_grammars(target: Target, until: float) -> None:
    names = {f"p{number}": {"type": "string"} for number in range(3000)}
    bodies = []
    for number in range(16):
        bodies += [
            _chat(target, guided_json={"type": "integer", "multipleOf": 999_983 + 2 * number}, n=2),
            _chat(target, guided_regex=f"((x{{{1000 - number}}}){{1000}}){{1000}}"),
            _chat(target, guided_json={"type": "object", "properties": names | {f"q{number}": {}}}),
        ]
    await _repeat(target, until, "/v1/chat/completions", bodies, 4)


@case("grammars", "4 clients with sound schemas, each a new one")
async def grammars(target: Target, until: float) -> None:
    schemas = [
        {"type": "object", "properties": {f"name{number}": {"type": "string"}}, "required": [f"name{number}"]}
        for number in range(512)
    ]
    await _repeat(target, until, "/v1/chat/completions", [_chat(target, guided_json=one) for one in schemas], 4)


@case("looping-template", "8 clients with chats for a model whose template does not end")
async def looping_template(target: Target, until: float) -> None:
    asked = dataclasses.replace(target, model=target.looping)
    await _repeat(asked, until, "/v1/chat/completions", [_chat(asked)], 8)


@case("pulls", "an administrator who adds a GGUF of a million empty texts, again and again")
async def pulls(target: Target, until: float) -> None:
    path = target.folder / "empty.gguf"
    key, count = b"tokenizer.ggml.tokens", 1_000_000
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, 8, count)
    path.write_bytes(head + bytes(8 * count))
    headers = {"authorization": f"Bearer {target.admin_key}"}
    async with httpx.AsyncClient(base_url=target.url, timeout=_TIMEOUT_S, headers=headers) as client:
        number = 0
        while time.monotonic() < until:
            number += 1
            with suppress(httpx.HTTPError):
                await client.post("/api/models", json={"name": f"strange-{number % 4}", "source": str(path)})
                await asyncio.sleep(0.5)
                await client.delete(f"/api/models/strange-{number % 4}?force=true")
