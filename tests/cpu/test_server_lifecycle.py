"""A server's life: clients that leave, draining, workers that die, models that come and go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from server_fixture import COMMAND, Server, eventually, run_command, running_server
from sse import event_data

# Many megabytes of events: more than fits into socket buffers, so that it goes on until somebody reads it.
LONG = {
    "model": "llama",
    "prompt": "a",
    "max_tokens": 250,
    "n": 32,
    "logprobs": 20,
    "ignore_eos": True,
    "stream": True,
}


def open_stream(server: Server) -> tuple[httpx.Client, httpx.Response]:
    """A stream that has begun."""
    client = httpx.Client(timeout=60)
    request = client.build_request("POST", f"{server.url}/v1/completions", json=LONG)
    return client, client.send(request, stream=True)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(tiny_server: Server, stream: bool) -> None:
    with httpx.Client(timeout=httpx.Timeout(60, read=0.05 if not stream else 60)) as client:
        if stream:
            with client.stream("POST", f"{tiny_server.url}/v1/completions", json=LONG) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{tiny_server.url}/v1/completions", json=LONG | {"stream": False})
    eventually(lambda: tiny_server.status()["unfinished"] == 0, timeout_s=5)
    assert tiny_server.client().completions.create(model="llama", prompt="a", max_tokens=2).choices
    eventually(lambda: tiny_server.blocks_used() == 0)


def test_a_stopping_server_lets_streams_finish_and_tells_probes(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    with running_server(tiny_folder("llama"), "--threads", "1", environment=environment) as server:
        client, response = open_stream(server)
        worker = server.node()["pid"]
        server.terminate()
        eventually(lambda: server.get("/health").status_code == 503, timeout_s=5)
        assert server.get("/live").status_code == 200
        refused = server.post("/v1/completions", {"model": "llama", "prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        lines = event_data(response)
        client.close()
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        eventually(lambda: not _is_alive(worker), timeout_s=5)
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_ends_a_draining_server_at_once(tiny_folder: Callable[[str], Path]) -> None:
    with running_server(tiny_folder("llama"), "--threads", "1") as server:
        client, _ = open_stream(server)
        server.terminate()
        eventually(lambda: server.get("/health").status_code == 503, timeout_s=5)
        started = time.monotonic()
        server.terminate()
        server.wait()
        assert time.monotonic() - started < 15
        client.close()


def test_an_interrupted_server_says_what_it_waits_for(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with running_server(tiny_folder("llama"), "--threads", "1", log=tmp_path / "log") as server:
        client, _ = open_stream(server)
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: "for 32 answers to end; a second Ctrl-C" in (tmp_path / "log").read_text())
        server.process.send_signal(signal.SIGINT)
        server.wait()
        client.close()


def test_the_time_to_drain_is_bounded(tiny_folder: Callable[[str], Path]) -> None:
    with running_server(tiny_folder("llama"), "--threads", "1", "--drain-timeout", "0") as server:
        client, _ = open_stream(server)
        server.terminate()
        assert server.wait() == 0
        client.close()


def test_models_of_the_catalogue_are_loaded_when_called(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    home = {"DOVETAIL_HOME": str(tmp_path)}
    for name in ("llama", "qwen3"):
        done = run_command("pull", tiny_folder(name), "--name", name, env={**os.environ, **home})
        assert done.returncode == 0, done.stderr
    with running_server("--threads", "1", "--kv-cache", "16MiB", environment=home) as server:
        assert sorted(server.models) == ["llama", "qwen3"]
        assert server.node()["models"] == []
        assert server.client().completions.create(model="qwen3", prompt="a", max_tokens=2).choices
        assert [model["name"] for model in server.node()["models"]] == ["qwen3"]
        table = run_command("ps", "--url", server.url)
        assert "qwen3" in table.stdout
        shown = json.loads(run_command("ps", "--url", server.url, "--json").stdout)
        assert shown["nodes"][0]["models"][0]["state"] == "loaded"


def test_a_model_that_cannot_be_loaded_fails_its_own_requests_only(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "fragile"
    folder.mkdir()
    for file in tiny_folder("llama").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "dovetail.yaml"
    config.write_text(
        f"models: {{fragile: {{source: {folder}}}, good: {{source: {tiny_folder('qwen3')}, preload: true}}}}"
    )
    with running_server("--config", config, "--threads", "1", "--kv-cache", "16MiB") as server:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        client = server.client()
        with pytest.raises(openai.InternalServerError, match="fragile"):
            client.completions.create(model="fragile", prompt="a")
        with pytest.raises(openai.APIError, match="fragile"):  # in the stream, if it took a while
            list(client.completions.create(model="fragile", prompt="a", stream=True))
        assert client.completions.create(model="good", prompt="a", max_tokens=2).choices


def test_run_answers_through_a_server_or_alone(tiny_server: Server, tiny_folder: Callable[[str], Path]) -> None:
    options = ("--max-tokens", "6", "--seed", "1", "--json")
    through = json.loads(run_command("run", "llama", "hi", *options, "--url", tiny_server.url).stdout)
    alone = json.loads(run_command("run", tiny_folder("llama"), "hi", *options, "--url", "http://127.0.0.1:9").stdout)
    assert through["content"] == alone["content"]
    assert through["completion_tokens"] == alone["completion_tokens"]
    piped = subprocess.run(
        [*COMMAND, "run", "llama", *options, "--url", tiny_server.url],
        input="hi", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert json.loads(piped.stdout)["content"] == through["content"]


def test_run_continues_a_text_through_a_server_or_alone(
    tiny_server: Server, tiny_folder: Callable[[str], Path]
) -> None:
    options = ("--complete", "--max-tokens", "6", "--temperature", "0", "--json")
    through = json.loads(run_command("run", "llama", "hi", *options, "--url", tiny_server.url).stdout)
    alone = json.loads(run_command("run", tiny_folder("llama"), "hi", *options, "--url", "http://127.0.0.1:9").stdout)
    asked = tiny_server.client().completions.create(model="llama", prompt="hi", max_tokens=6, temperature=0)
    assert through["content"] == alone["content"] == asked.choices[0].text
    refused = run_command("run", "llama", "hi", "--complete", "--system", "be brief", "--url", tiny_server.url)
    assert "--system is for chats" in refused.stderr


def test_ps_without_a_server_says_so() -> None:
    done = run_command("ps", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no server at http://127.0.0.1:9")


def test_metrics_count_what_was_served(tiny_server: Server) -> None:
    tiny_server.client().completions.create(
        model="qwen3", prompt="metrics", max_tokens=3, extra_body={"ignore_eos": True}
    )
    text = tiny_server.get("/metrics").text
    for name in ("time_to_first_token_seconds_count", "generation_tokens_total", "e2e_request_latency_seconds_count"):
        assert f'dovetail:{name}{{model_name="qwen3"}}' in text
    eventually(lambda: 'dovetail:turns_total{model_name="qwen3"}' in tiny_server.get("/metrics").text, timeout_s=5)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
