"""The commands around the gateway, as far as they need no server."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from gateway_builders import make_card

from dovetail.cli import chat, offer, serve
from dovetail.cli.announce import announce
from dovetail.config import Config, ModelConfig
from dovetail.errors import ConfigError, ModelNotFound, RequestError
from dovetail.gateway.http.listen import base_url, listen
from dovetail.local_token import KEY_VARIABLE


def test_clearing_a_conversation_keeps_its_system_message() -> None:
    conversation = chat.Conversation("be brief", {"temperature": 0})
    conversation.messages.append({"role": "user", "content": "hi"})
    conversation.clear()
    assert conversation.body("m") == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}],
        "temperature": 0,
    }


def test_a_chat_is_calm_unless_the_user_or_the_models_authors_say_otherwise() -> None:
    body = chat.Conversation(None, {}).body("m")
    assert chat._calmed(body, is_calm=False)["temperature"] == chat.CALM_TEMPERATURE
    assert "temperature" not in chat._calmed(body, is_calm=True)
    assert chat._calmed(body | {"temperature": 1.5}, is_calm=False)["temperature"] == 1.5


def test_events_of_a_stream_become_pieces_and_errors() -> None:
    choice = {"delta": {"content": "a"}, "finish_reason": "stop"}
    assert chat._piece({"choices": [choice]}) == chat.Piece("a", "stop", 0)
    assert chat._piece({"choices": [], "usage": {"completion_tokens": 5}}) == chat.Piece("", None, 5)
    with pytest.raises(RequestError, match="lost"):
        chat._piece({"error": {"message": "lost"}})


def test_a_server_is_asked_for_the_very_name_so_that_it_may_be_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(url: str, **options: object) -> httpx.Response:
        return httpx.Response(200 if url == "http://here/v1/models/a%2Fnick" else 404, json={"id": "name"})

    monkeypatch.setattr(httpx, "get", get)
    assert chat._serves("http://here/", "a/nick")
    assert not chat._serves("http://here", "/a/folder")


ECHO_CHAT = """
import asyncio
from dovetail.cli import chat

class Echo:
    async def answer(self, conversation):
        yield chat.Piece(repr(conversation.messages[-1]["content"]))

with asyncio.Runner() as runner:
    chat._converse(runner, Echo(), chat.Conversation(None, {}))
"""


def test_pasted_lines_are_one_message() -> None:
    terminal, side = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", ECHO_CHAT], stdin=side, stdout=side, stderr=side, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(side)
        prompt = _read_until(terminal, b">>> ")
        os.write(terminal, b"\x1b[200~one\ntwo\x1b[201~\r")
        seen = _read_until(terminal, b"'\r\n")
        os.write(terminal, b"\r/bye\r")
        _read_until(terminal, b"/bye\r\n")
        assert process.wait(timeout=10) == 0
    os.close(terminal)
    assert b"\x1b[?2004h" in prompt, "the terminal is asked to mark what is pasted"
    assert b"'one\\ntwo'" in seen


def _read_until(terminal: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        seen += os.read(terminal, 1024)
    return seen


def test_options_win_over_the_file_and_keys_add_up() -> None:
    config = Config.model_validate(
        {"server": {"port": 1, "host": "::1"}, "auth": {"keys": [{"name": "a", "key": "x"}]}}
    )
    merged = serve._override(config, {"port": 2, "host": None}, {"max_batch": 3}, "secret", Path("/models"))
    assert (merged.server.port, merged.server.host, merged.nodes[0].max_batch) == (2, "::1", 3)
    assert [key.name for key in merged.auth.keys] == ["a", "command-line"]
    assert "secret" not in repr(merged)
    assert merged.store.path == Path("/models")


class OneModel:
    """A catalogue with one model, which can pull nothing."""

    def __init__(self, folder: Path) -> None:
        self.card = make_card(folder, "here")

    def get(self, name: str) -> object:
        if name != "here":
            raise ModelNotFound(f"model {name!r} not found")
        return self.card


def test_a_model_is_found_by_name_and_can_be_given_another(tmp_path: Path) -> None:
    catalogue = OneModel(tmp_path)
    assert offer.find_card(catalogue, "here").name == "here"  # type: ignore[arg-type]
    assert offer.find_card(catalogue, "here", "alias").name == "alias"  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound, match="elsewhere"):
        offer.find_card(catalogue, "elsewhere")  # type: ignore[arg-type]


def test_models_named_in_the_config_are_served_with_their_settings(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"models": {"a": {"source": "nowhere", "preload": True}}, "store": {"path": tmp_path}}
    )
    assert config.models["a"] == ModelConfig(source="nowhere", preload=True)
    with pytest.raises(ModelNotFound, match="nowhere"):
        offer.make_offer(config, [])
    empty = offer.make_offer(Config.model_validate({"store": {"path": tmp_path}}), [])
    assert (empty.names, empty.preload) == ((), ())


def test_the_address_that_is_printed_can_be_reached() -> None:
    for host, shown in (("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")):
        listener = listen(host, 0)
        assert base_url(listener) == f"{shown}{listener.getsockname()[1]}"
        listener.close()


def test_a_key_comes_from_a_file_or_the_environment_and_stays_there_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("sk-from-file\n")
    assert serve._api_key(None, file) == "sk-from-file"
    monkeypatch.setenv(KEY_VARIABLE, "sk-variable")
    assert serve._api_key("sk-variable", None) == "sk-variable"
    assert KEY_VARIABLE not in os.environ, "workers would inherit it"
    assert serve._api_key(None, None) is None
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="empty"):
        serve._api_key(None, file)
    with pytest.raises(ConfigError, match="--api-key-file"):
        serve._api_key(None, tmp_path / "missing")


def test_the_example_that_serve_prints_suits_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, changes, path in (
        ("talker", {}, "/v1/chat/completions"),
        ("writer", {"chat_template": None}, "/v1/completions"),
    ):
        card = make_card(tmp_path, name, **changes)
        announce("http://127.0.0.1:8000", [name], card, has_keys=False, as_json=False)
        assert f"curl http://127.0.0.1:8000{path} -H" in capsys.readouterr().out
