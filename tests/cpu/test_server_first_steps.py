"""What a newcomer does first, as README has it: serve, ask, chat in the page, add a model of one's own, call it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from browser import find_browser, running_browser
from server_fixture import COMMAND, STOP_TIMEOUT_S
from tiny_gguf import save_tiny_gguf

from dovetail.types import ModelCard

README = Path(__file__).parents[2] / "README.md"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def blocks() -> list[str]:
    """Code of the section, in order. It names the port that is the default; here it is a free one."""
    section = README.read_text().partition("## First steps\n")[2].partition("\n## ")[0]
    return re.findall(r"^```\w*\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def served(line: str, port: int, folder: Path) -> Iterator[Iterator[str]]:
    """The README's line for the server, on a port that is free and with answers that are short; what it prints."""
    config = folder / "short.yaml"
    config.write_text("server: {default_max_tokens: 32}")
    command = [*COMMAND, *shlex.split(line)[1:], "--port", str(port), "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as server:
        try:
            assert server.stdout is not None
            yield iter(server.stdout)
        finally:
            server.terminate()
            assert server.wait(STOP_TIMEOUT_S) == 0


def run(line: str, folder: Path, url: str) -> str:
    environment = {**os.environ, "DOVETAIL_URL": url, "BROWSER": "true"}
    command = [*COMMAND, *shlex.split(line)[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=environment)
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done.stdout.strip()


def chat_in_the_page(browser: str, url: str, profile: Path) -> str:
    with running_browser(browser, profile) as running:
        page = running.page(url)
        page.wait("document.querySelector('#model')?.value")
        page.js("document.querySelector('#prompt').value = 'Please name the capital of Germany.'")
        page.js("document.querySelector('#ask').requestSubmit()")
        page.wait("document.querySelector('.assistant .note')?.textContent.includes('first token')")
        return str(page.js("document.querySelector('.assistant .text').textContent"))


def test_the_first_steps_of_the_readme_work_as_they_are_written(smollm2: ModelCard, tmp_path: Path) -> None:
    serve, commands, program = blocks()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    save_tiny_gguf("llama", tmp_path / "my-model.gguf", adjust=lambda writer: writer.add_chat_template(TEMPLATE))
    with served(serve, port, tmp_path) as printed:
        line = next(text.strip() for text in printed if text.strip().startswith("curl "))
        if shutil.which("curl") is not None:
            answer = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120, check=True).stdout
            assert json.loads(answer)["choices"][0]["message"]["content"] == "The capital of Germany is Berlin."
        ask, visit, add = commands.splitlines()
        assert len(run(ask, tmp_path, url)) > 20
        assert run(visit, tmp_path, url).startswith(url)
        assert run(add, tmp_path, url) == f"mine is served at {url}"
        said = StringIO()
        with redirect_stdout(said):
            exec(program.replace("http://127.0.0.1:8000", url), {})
        assert said.getvalue().strip()


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium (Debian, Ubuntu: apt-get install chromium)")
def test_the_page_of_the_first_steps_chats(smollm2: ModelCard, tmp_path: Path) -> None:
    serve, commands, _ = blocks()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with served(serve, port, tmp_path) as printed:
        next(text for text in printed if text.strip().startswith("curl "))
        address = run(commands.splitlines()[1], tmp_path, url)
        browser = find_browser()
        assert browser is not None
        text = chat_in_the_page(browser, address, tmp_path / "profile")
        assert len(text.split()) > 3, "what it says is drawn at random: the command above asks for the likeliest tokens"


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, smollm2: ModelCard) -> None:
    """The model that is added does not stay: it goes into a store of its own, where the demo model is at hand too."""
    from dovetail.machine import default_root

    home = tmp_path / "home"
    home.mkdir()
    for name in ("blobs", "models"):
        shutil.copytree(default_root() / name, home / name, copy_function=_link)
    monkeypatch.setenv("DOVETAIL_HOME", str(home))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
