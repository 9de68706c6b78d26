"""A chat that names no limit gets the server's, or the model's own, and never more than the context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_fixture import Server, running_server

CONFIG = """
models:
  short: {{source: "{llama}", default_max_tokens: 5}}
  other: {{source: "{qwen3}"}}
server: {{default_max_tokens: 9}}
nodes: [{{threads: 1, kv_cache: 4MiB}}]
store: {{path: "{store}"}}
"""


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("limits")
    file = folder / "dovetail.yaml"
    file.write_text(CONFIG.format(llama=tiny_folder("llama"), qwen3=tiny_folder("qwen3"), store=folder / "store"))
    with running_server("--config", file) as running:
        yield running


def ask(server: Server, model: str, text: str = "hello", **options: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    body = {"ignore_eos": True}
    return server.client().chat.completions.create(model=model, messages=messages, extra_body=body, **options)


@pytest.mark.parametrize(("model", "tokens"), [("short", 5), ("other", 9)])
def test_a_chat_without_a_limit_gets_the_models_or_the_servers(server: Server, model: str, tokens: int) -> None:
    answer = ask(server, model)
    assert answer.usage.completion_tokens == tokens
    assert answer.choices[0].finish_reason == "length"
    states = {state["name"]: state for state in server.get("/api/models").json()["data"]}
    assert states[model]["default_max_tokens"] == tokens


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_of_the_request_goes_first(server: Server, name: str) -> None:
    assert ask(server, "short", **{name: 12}).usage.completion_tokens == 12


def test_the_default_gives_way_to_the_context(server: Server) -> None:
    room = 2
    filled = server.post("/tokenize", {"model": "other", "messages": [{"role": "user", "content": ""}]}).json()
    text = "a" * (filled["max_model_len"] - filled["count"] - room)
    answer = ask(server, "other", text)
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == filled["max_model_len"]
    assert answer.usage.completion_tokens <= 9


def test_a_completion_without_a_limit_still_gets_sixteen(server: Server) -> None:
    body = {"ignore_eos": True}
    answer = server.client().completions.create(model="short", prompt="hello", extra_body=body)
    assert answer.usage.completion_tokens == 16
