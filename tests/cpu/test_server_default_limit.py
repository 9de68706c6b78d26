"""A chat that names no limit gets the server's, or the model's own, and never more than the context; and drafts, which
other models of the same server have, by lookup and by a draft model, change no answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_fixture import Server, running_server

CONFIG = """
models:
  short: {{source: "{llama}", default_max_tokens: 5}}
  other: {{source: "{qwen3}", speculative: {{mode: always, tokens: 6}}}}
  drafted: {{source: "{llama}", speculative: {{mode: always, tokens: 4, draft: other}}}}
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


@pytest.mark.parametrize(("model", "stream"), [("other", False), ("other", True), ("drafted", True)])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "max_tokens": 41},
        {"temperature": 1.0, "seed": 5, "max_tokens": 60, "n": 2, "logprobs": True},
        {"temperature": 0, "max_tokens": 60, "stop": ["AAAAAAAAAAAAA"]},
    ],
)
def test_drafts_change_no_answer_and_are_counted(
    server: Server, options: dict[str, Any], model: str, stream: bool
) -> None:
    body = options | {
        "model": model,
        "ignore_eos": True,
        "logit_bias": {"65": 8.0},
        "prediction": {"type": "content", "content": "AAA"},
    }
    plain = answer_to(server, body | {"speculative": False}, stream=False)
    drafted = answer_to(server, body, stream=stream)
    assert drafted["text"] == plain["text"]
    assert drafted["finish"] == plain["finish"]
    assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert set(plain["usage"]["completion_tokens_details"].values()) == {0}
    accepted = drafted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert accepted > 0
    wait_for_metric(server, "dovetail:spec_decode_num_accepted_tokens_total", accepted)


def answer_to(server: Server, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """Texts and ends by choice, log-probabilities as part of the text, and usage."""
    body = {"messages": [{"role": "user", "content": "hello"}], **body}
    if not stream:
        answer = server.post("/v1/chat/completions", body).json()
        chunks = [answer]
        answer["choices"] = [choice | {"delta": choice["message"]} for choice in answer["choices"]]
    else:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        client = server.client().chat.completions
        known = {key: body.pop(key) for key in ("ignore_eos", "prediction", "speculative") if key in body}
        chunks = [chunk.model_dump() for chunk in client.create(**body, extra_body=known)]
    text, finish = {}, {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said = [entry["token"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
        before = text.get(choice["index"], ("", []))
        text[choice["index"]] = before[0] + (choice["delta"].get("content") or ""), before[1] + said
        finish[choice["index"]] = choice["finish_reason"] or finish.get(choice["index"])
    return {"text": text, "finish": finish, "usage": chunks[-1]["usage"]}


def wait_for_metric(server: Server, name: str, least: float) -> None:
    deadline = time.monotonic() + 20
    while True:
        lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(name + "{")]
        if sum(float(line.rsplit(" ", 1)[1]) for line in lines) >= least:
            return
        assert time.monotonic() < deadline, lines
        time.sleep(0.1)
