"""Every error that the official client knows, and bad input on the command line: one line each, the server alive."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_fixture import Server, eventually, run_command, running_server

QUESTION: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(tiny_server: Server) -> openai.OpenAI:
    return tiny_server.client()


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**({"model": "llama", "messages": QUESTION, "max_tokens": 4} | options))


@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, openai.BadRequestError, "messages"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"model": "org/gpt-9"}, openai.NotFoundError, "model"),
        ({"extra_body": {"guided_regex": "(("}}, openai.UnprocessableEntityError, "guided_regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "?"}}}},
            openai.UnprocessableEntityError,
            "response_format",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_client_raises_the_class_that_fits(
    client: openai.OpenAI, options: dict[str, Any], error: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    with pytest.raises(error) as caught:
        create(client, stream=stream, **options)
    assert caught.value.param == param
    assert "\n" not in caught.value.message


def test_a_prompt_longer_than_the_context_has_its_own_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, messages=[{"role": "user", "content": "a" * 5000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_grammar_that_compiles_only_to_nothing_leaves_the_server_alive(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        create(client, extra_body={"guided_json": {"type": "integer", "minimum": 5, "maximum": 1}})
    assert caught.value.status_code in (400, 422)
    assert create(client).choices


def test_a_grammar_that_refers_to_itself_without_end_is_told_in_words(client: openai.OpenAI) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="no text fits it") as caught:
        create(client, extra_body={"guided_json": {"$ref": "#"}})
    assert "NoExtension" not in caught.value.message


@pytest.fixture(scope="module")
def guarded_server(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With keys, a quota, a queue of two and small bodies; its models are loaded when they are called."""
    good = tiny_folder("llama")
    config = tmp_path_factory.mktemp("config") / "dovetail.yaml"
    config.write_text(f"""
models:
  llama: {{source: {good}, aliases: [default], keep_alive: 0}}
server: {{max_body_bytes: 20kB, max_queue: 64}}
nodes: [{{kv_cache: 16MiB, threads: 1}}]
auth:
  keys:
    - {{name: free, key: "${{env.TEST_KEY}}"}}
    - {{name: slow, key: sk-slow, requests_per_minute: 2}}
    - {{name: boss, key: sk-boss, admin: true}}
""")
    with running_server("--config", config, environment={"TEST_KEY": "sk-free"}) as server:
        yield server


def test_a_missing_or_wrong_key_is_an_authentication_error(guarded_server: Server) -> None:
    for key in ("wrong", "sk-fre", "sk-free2"):
        with pytest.raises(openai.AuthenticationError):
            create(guarded_server.client(api_key=key))
    assert create(guarded_server.client(api_key="sk-free")).choices
    assert guarded_server.get("/health").status_code == 200


def test_a_spent_quota_is_a_rate_limit_error_that_says_when_to_return(guarded_server: Server) -> None:
    client = guarded_server.client(api_key="sk-slow")
    for _ in range(2):
        assert create(client, model="default").model == "llama"
    with pytest.raises(openai.RateLimitError) as caught:
        create(client)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60


def test_a_full_queue_is_a_503_that_says_when_to_return(guarded_server: Server) -> None:
    client = guarded_server.client(api_key="sk-free")
    prompts = ["a", "b", "c"]
    # Many events that nobody reads: the job stays unfinished for as long as the test wants it to.
    long = {"max_tokens": 250, "n": 32, "logprobs": 20, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model="llama", prompt=prompts[:2], stream=True, **long):
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="llama", prompt="d", max_tokens=2)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1

    def works() -> bool:
        try:
            return bool(client.completions.create(model="llama", prompt=prompts[:2], max_tokens=2).choices)
        except openai.InternalServerError:
            return False

    eventually(works)
    with pytest.raises(openai.BadRequestError, match="96 answers are more"):  # now and ever
        client.completions.create(model="llama", prompt=prompts, max_tokens=2, n=32)


def test_a_body_over_the_limit_is_a_413(guarded_server: Server) -> None:
    client = guarded_server.client(api_key="sk-free")
    for size in (30_000, 3_000_000):
        with pytest.raises(openai.APIStatusError) as caught:
            create(client, messages=[{"role": "user", "content": "a" * size}])
        assert caught.value.status_code == 413


def test_an_idle_model_leaves_after_its_keep_alive(guarded_server: Server) -> None:
    header = {"authorization": "Bearer sk-boss"}
    assert create(guarded_server.client(api_key="sk-free")).choices

    def models() -> list[Any]:
        status = httpx.get(f"{guarded_server.url}/api/ps", headers=header).json()
        return list(status["nodes"][0]["models"])

    eventually(lambda: not models(), timeout_s=10)
    assert create(guarded_server.client(api_key="sk-free")).choices


def serve_error(*arguments: str | Path, **options: Any) -> str:
    """The one line on stderr of a `serve` that must not start."""
    done = run_command("serve", *arguments, "--port", "0", **options)
    assert done.returncode == 1, done
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def test_a_port_in_use_is_named_before_any_worker_starts(tiny_folder: Callable[[str], Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_command("serve", tiny_folder("llama"), "--port", port)
    assert done.returncode == 1
    assert done.stderr == f"error: cannot listen on 127.0.0.1:{port}: the port is in use\n"


def test_a_config_with_an_unknown_key_names_it(tmp_path: Path) -> None:
    config = tmp_path / "dovetail.yaml"
    config.write_text("server: {prot: 8000}\n")
    assert "server.prot: unknown key" in serve_error("--config", config)


def test_bad_models_are_refused_with_one_line_that_names_them(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty" in serve_error(empty)
    truncated = tmp_path / "truncated"
    truncated.mkdir()
    for file in tiny_folder("llama").iterdir():
        data = file.read_bytes()
        (truncated / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    assert "model.safetensors" in serve_error(truncated)
    assert "no-such-model" in serve_error("no-such-model")
    assert "--kv-cache" in serve_error(tiny_folder("llama"), "--kv-cache", "lots")
