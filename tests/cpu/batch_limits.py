"""What a key can send to `/v1/files` and `/v1/batches` that is too large, wrong or odd, against a real server: its
answer, the memory of the gateway meanwhile, how long `/live` takes.

    python tests/cpu/batch_limits.py FOLDER [--json FILE] [--work FOLDER] [--only NAME ...]

with the folder of a tiny model. Needs 6 GB of disk and some minutes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil
from server_fixture import Server, running_server

MILLION = 1_000_000
GIB = 1 << 30
ENDED = {"completed", "failed", "expired", "cancelled"}
CONFIG = """
models: {{llama: {{source: {folder}}}}}
nodes: [{{name: cpu-0, threads: 1, kv_cache: 16MiB}}]
batch: {{folder: {work}/kept, max_file: {max_file}}}
auth: {{keys: [{{name: one, key: sk-one}}, {{name: two, key: sk-two}}]}}
"""
PROBE_S = 0.02
Say = Callable[[str], None]


@dataclass(frozen=True)
class Seen:
    """While a case ran."""

    case: str
    answer: str
    seconds: float
    before_mib: float  # of the gateway's process, resident
    most_mib: float
    after_mib: float
    children_mib: float  # most of the processes that check files
    live_p50_ms: float
    live_p99_ms: float
    live_max_ms: float


def probe(url: str, pid: int, pipe: Connection) -> None:
    """A process of its own: what this script sends does not slow it down."""
    gateway = psutil.Process(pid)
    before = most = gateway.memory_info().rss
    latencies, children_most = [], 0
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    while not pipe.poll(PROBE_S):
        began_s = time.perf_counter()
        connection.request("GET", "/live")
        connection.getresponse().read()
        latencies.append(time.perf_counter() - began_s)
        most = max(most, gateway.memory_info().rss)
        with suppress(psutil.Error):
            checks = [one for one in gateway.children() if "batches.check" in " ".join(one.cmdline())]
            children_most = max(children_most, sum(one.memory_info().rss for one in checks))
    pipe.send((before, most, gateway.memory_info().rss, children_most, sorted(latencies)))


class Trial:
    """Cases against one server, each watched."""

    def __init__(self, server: Server, work: Path) -> None:
        self.server = server
        self.work = work
        self.seen: list[Seen] = []

    @contextmanager
    def case(self, name: str) -> Iterator[Say]:
        said: list[str] = []
        ours, theirs = multiprocessing.Pipe()
        watcher = multiprocessing.get_context("spawn").Process(
            target=probe, args=(self.server.url, self.server.process.pid, theirs), daemon=True
        )
        watcher.start()
        time.sleep(1.5)  # it has begun
        began_s = time.monotonic()
        yield said.append
        seconds = time.monotonic() - began_s
        time.sleep(0.5)
        ours.send(None)
        *sizes, latencies = ours.recv()
        watcher.join()
        at = [1e3 * latencies[min(int(len(latencies) * share), len(latencies) - 1)] for share in (0.5, 0.99, 1)]
        mib = [size / (1 << 20) for size in sizes]
        self.seen.append(Seen(name, "; ".join(said), seconds, mib[0], mib[1], mib[2], mib[3], *at))
        print(row(self.seen[-1]), flush=True)

    def call(self, method: str, path: str, key: str = "one", **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer sk-{key}"}
        return httpx.request(method, self.server.url + path, headers=headers, timeout=300, **options)

    def send(self, pieces: Iterable[bytes], size: int | None, filename: str = "lines.jsonl") -> tuple[int, Any]:
        """A file piece by piece; `size` announces it."""
        head = (
            '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--b\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'
        ).encode()
        tail = b"\r\n--b--\r\n"
        connection = http.client.HTTPConnection(self.server.url.removeprefix("http://"), timeout=300)
        connection.putrequest("POST", "/v1/files")
        connection.putheader("authorization", "Bearer sk-one")
        connection.putheader("content-type", "multipart/form-data; boundary=b")
        if size is None:
            connection.putheader("transfer-encoding", "chunked")
        else:
            connection.putheader("content-length", str(len(head) + size + len(tail)))
        connection.endheaders()
        with suppress(BrokenPipeError, ConnectionResetError):  # it was answered before the end
            for piece in chain([head], pieces, [tail]):
                connection.send(piece if size is not None else b"%x\r\n%b\r\n" % (len(piece), piece))
            if size is None:
                connection.send(b"0\r\n\r\n")
        answer = connection.getresponse()
        body = json.loads(answer.read())
        connection.close()
        return answer.status, body

    def upload(self, pieces: Iterable[bytes], filename: str = "lines.jsonl") -> str:
        status, body = self.send(pieces, None, filename)
        assert status == 200, body
        return str(body["id"])

    def create(self, file: str, **options: Any) -> httpx.Response:
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return self.call("POST", "/v1/batches", json=body, **options)

    def batch(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"/v1/batches/{id}").raise_for_status().json()
        return found

    def until(self, id: str, statuses: set[str], timeout_s: float = 900) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while (found := self.batch(id))["status"] not in statuses:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found

    def failed(self, pieces: Iterable[bytes], code: str, line: int | None, say: Say, count: int = 1) -> None:
        """A file with which no batch begins."""
        file = self.upload(pieces)
        batch = self.until(self.create(file).raise_for_status().json()["id"], ENDED)
        assert batch["status"] == "failed", batch
        problems = batch["errors"]["data"]
        assert len(problems) == count, problems
        assert (problems[0]["code"], problems[0]["line"]) == (code, line), problems[0]
        say(f"failed: line {line}: {code}: {problems[0]['message'][:110]}")
        self.call("DELETE", f"/v1/files/{file}").raise_for_status()


def a_line(id: str, length: int = 0, **changes: Any) -> bytes:
    body = {"model": "llama", "prompt": "x", "max_tokens": 1, "temperature": 0, "ignore_eos": True} | changes
    text = json.dumps({"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body}).encode()
    return text.ljust(length - 1) + b"\n"


def lines(count: int, length: int = 0) -> Iterator[bytes]:
    """Each of so many bytes at least; some thousands in a piece."""
    for first in range(0, count, 4000):
        yield b"".join(a_line(str(number), length) for number in range(first, min(first + 4000, count)))


def blanks(size: int) -> Iterator[bytes]:
    piece = b"x" * (1 << 20)
    for _ in range(size >> 20):
        yield piece


# Sizes


def too_large(trial: Trial) -> None:
    with trial.case("2 GiB announced, 1 GiB allowed") as say:
        status, body = trial.send(blanks(2 * GIB), 2 * GIB)
        assert status == 413, body
        say(f"413 {body['error']['message']}")
    with trial.case("2 GiB in chunks, 1 GiB allowed") as say:
        status, body = trial.send(blanks(2 * GIB), None)
        assert status == 413, body
        say(f"413 {body['error']['message']}")


def large(trial: Trial) -> None:
    with trial.case("2 GiB without a line break, 3 GiB allowed") as say:
        trial.failed(blanks(2 * GIB), "line_too_long", 1, say)
    with trial.case("a line of 50 MB") as say:
        trial.failed([a_line("a"), a_line("b", prompt="y" * 50_000_000), a_line("c")], "line_too_long", 2, say)
    with trial.case("10⁶ + 1 lines") as say:
        trial.failed([*lines(MILLION), a_line("more")], "too_many_lines", MILLION + 1, say)


def a_million(trial: Trial) -> None:
    with trial.case("2.1 GB in 10⁶ lines: upload and check") as say:
        file = trial.upload(lines(MILLION, 2100))
        batch = trial.create(file).raise_for_status().json()["id"]
        found = trial.until(batch, {"in_progress"} | ENDED)
        assert found["status"] == "in_progress", found["errors"]
        say(f"{trial.call('GET', f'/v1/files/{file}').json()['bytes']} bytes, in progress")
    with trial.case("10⁶ lines: 20 s of answers") as say:
        time.sleep(20)
        say(f"{trial.batch(batch)['request_counts']['completed']} lines answered")
    with trial.case("10⁶ lines: cancelled") as say:
        trial.call("POST", f"/v1/batches/{batch}/cancel").raise_for_status()
        found = trial.until(batch, ENDED)
        assert found["status"] == "cancelled", found
        say(f"{found['request_counts']}")
    with trial.case("10⁶ lines: both results are read") as say:
        ids = [id for name in ("output_file_id", "error_file_id") for id in custom_ids(trial, found[name])]
        assert len(ids) == len(set(ids)) == MILLION
        say(f"{len(ids)} lines, each once")
    trial.call("DELETE", f"/v1/files/{file}").raise_for_status()


def custom_ids(trial: Trial, file: str | None) -> Iterator[int]:
    if file is None:
        return
    url, headers = f"{trial.server.url}/v1/files/{file}/content", {"authorization": "Bearer sk-one"}
    with httpx.stream("GET", url, headers=headers, timeout=300) as response:
        for text in response.iter_lines():
            yield int(json.loads(text)["custom_id"])


# Wrong lines


def wrong_lines(trial: Trial) -> None:
    half = MILLION // 2
    with trial.case("wrong UTF-8 in line 500,001 of 10⁶") as say:
        trial.failed([*lines(half), b'{"custom_id": "\xff"}\n', *lines(half)], "invalid_utf8", half + 1, say)
    with trial.case("the first custom_id once more, in line 10⁶") as say:
        trial.failed([*lines(MILLION - 1), a_line("0")], "duplicate_custom_id", MILLION, say)
    with trial.case("one custom_id in 10⁶ lines") as say:
        trial.failed([a_line("same") * 4000] * 250, "duplicate_custom_id", 2, say, count=100)
    with trial.case("an unknown model in line 10⁶") as say:
        trial.failed([*lines(MILLION - 1), a_line("last", model="nobody")], "model_not_found", MILLION, say)
    with trial.case("5,000 models") as say:
        many = b"".join(a_line(str(number), model=f"m{number}") for number in range(5000))
        trial.failed([many], "too_many_models", 4097, say, count=100)
    with trial.case("brackets, 1.9 MB deep, in line 2") as say:
        trial.failed([a_line("a"), b'{"x": ' + b"[" * 1_900_000 + b"\n"], "invalid_json", 2, say)


def random_files(trial: Trial, count: int = 400) -> None:
    draw = random.Random(39)
    good = b"".join(a_line(str(number), prompt="many words " * 15) for number in range(20))
    with trial.case(f"{count} files with random damage") as say:
        ends: dict[str, int] = {}
        for _ in range(count):
            batch = trial.until(trial.create(trial.upload([damaged(good, draw)])).json()["id"], ENDED)
            ends[batch["status"]] = ends.get(batch["status"], 0) + 1
            if batch["status"] == "failed":
                assert all(problem["line"] or problem["code"] == "empty_file" for problem in batch["errors"]["data"])
        assert set(ends) <= {"failed", "completed"}, ends
        say(f"{ends}, each problem with its line")


def damaged(text: bytes, draw: random.Random) -> bytes:
    content = bytearray(text)
    for _ in range(draw.choice((1, 1, 3, 30))):
        at = draw.randrange(len(content))
        match draw.randrange(4):
            case 0:
                content[at] = draw.randrange(256)
            case 1:
                del content[at : at + draw.randrange(1, 200)]
            case 2:
                content[at:at] = draw.randbytes(draw.randrange(1, 40))
            case _:
                content[at:at] = content[at : at + draw.randrange(1, 300)]
        content = content or bytearray(b"\n")
    return bytes(content)


# Names and keys

TRICKS = (
    "../../etc/passwd",
    "..",
    "%2e%2e%2fbatches.db",
    "..%2fbatches.db",
    "/etc/passwd",
    "a\x00b",
    "lock",
    "~",
    "é" * 300,
)


def names(trial: Trial) -> None:
    work = trial.work

    def on_disk() -> set[str]:
        return {str(path.relative_to(work)) for path in work.rglob("*")}

    before = on_disk()
    with trial.case("path tricks in names, ids and custom_id") as say:
        for trick in TRICKS:
            for path in (f"/v1/files/{trick}", f"/v1/files/{trick}/content", f"/v1/batches/{trick}"):
                with suppress(httpx.InvalidURL):
                    assert trial.call("GET", path).status_code in (400, 404), path
            assert trial.create(trick).status_code in (400, 404)
        file = trial.upload(
            [b"".join(a_line(f"{trick}{at}") for at, trick in enumerate(TRICKS))], "../../../../tmp/out.jsonl"
        )
        assert trial.call("GET", f"/v1/files/{file}").json()["filename"] == "out.jsonl"
        batch = trial.until(trial.create(file).json()["id"], ENDED)
        assert batch["request_counts"]["completed"] == len(TRICKS), batch
        output = trial.call("GET", f"/v1/files/{batch['output_file_id']}/content").text
        assert {json.loads(text)["custom_id"] for text in output.splitlines()} == {
            f"{trick}{at}" for at, trick in enumerate(TRICKS)
        }
        new = {path for path in on_disk() - before if not path.startswith("kept/batches.db")}
        assert new == {f"kept/files/{file}", f"kept/files/{batch['output_file_id']}"}, new
        say(f"400 or 404; {len(TRICKS)} lines answered under their names; nothing but its two files on disk")
    with trial.case("another key's files and batches") as say:
        for method, path in (
            ("GET", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("GET", f"/v1/files/{batch['output_file_id']}/content"),
            ("DELETE", f"/v1/files/{file}"),
            ("GET", f"/v1/batches/{batch['id']}"),
            ("POST", f"/v1/batches/{batch['id']}/cancel"),
        ):
            assert trial.call(method, path, "two").status_code == 404, path
        assert trial.create(file, key="two").status_code == 404
        assert not trial.call("GET", "/v1/files", "two").json()["data"]
        assert not trial.call("GET", "/v1/batches", "two").json()["data"]
        assert trial.call("GET", f"/v1/files/{file}/content", "none").status_code == 401
        say("404, empty lists; 401 without a key")


def forms(trial: Trial) -> None:
    headers = {"authorization": "Bearer sk-one", "content-type": "multipart/form-data; boundary=b"}
    parts = {
        "a header of 64 MiB": b"--b\r\nContent-Disposition: " + b"x" * (64 << 20),
        "a field of 64 MiB": b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + b"x" * (64 << 20),
        "100,000 fields": b'--b\r\nContent-Disposition: form-data; name="f"\r\n\r\nx\r\n' * 100_000 + b"--b--\r\n",
        "no boundary": b"x" * (64 << 20),
    }
    for name, body in parts.items():
        with trial.case(f"a form with {name}") as say:
            answer = httpx.post(f"{trial.server.url}/v1/files", content=body, headers=headers, timeout=120)
            assert 400 <= answer.status_code < 500, answer.text
            say(f"{answer.status_code} {answer.json()['error']['message'][:90]}")


def many_at_once(trial: Trial) -> None:
    with trial.case("60 batches of 20,000 lines at once") as say:
        file = trial.upload(lines(20_000))
        ids = [trial.create(file).raise_for_status().json()["id"] for _ in range(60)]
        for id in ids:
            trial.until(id, {"in_progress"})
        for id in ids:
            trial.call("POST", f"/v1/batches/{id}/cancel").raise_for_status()
        for id in ids:
            trial.until(id, ENDED)
        say("60 checked, cancelled")


def row(seen: Seen) -> str:
    memory = f"{seen.before_mib:.0f} → {seen.most_mib:.0f} → {seen.after_mib:.0f}"
    live = f"{seen.live_p50_ms:.1f} | {seen.live_p99_ms:.1f} | {seen.live_max_ms:.1f}"
    return f"| {seen.case} | {seen.answer} | {seen.seconds:.1f} | {memory} | {seen.children_mib:.0f} | {live} |"


HEAD = """\
| case | answer | s | gateway MiB: before → most → after | checks MiB | /live p50 ms | p99 | max |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--only", nargs="+", help="names of functions here, such as many_at_once")
    options = parser.parse_args()
    seen: list[Seen] = []
    print(HEAD)
    with tempfile.TemporaryDirectory(prefix="dtl-", dir=options.work) as home:
        work, config = Path(home), Path(home) / "dovetail.yaml"

        def served(max_file: str) -> Any:
            config.write_text(CONFIG.format(folder=options.folder.absolute(), work=work, max_file=max_file))
            return running_server("--config", config, log=work / "log")

        for max_file, cases in (
            ("1GiB", (too_large, forms, names, random_files, many_at_once)),
            ("3GiB", (a_million, large, wrong_lines)),
        ):
            chosen = [run for run in cases if options.only is None or run.__name__ in options.only]
            if not chosen:
                continue
            with served(max_file) as server:
                trial = Trial(server, work)
                try:
                    for run in chosen:
                        run(trial)
                finally:
                    seen += trial.seen
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(one) for one in seen], indent=1, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
