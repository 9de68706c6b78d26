"""Batches by other ways in: Anthropic's client, the command line, several keys, large and odd files."""

from __future__ import annotations

import http.client
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest
from server_fixture import Server, run_command, running_server
from test_server_batches import completion, ended, submit, text_of

CONFIG = """
models: {{llama: {{source: {llama}}}, qwen3: {{source: {qwen3}}}}}
nodes: [{{name: cpu-0, threads: 1, kv_cache: 16MiB}}]
batch: {{folder: {folder}, max_file: 1GiB, max_lines: 200000, max_in_flight: 16}}
auth:
  keys:
    - {{name: one, key: sk-one, requests_per_minute: 60, max_unfinished: 2}}
    - {{name: two, key: sk-two, requests_per_minute: 60}}
    - {{name: watcher, key: sk-watch, admin: true}}
"""
MESSAGE: Any = {"model": "qwen3", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("keyed")
    folders = {name: tiny_folder(name) for name in ("llama", "qwen3")}
    (home / "dovetail.yaml").write_text(CONFIG.format(folder=home / "kept", **folders))
    with running_server("--config", home / "dovetail.yaml") as server:
        yield server


@pytest.fixture(scope="module")
def one(server: Server) -> openai.OpenAI:
    return server.client(api_key="sk-one")


@pytest.fixture(scope="module")
def two(server: Server) -> openai.OpenAI:
    return server.client(api_key="sk-two")


def test_no_key_sees_what_is_another_keys(one: openai.OpenAI, two: openai.OpenAI) -> None:
    batch = ended(one, submit(one, [completion(0)]).id)
    assert batch.id not in {found.id for found in two.batches.list()}
    assert not {batch.input_file_id, batch.output_file_id} & {file.id for file in two.files.list()}
    for ask in (
        lambda: two.batches.retrieve(batch.id),
        lambda: two.batches.cancel(batch.id),
        lambda: two.files.content(batch.output_file_id),
        lambda: two.files.retrieve(batch.input_file_id),
        lambda: two.files.delete(batch.input_file_id),
        lambda: two.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()  # type: ignore[no-untyped-call]


def test_lines_are_beside_the_limits_of_their_key(one: openai.OpenAI, two: openai.OpenAI) -> None:
    """One may ask 60 times a minute and have two answers at a time."""
    batch = ended(one, submit(one, [completion(number) for number in range(100)]).id)
    assert batch.request_counts.completed == 100
    assert two.completions.create(model="llama", prompt="x", max_tokens=1).choices


@contextmanager
def asking(server: Server, key: str) -> Iterator[list[float]]:
    """One request after the other; how long each took."""
    ends, took = threading.Event(), list[float]()

    def run() -> None:
        client = server.client(api_key=key)
        while not ends.wait(0.1):
            began_s = time.monotonic()
            client.completions.create(model="llama", prompt="x", max_tokens=20, extra_body={"ignore_eos": True})
            took.append(time.monotonic() - began_s)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield took
    finally:
        ends.set()
        thread.join()


def attained(server: Server) -> tuple[float, float]:
    """Requests of clients so far: those with every token in time, and all."""
    text = server.get("/metrics", headers={"authorization": "Bearer sk-watch"}).text
    found = re.findall(r'^dovetail:slo_requests_total\{.*outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return sum(float(count) for outcome, count in found if outcome == "attained"), sum(float(one[1]) for one in found)


def test_two_keys_with_a_batch_each_have_equal_shares_beside_a_third(server: Server, two: openai.OpenAI) -> None:
    before = attained(server)
    with asking(server, "sk-watch") as took:
        share_tokens(server, two)
    in_time, all_of_them = (late - early for early, late in zip(before, attained(server), strict=True))
    assert all_of_them >= len(took) > 20
    assert in_time >= 0.99 * all_of_them, (in_time, all_of_them)


def share_tokens(server: Server, two: openai.OpenAI) -> None:
    clients = (server.client(api_key="sk-one"), two)
    ids = [
        submit(client, [completion(number, max_tokens=count) for number in range(4000)]).id
        for client, count in zip(clients, (24, 72), strict=True)
    ]
    had = [0, 0]
    try:
        for _ in range(1200):
            found = [client.batches.retrieve(id) for client, id in zip(clients, ids, strict=True)]
            had = [batch.usage.total_tokens if batch.usage else 0 for batch in found]
            if min(had) > 40_000:
                break
            time.sleep(0.1)
    finally:
        for client, id in zip(clients, ids, strict=True):
            client.batches.cancel(id)
            ended(client, id)
    assert min(had) > 0.9 * max(had) > 20_000, had


def test_anthropics_client_has_the_whole_cycle(server: Server) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="sk-one", max_retries=0, timeout=120)
    requests: Any = [{"custom_id": f"m{number}", "params": MESSAGE} for number in range(5)]
    requests.append(
        {"custom_id": "long", "params": MESSAGE | {"messages": [{"role": "user", "content": "hi " * 9999}]}}
    )
    batch = client.messages.batches.create(requests=requests)
    assert (batch.type, batch.processing_status, batch.request_counts.processing) == ("message_batch", "in_progress", 6)
    deadline = time.monotonic() + 120
    while (batch := client.messages.batches.retrieve(batch.id)).processing_status != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (batch.request_counts.succeeded, batch.request_counts.errored) == (5, 1)
    found = {result.custom_id: result.result for result in client.messages.batches.results(batch.id)}
    assert len(found) == 6
    assert found["m0"].type == "succeeded"
    assert found["m0"].message.usage.output_tokens == 4
    assert found["long"].type == "errored"
    assert found["long"].error.error.type == "invalid_request_error"
    assert batch.id in {listed.id for listed in client.messages.batches.list(limit=1)}
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)
    other = anthropic.Anthropic(base_url=server.url, api_key="sk-two", max_retries=0)
    assert not other.messages.batches.list().data


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([{"custom_id": "a", "params": MESSAGE | {"max_tokens": 0}}], "requests[0]"),
        ([{"custom_id": "a", "params": MESSAGE}] * 2, "requests[1]: custom_id"),
        ([{"custom_id": "a", "params": MESSAGE | {"model": "nobody"}}], "nobody"),
        ([{"params": MESSAGE}], "custom_id"),
        ([], "no lines"),
    ],
)
def test_a_wrong_batch_of_messages_is_refused_at_once(server: Server, requests: Any, words: str) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="sk-two", max_retries=0)
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.batches.create(requests=requests)
    assert words in str(refused.value)


def test_the_command_line_has_the_whole_cycle(server: Server, tmp_path: Path) -> None:
    file, answers = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    file.write_bytes(text_of([completion(number) for number in range(4)]))
    environment: dict[str, str] = {"DOVETAIL_API_KEY": "sk-two", "DOVETAIL_URL": server.url, "PATH": "/usr/bin"}

    def run(*words: str | Path) -> Any:
        return run_command("batch", *words, env=environment)

    done = run("submit", file, "-o", answers)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 lines answered" in done.stdout
    assert len(answers.read_text().splitlines()) == 4
    listed = json.loads(run("list", "--json").stdout)
    assert listed[0]["status"] == "completed"
    assert listed[0]["id"] in run("list").stdout
    printed = run("results", listed[0]["id"]).stdout
    assert printed == answers.read_text()
    file.write_bytes(file.read_bytes() + b"{}\n")
    wrong = run("submit", file, "--wait")
    assert wrong.returncode == 1
    assert "line 5: the line needs custom_id" in wrong.stdout
    assert "no such batch" in run("show", "batch_nobody").stderr


def spread(count: int) -> Iterator[bytes]:
    """A form with a file of so many bytes, piece by piece."""
    yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    yield b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    piece = b"x" * (1 << 20)
    for _ in range(count >> 20):
        yield piece
    yield b"\r\n--b--\r\n"


def announce(server: Server, count: int) -> tuple[int, str]:
    """What a body of so many bytes is answered before any of them is sent."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    connection.putrequest("POST", "/v1/files")
    connection.putheader("authorization", "Bearer sk-one")
    connection.putheader("content-type", "multipart/form-data; boundary=b")
    connection.putheader("content-length", str(count))
    connection.endheaders()
    answer = connection.getresponse()
    said = (answer.status, answer.read().decode())
    connection.close()
    return said


class Prober:
    """Asks /live all the time, and how much memory the gateway has."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._process = psutil.Process(server.process.pid)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.latencies_s: list[float] = []
        self.most_bytes = 0

    def __enter__(self) -> Prober:
        self.before_bytes = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=30) as client:
            while not self._ends.wait(0.05):
                began_s = time.monotonic()
                client.get(f"{self._server.url}/live").raise_for_status()
                self.latencies_s.append(time.monotonic() - began_s)
                self.most_bytes = max(self.most_bytes, self._process.memory_info().rss)


def test_a_file_beyond_the_limit_is_refused_before_or_while_it_comes_and_memory_stays_flat(server: Server) -> None:
    headers = {"authorization": "Bearer sk-one", "content-type": "multipart/form-data; boundary=b"}
    with Prober(server) as prober:
        status, said = announce(server, 2 << 30)
        assert status == 413
        assert "(batch.max_file)" in said
        unannounced = httpx.post(f"{server.url}/v1/files", content=spread(96 << 20), headers=headers, timeout=120)
        assert unannounced.status_code == 200, unannounced.text
    assert unannounced.json()["bytes"] == 96 << 20
    assert prober.most_bytes - prober.before_bytes < 48 << 20
    assert sorted(prober.latencies_s)[len(prober.latencies_s) // 2] < 0.1


def test_many_lines_are_checked_beside_a_gateway_that_answers(server: Server, two: openai.OpenAI) -> None:
    lines = text_of([completion(number) for number in range(50_000)]) + b'{"custom_id": \xff}\n'
    with Prober(server) as prober:
        file = two.files.create(file=("many.jsonl", io.BytesIO(lines)), purpose="batch").id
        batch = two.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
        batch = ended(two, batch.id)
    assert batch.status == "failed"
    assert [(problem.code, problem.line) for problem in batch.errors.data] == [("invalid_utf8", 50_001)]
    assert prober.most_bytes - prober.before_bytes < 64 << 20
    assert sorted(prober.latencies_s)[len(prober.latencies_s) // 2] < 0.1


def test_large_files_of_a_key_are_checked_one_after_the_other(server: Server, two: openai.OpenAI) -> None:
    lines = text_of([completion(number) for number in range(4000)]) + b"wrong\n"
    file = two.files.create(file=("many.jsonl", io.BytesIO(lines)), purpose="batch").id
    ids = [
        two.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h").id for _ in range(6)
    ]
    most, left = 0, set(ids)
    while left:
        children = psutil.Process(server.process.pid).children()
        most = max(most, sum(is_check(child) for child in children))
        left = {id for id in left if two.batches.retrieve(id).status == "validating"}
    assert most == 1
    assert {two.batches.retrieve(id).status for id in ids} == {"failed"}


def is_check(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "dovetail.gateway.batches.check" in process.cmdline()
    return False


def test_a_file_that_a_batch_reads_is_not_deleted(one: openai.OpenAI) -> None:
    batch = submit(one, [completion(number, max_tokens=100) for number in range(300)])
    with pytest.raises(openai.ConflictError):
        one.files.delete(batch.input_file_id)
    one.batches.cancel(batch.id)
    ended(one, batch.id)
    assert one.files.delete(batch.input_file_id).deleted
