"""The gateway under clients that mean no good, over real sockets: headers, silence, half and large bodies, texts."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from edge_server import Edge, running_edge

TEXT = {"model": "fake", "prompt": "hi ", "max_tokens": 6}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MAX_CONNECTIONS = 40


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    server = {
        "header_timeout": "1s",
        "body_timeout": "1s",
        "max_connections": MAX_CONNECTIONS,
        "max_body_memory": "1MB",
        "max_tokenize_bytes": "100kB",
    }
    with running_edge(tmp_path_factory.mktemp("edge"), {"server": server}) as made:
        yield made


def connect(edge: Edge) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", edge.port), timeout=10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def answer(client: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and error of what the server says before it closes; 0 where it closes without a word."""
    received = b""
    try:
        while piece := client.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    if not received:
        return 0, {}
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"application/json" in head, head
    return int(head.split()[1]), json.loads(body)["error"]


def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def test_endless_headers_are_refused_after_a_few_kilobytes(edge: Edge) -> None:
    before = edge.resident_bytes
    for endless in (b"X-Long: " + b"a" * 10_000, b"X-Many: 1\r\n" * 900, b"X-" + b"b" * 10_000):
        sent = 0
        with connect(edge) as client:
            client.sendall(HEAD)
            try:
                for _ in range(3000):  # 30 MB
                    client.sendall(endless)
                    sent += len(endless)
            except (BrokenPipeError, ConnectionResetError):
                pass
            assert sent < 8_000_000, "the server took it all"
        with connect(edge) as client:
            client.sendall(HEAD + endless[:1000])
            client.sendall((b"Y: " + b"c" * 900 + b"\r\n") * 60)
            status, _ = answer(client)
            assert status in (431, 400, 0)  # the second breaks off within a line
    assert edge.resident_bytes - before < 30_000_000
    assert edge.is_alive()


def test_a_request_line_and_headers_of_a_usual_size_pass(edge: Edge) -> None:
    headers = {f"x-header-{index}": "v" * 200 for index in range(60)}
    assert edge.get("/live", headers=headers).status_code == 200
    assert edge.get("/live?" + "q" * 8000).status_code == 200
    assert edge.get("/live", headers={f"x-{index}": "" for index in range(120)}).status_code == 431


def test_trailers_are_bounded_and_change_nothing(edge: Edge) -> None:
    body = json.dumps(TEXT).encode()
    chunked = HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(body), body)
    with connect(edge) as client:
        client.sendall(chunked + b"Host: elsewhere.example\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
    with connect(edge) as client:
        sent = 0
        try:
            client.sendall(chunked)
            for _ in range(3000):
                client.sendall(b"X-Trailer: " + b"a" * 10_000 + b"\r\n")
                sent += 10_000
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 8_000_000
    assert edge.is_alive()


def test_silent_and_slow_clients_are_closed_and_said_why(edge: Edge) -> None:
    with connect(edge) as silent, connect(edge) as slow, connect(edge) as empty_lines, connect(edge) as half_body:
        slow.sendall(b"GET /live HTTP/1.1\r\nHost:")
        empty_lines.sendall(b"\r\n")
        half_body.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert answer(silent) == (0, {})
        assert answer(slow)[0] == 408
        assert answer(empty_lines) == (0, {})
        status, error = answer(half_body)
        assert (status, error["code"]) == (408, "timeout")


def test_answers_that_nobody_takes_go_with_their_connection(tmp_path: Path) -> None:
    with running_edge(tmp_path, {"server": {"header_timeout": "1s"}}) as edge:
        _leave_answers(edge)


def _leave_answers(edge: Edge) -> None:
    body = json.dumps({"model": "fake", "prompt": "x" * 90_000, "return_token_strs": True}).encode()
    request = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request += b"Content-Length: %d\r\n\r\n" % len(body) + body
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(10)
        client.connect(("127.0.0.1", edge.port))
        for _ in range(12):  # answers of a megabyte, in sum more than the system's buffers hold; one after the other
            client.sendall(request)
            time.sleep(0.05)
        port = client.getsockname()[1]
        server = psutil.Process(edge.process.pid)
        eventually(lambda: port not in {each.raddr.port for each in server.net_connections() if each.raddr})
    with connect(edge) as slow:  # but not those that somebody takes slowly
        slow.sendall(request.replace(b"Host", b"Connection: close\r\nHost"))
        received = 0
        while piece := slow.recv(32_768):
            received += len(piece)
            time.sleep(0.05)
        assert received > 500_000


def test_more_silent_sockets_than_the_server_holds_lock_nobody_out(edge: Edge) -> None:
    with ExitStack() as stack:
        for _ in range(3 * MAX_CONNECTIONS):
            stack.enter_context(connect(edge))
        assert edge.is_alive()
        assert edge.post("/v1/completions", TEXT).status_code == 200
    with ExitStack() as stack:
        for _ in range(3 * MAX_CONNECTIONS):
            stack.enter_context(connect(edge)).sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert edge.is_alive()
    eventually(edge.is_alive)


def test_unfinished_bodies_share_a_bounded_memory(edge: Edge) -> None:
    """One client may have half of it; more is a 503 at once, and all of it comes back."""
    refused = 0
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(edge)) for _ in range(10)]
        for client in clients:
            client.sendall(HEAD + b"Content-Length: 200000\r\n\r\n")
            try:
                client.sendall(b" " * 150_000)
            except (BrokenPipeError, ConnectionResetError):
                refused += 1
        statuses = [answer(client)[0] for client in clients]
    assert 408 in statuses  # those that had room waited for the rest
    assert statuses.count(408) <= 4
    assert statuses.count(503) + statuses.count(0) >= 6
    body = TEXT | {"metadata": {"note": "x" * 300_000}}
    assert edge.post("/v1/completions", body).status_code == 200


def large(prefix: bytes, item: bytes, suffix: bytes, size: int = 1_900_000) -> bytes:
    return prefix + b",".join([item] * (size // (len(item) + 1))) + suffix


MESSAGES = b'{"model": "fake", "messages": [{"role": "user", "content": "a"}], '


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """With the limits that a server has by itself."""
    with running_edge(tmp_path_factory.mktemp("roomy")) as made:
        yield made


LARGE: list[tuple[str, bytes]] = [
    ("/v1/completions", large(b'{"model": "fake", "prompt": [', b"-1", b"]}", 400_000)),
    ("/v1/completions", large(b'{"model": "fake", "prompt": [[', b'"x"', b"]]}")),
    ("/v1/chat/completions", large(MESSAGES + b'"tools": [', b"[]", b"]}")),
    ("/v1/chat/completions", large(MESSAGES + b'"documents": [', b"[]", b"]}")),
    ("/v1/chat/completions", large(MESSAGES + b'"documents": [', b"{}", b"]}")),
    ("/v1/chat/completions", large(MESSAGES + b'"stop": [', b'""', b"]}")),
    ("/v1/chat/completions", large(b'{"model": "fake", "messages": [', b'{"role": 5}', b"]}")),
    (
        "/v1/chat/completions",
        MESSAGES + b'"logit_bias": {' + b",".join(b'"%d": 999' % i for i in range(15_000)) + b"}}",
    ),
    ("/detokenize", large(b'{"model": "fake", "tokens": [', b"null", b"]}", 800_000)),
]


@pytest.mark.parametrize(("path", "body"), LARGE, ids=range(len(LARGE)))
def test_a_large_wrong_body_is_a_400_that_names_one_problem(roomy: Edge, path: str, body: bytes) -> None:
    response = httpx.post(roomy.url + path, content=body, headers={"content-type": "application/json"}, timeout=30)
    assert response.status_code == 400, response.text[:200]
    assert len(response.text) < 2000


def test_the_gateways_memory_comes_back_after_large_bodies_and_texts(roomy: Edge) -> None:
    roomy.post("/v1/completions", TEXT)
    before = roomy.resident_bytes
    text = "some words, and more of them. " * 8_000
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(roomy.post, "/tokenize", {"model": "fake", "prompt": text}) for _ in range(8)]
        asked += [pool.submit(roomy.post, "/v1/completions", TEXT | {"metadata": {"note": text * 6}}) for _ in range(8)]
        assert {each.result().status_code for each in asked} <= {200, 503}
    eventually(lambda: roomy.resident_bytes - before < 60_000_000, timeout_s=10)
    assert roomy.is_alive()


def test_a_text_that_is_too_long_for_tokenize_is_a_400(edge: Edge) -> None:
    assert edge.post("/tokenize", {"model": "fake", "prompt": "a" * 99_000}).json()["count"] == 99_000
    assert edge.post("/tokenize", {"model": "fake", "prompt": "a" * 101_000}).status_code == 400


def test_texts_that_nobody_waits_for_are_not_tokenised(roomy: Edge) -> None:
    """Forty clients leave at once; what they brought does not stand before the next one's text."""
    body = json.dumps({"model": "fake", "prompt": "a b" * 80_000}).encode()
    head = HEAD.replace(b"/v1/completions", b"/tokenize") + b"Content-Length: %d\r\n\r\n" % len(body)
    started = time.monotonic()
    assert roomy.post("/tokenize", {"model": "fake", "prompt": "a b" * 80_000}).status_code == 200
    alone_s = time.monotonic() - started
    for _ in range(40):
        with connect(roomy) as client:
            client.sendall(head + body)
    started = time.monotonic()
    assert roomy.post("/tokenize", {"model": "fake", "prompt": "c d" * 80_000}).status_code in (200, 503)
    assert time.monotonic() - started < 20 * alone_s + 5  # forty of them would be twice that


def test_errors_below_the_application_have_openais_shape_too(edge: Edge) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        with connect(edge) as client:
            client.sendall(garbage)
            status, error = answer(client)
            assert status == 400
            assert set(error) == {"message", "type", "param", "code"}


def test_a_second_signal_ends_a_server_that_is_busy_with_texts(tmp_path: Path) -> None:
    body = json.dumps({"model": "fake", "prompt": "a b" * 80_000}).encode()
    head = HEAD.replace(b"/v1/completions", b"/tokenize") + b"Content-Length: %d\r\n\r\n" % len(body)
    with running_edge(tmp_path) as edge, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(edge)).sendall(head + body)
        edge.process.terminate()
        time.sleep(0.2)
        edge.process.terminate()
        assert edge.process.wait(15) in (0, -signal.SIGTERM)  # the second may find it as good as gone
