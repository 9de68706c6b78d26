"""Files and batches on a real server, through the official client."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_fixture import Server, eventually, run_command, running_server

MODEL = "llama"
NUM_TOKENS = 8
ENDED = {"completed", "failed", "expired", "cancelled"}
Line = dict[str, Any]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches") / "kept"


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], kept: Path) -> Iterator[Server]:
    file = kept.with_name("dovetail.yaml")
    folders = {name: tiny_folder(name) for name in ("llama", "qwen3", "bert", "bert_scores")}
    models = "\n".join(f"  {name}: {{source: {folder}}}" for name, folder in folders.items())
    file.write_text(
        f"models:\n{models}\nnodes: [{{name: cpu-0, threads: 1, kv_cache: 16MiB}}]\nbatch: {{folder: {kept}}}\n"
    )
    with running_server("--config", file) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def completion(number: int, **changes: Any) -> Line:
    body = {"model": MODEL, "prompt": f"line {number}", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return line(f"line-{number}", "/v1/completions", body | changes)


def line(custom_id: str, url: str, body: dict[str, Any]) -> Line:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def text_of(lines: list[Line]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


def upload(client: openai.OpenAI, content: bytes, name: str = "lines.jsonl") -> str:
    return client.files.create(file=(name, io.BytesIO(content)), purpose="batch").id


def submit(client: openai.OpenAI, lines: list[Line], endpoint: str = "/v1/completions", **options: Any) -> Any:
    settings: Any = {"completion_window": "24h"} | options
    return client.batches.create(
        input_file_id=upload(client, text_of(lines)),
        endpoint=endpoint,  # type: ignore[arg-type]
        **settings,
    )


def ended(client: openai.OpenAI, batch_id: str, timeout_s: float = 120.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """By custom_id, each once."""
    if file_id is None:
        return {}
    found = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found), "a line was answered twice"
    return by_id


def test_the_whole_cycle_answers_each_line_as_alone(server: Server, client: openai.OpenAI) -> None:
    lines = [completion(number) for number in range(20)]
    batch = submit(client, lines, metadata={"who": "a test"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"who": "a test"})
    batch = ended(client, batch.id)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    assert batch.error_file_id is None
    assert batch.usage.output_tokens == 20 * NUM_TOKENS
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at <= batch.expires_at
    found = results(client, batch.output_file_id)
    assert set(found) == {one["custom_id"] for one in lines}
    for one in lines:
        answer = found[one["custom_id"]]
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        alone = server.post("/v1/completions", one["body"]).json()["choices"][0]["text"]
        assert answer["response"]["body"]["choices"][0]["text"] == alone


def test_lines_that_are_suspended_for_clients_say_the_same(server: Server, client: openai.OpenAI) -> None:
    """Each client that comes finds lines of its model in their decodes; these rest meanwhile and go on."""
    tokens = 150
    lines = [completion(number, model=("llama", "qwen3")[number % 2], max_tokens=tokens) for number in range(24)]
    batch = submit(client, lines)
    asked = 0
    while client.batches.retrieve(batch.id).status not in ENDED and asked < 400:
        body = completion(100 + asked, model=("llama", "qwen3")[asked % 2], max_tokens=20)["body"]
        assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 20
        asked += 1
    assert asked > 2, "the batch ended before a client came"
    batch = ended(client, batch.id)
    assert batch.request_counts.completed == len(lines), batch
    found = results(client, batch.output_file_id)
    for one in lines:
        alone = server.post("/v1/completions", one["body"]).json()["choices"][0]["text"]
        assert found[one["custom_id"]]["response"]["body"]["choices"][0]["text"] == alone


def test_a_line_that_fails_is_in_the_error_file_and_not_completed(client: openai.OpenAI) -> None:
    too_long = completion(1, prompt="far too long " * 2000)
    batch = ended(client, submit(client, [completion(0), too_long, completion(2)]).id)
    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert set(results(client, batch.output_file_id)) == {"line-0", "line-2"}
    wrong = results(client, batch.error_file_id)["line-1"]
    assert wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_chat_embeddings_and_responses_have_their_lines(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "hello"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"model": "qwen3", "messages": question, "max_tokens": 4},
        "/v1/embeddings": {"model": "bert", "input": "hello"},
        "/v1/responses": {"model": "qwen3", "input": "hello", "max_output_tokens": 4},
    }
    begun = {url: submit(client, [line("one", url, body)], url).id for url, body in bodies.items()}
    for url, batch_id in begun.items():
        batch = ended(client, batch_id)
        assert batch.request_counts.completed == 1, (url, results(client, batch.error_file_id))
        answer = results(client, batch.output_file_id)["one"]["response"]["body"]
        assert answer["object"] in ("chat.completion", "list", "response")


TEXTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]
ASKED = "What is the capital of France?"
RUN_BATCH: list[tuple[str, list[str], dict[str, Any]]] = [  # as files of vLLM's `run-batch` have them
    (
        "chat",
        ["/v1/chat/completions"],
        {
            "model": "llama",
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": "Hello world!"},
            ],
            "max_completion_tokens": 10,
        },
    ),
    ("embeddings", ["/v1/embeddings"], {"model": "bert", "input": "You are a helpful assistant."}),
    ("score", ["/score", "/v1/score"], {"model": "bert_scores", "queries": ASKED, "documents": TEXTS}),
    ("rerank", ["/rerank", "/v1/rerank", "/v2/rerank"], {"model": "bert_scores", "query": ASKED, "documents": TEXTS}),
]


@pytest.mark.parametrize(("urls", "body"), [one[1:] for one in RUN_BATCH], ids=[one[0] for one in RUN_BATCH])
def test_a_file_for_vllms_run_batch_is_answered(
    server: Server, tmp_path: Path, urls: list[str], body: dict[str, Any]
) -> None:
    file, answers = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    file.write_bytes(text_of([line(f"request-{at}", url, body) for at, url in enumerate(urls)]))
    done = run_command("batch", "submit", file, "-o", answers, "--url", server.url)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["custom_id"]: one for one in map(json.loads, answers.read_text().splitlines())}
    assert set(found) == {f"request-{at}" for at in range(len(urls))}
    for one in found.values():
        assert one["id"]
        assert (one["error"], one["response"]["status_code"]) == (None, 200)
        assert one["response"]["request_id"]
        assert one["response"]["body"]["model"] == body["model"]


BAD_LINES: list[tuple[bytes, str, str]] = [
    (b'{"custom_id": "a", "method": "POST"', "invalid_json", ""),
    (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "invalid_line", "body"),
    (b'{"custom_id": "\xff", "method": "POST", "url": "/v1/completions", "body": {}}', "invalid_utf8", "UTF-8"),
    (text_of([completion(1, max_tokens=-1)]).strip(), "invalid_value", "max_tokens"),
    (text_of([completion(1, stream=True)]).strip(), "unsupported_parameter", "stream"),
    (text_of([completion(1, model="nobody")]).strip(), "model_not_found", "nobody"),
    (text_of([line("b", "/v1/embeddings", {"model": MODEL})]).strip(), "mismatched_url", "/v1/embeddings"),
    (text_of([completion(0)]).strip(), "duplicate_custom_id", "line 1"),
    (b'{"x": "' + b"y" * (3 << 20) + b'"}', "line_too_long", "max_body_bytes"),
    (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json", "nested"),
]


@pytest.mark.parametrize(
    ("bad", "code", "words"), BAD_LINES, ids=[f"{one[1]}-{at}" for at, one in enumerate(BAD_LINES)]
)
def test_a_bad_line_fails_the_batch_before_it_begins(
    client: openai.OpenAI, kept: Path, bad: bytes, code: str, words: str
) -> None:
    content = text_of([completion(0)]) + b"\n" + bad + b"\n" + text_of([completion(2)])
    created = client.batches.create(
        input_file_id=upload(client, content), endpoint="/v1/completions", completion_window="24h"
    )
    batch = ended(client, created.id)
    assert batch.status == "failed"
    assert batch.output_file_id is None
    [problem] = batch.errors.data
    assert (problem.code, problem.line) == (code, 3), problem
    assert words in problem.message
    assert not list((kept / "work").glob(f"{batch.id}*")), "an index that no line needs takes room"


def test_cancelling_keeps_what_is_answered(client: openai.OpenAI) -> None:
    created = submit(client, [completion(number, max_tokens=60) for number in range(300)])
    eventually(lambda: client.batches.retrieve(created.id).request_counts.completed > 5)  # type: ignore[union-attr]
    began_s = time.monotonic()
    assert client.batches.cancel(created.id).status == "cancelling"
    batch = ended(client, created.id)
    assert time.monotonic() - began_s < 10
    assert batch.status == "cancelled"
    counts = batch.request_counts
    assert 5 < counts.completed < 300
    assert counts.completed + counts.failed == 300
    done, rest = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert len(done) == counts.completed
    assert {one["error"]["code"] for one in rest.values()} == {"batch_cancelled"}
    assert not done.keys() & rest.keys()
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(created.id)


def test_a_batch_is_cancelled_whenever_the_cancel_comes(client: openai.OpenAI) -> None:
    """Also in the moment in which its check ends."""
    lines = [completion(number, max_tokens=60) for number in range(300)]
    file = upload(client, text_of(lines))
    for step in range(40):
        batch = client.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h")
        time.sleep(0.002 * step)
        assert client.batches.cancel(batch.id).status == "cancelling"
        assert ended(client, batch.id).status == "cancelled", step


def test_a_batch_that_is_not_done_in_time_expires(client: openai.OpenAI) -> None:
    created = submit(client, [completion(number, max_tokens=100) for number in range(3000)], completion_window="5s")
    batch = ended(client, created.id)
    assert batch.status == "expired"
    assert batch.request_counts.completed + batch.request_counts.failed == 3000
    rest = results(client, batch.error_file_id)
    assert {one["error"]["code"] for one in rest.values()} == {"batch_expired"}
    assert len(rest) + len(results(client, batch.output_file_id)) == 3000


def test_files_are_listed_read_and_deleted(client: openai.OpenAI) -> None:
    content = text_of([completion(0)])
    names = ("../../etc/passwd", "a\\..\\b.jsonl", "naïve 日本.jsonl", "..", "x\r\nset-cookie: a.jsonl")
    ids = [upload(client, content, name) for name in names]
    shown = {one.id: one for one in client.files.list(purpose="batch")}
    assert [shown[id].filename for id in ids][:4] == ["passwd", "b.jsonl", "naïve 日本.jsonl", "file"]
    assert all("/" not in shown[id].filename and "\n" not in shown[id].filename for id in ids)
    for id in ids:
        assert client.files.retrieve(id).bytes == len(content)
        assert client.files.content(id).content == content
    page = client.files.list(limit=2, order="asc")
    assert len(page.data) == 2
    assert page.has_next_page()
    assert client.files.delete(ids[0]).deleted
    for gone in (ids[0], "file-" + "0" * 32, "../batches.db", "..%2f..%2flock"):
        with pytest.raises(openai.NotFoundError):
            client.files.content(gone)


def test_batches_are_listed_page_by_page(client: openai.OpenAI) -> None:
    ids = [submit(client, [completion(number)]).id for number in range(3)]
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert listed[:3] == ids[::-1]
    assert len(listed) == len(set(listed))
    with pytest.raises(openai.BadRequestError):
        client.batches.list(after="batch_nobody")
    for id in ids:
        ended(client, id)


def test_what_cannot_be_a_batch_is_refused_with_its_field(server: Server, client: openai.OpenAI) -> None:
    file = upload(client, text_of([completion(0)]))
    good = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    for changes, param in (
        ({"input_file_id": "file-none"}, "file_id"),
        ({"endpoint": "/v1/audio/speech"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "90d"}, "completion_window"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ):
        answer = server.post("/v1/batches", good | changes)
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"] == param, answer.text
    form = {"file": ("a.jsonl", b"x")}
    for files, data, param in ((form, {"purpose": "assistants"}, "purpose"), ({}, {"purpose": "batch"}, "file")):
        refused = httpx.post(f"{server.url}/v1/files", files=files or {"other": (None, "x")}, data=data)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param
