"""What the page sends for a conversation, and what it writes for others: programs and settings that are well-formed."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_modules import NODE, call, call_many, needs_node

from dovetail.gateway.http.responses.request import ResponsesRequest

pytestmark = needs_node

OPEN = {"url": "http://127.0.0.1:8000", "model": "smollm2-135m-instruct", "context": 2048, "hasKeys": False}
KEYED = OPEN | {"url": "https://models.example:8443", "hasKeys": True}
ODD = OPEN | {"model": 'it\'s "a" $(model)\\n'}  # names are free where they come from a file
NOT_A_KEY = ("none", "YOUR_KEY")


def said(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {
        "system": "",
        "sampling": {},
        "messages": [{"role": role, "content": text} for role, text in messages],
    } | more


def test_a_conversation_is_sent_with_its_system_prompt_and_settings() -> None:
    chat = said(
        ("user", "hi"), ("assistant", "hello"), ("user", "more"), system="Be brief.", sampling={"top_p": 0.5, "seed": 0}
    )
    body = call("request.js", "chatRequest", chat, 3, "m", {})
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert (body["model"], body["top_p"], body["seed"], body["temperature"], body["stream"]) == ("m", 0.5, 0, 0.7, True)
    assert "temperature" not in call("request.js", "chatRequest", chat, 3, "m", {"temperature": 0.3})
    chosen = chat | {"sampling": {"temperature": 0, "thinks": False}}
    body = call("request.js", "chatRequest", chosen, 3, "m", {})
    assert body["temperature"] == 0
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "thinks" not in body


def test_questions_without_an_answer_are_sent_as_one() -> None:
    chat = said(("user", "one"), ("assistant", ""), ("user", "two"), ("assistant", "answer"), ("user", "three"))
    messages = call("request.js", "chatRequest", chat, 5, "m")["messages"]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "one\n\ntwo"), ("assistant", "answer"), ("user", "three"),
    ]  # fmt: skip
    assert len(call("request.js", "chatRequest", chat, 1, "m")["messages"]) == 1
    assert chat["messages"][0]["content"] == "one"


def test_a_conversation_with_tools_is_sent_with_the_calls_that_were_made() -> None:
    call_made = {"id": "m", "server": "notes", "name": "keep", "args": "{}", "output": "kept", "error": None}
    chat = said(("user", "one"), ("user", "two"), ("assistant", "done"), ("user", "more"), system="Be brief.")
    chat |= {"tools": ["notes"], "sampling": {"max_tokens": 9, "frequency_penalty": 1, "thinks": False, "top_k": 3}}
    chat["messages"][2]["calls"] = [call_made]
    body = call("tools.js", "toolRequest", chat, 4, "m", {})
    assert body["input"] == [
        {"role": "user", "content": "one\n\ntwo"},
        {"type": "mcp_call", "id": "m", "server_label": "notes", "name": "keep", "arguments": "{}", "output": "kept",
         "error": None},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "more"},
    ]  # fmt: skip
    assert (body["instructions"], body["max_output_tokens"], body["top_k"]) == ("Be brief.", 9, 3)
    assert body["tools"] == [{"type": "mcp", "server_label": "notes", "require_approval": "never"}]
    assert ResponsesRequest.model_validate_json(json.dumps(body)).warnings() == ()


def test_events_of_both_apis_are_read_alike() -> None:
    item = {"type": "mcp_call", "id": "m", "server_label": "notes", "name": "keep", "arguments": "{}"}
    error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "no"}]}
    events: list[Any] = [
        {"choices": [{"delta": {"content": "a", "reasoning_content": "b"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.reasoning_text.delta", "delta": "b"},
        {"type": "response.output_item.added", "item": item | {"status": "in_progress"}},
        {
            "type": "response.output_item.done",
            "item": item | {"status": "failed", "error": error},
        },
        {"type": "response.completed", "response": {"usage": {"output_tokens": 3}}},
        {"type": "response.failed", "response": {"error": {"message": "gone"}}},
    ]
    news = call_many("tools.js", "newsOf", [[event] for event in events])
    assert [{key: value for key, value in one.items() if value is not None} for one in news[:4]] == [
        {"text": "a", "thought": "b", "finish": "stop"}, {"tokens": 3}, {"text": "a"}, {"thought": "b"},
    ]  # fmt: skip
    assert (news[4]["call"]["server"], news[4]["call"]["isOver"]) == ("notes", False)
    assert (news[5]["call"]["error"], news[5]["call"]["isOver"]) == ("no", True)
    assert (news[6], news[7]["error"]["message"]) == ({"finish": "stop", "tokens": 3}, "gone")
    calls = call("tools.js", "withCall", [news[4]["call"]], news[5]["call"])
    assert calls == [news[5]["call"]]


@pytest.mark.parametrize(
    ("name", "text", "is_good"),
    [
        *[("temperature", "0", True), ("temperature", "2.1", False), ("temperature", "warm", False)],
        *[("temperature", " ", True), ("top_k", "40", True), ("top_k", "1.5", False), ("max_tokens", "0", False)],
        *[("seed", "-1", False), ("min_p", "1e400", False)],
    ],
)
def test_a_setting_that_cannot_be_sent_is_named(name: str, text: str, is_good: bool) -> None:
    setting = next(each for each in call("request.js", "SAMPLING") if each["name"] == name)
    problem = call("request.js", "samplingProblem", setting, text)
    assert (problem is None) == is_good
    assert is_good or setting["label"] in problem


def all_paths() -> dict[str, Any]:
    return {example["path"]: {"post": {}, "get": {}} for example in call("examples.js", "EXAMPLES")}


def test_only_what_the_server_has_is_shown() -> None:
    paths = all_paths()
    shown = [example["id"] for example in call("examples.js", "offered", paths)]
    assert {"chat", "responses", "completions", "embeddings", "messages"} <= set(shown)
    del paths["/v1/messages"]
    assert [example["id"] for example in call("examples.js", "offered", paths)] == [
        one for one in shown if one != "messages"
    ]
    clients = {client["id"] for client in call("clients.js", "usable", {"/v1/responses": {}})}
    assert "codex" in clients
    assert "claude" not in clients
    assert "claude" in {client["id"] for client in call("clients.js", "usable", {"/v1/messages": {}})}


BODIES: list[dict[str, Any] | None] = [
    None,
    {"model": "m", "messages": [{"role": "user", "content": 'it\'s "quoted"\n$HOME `x`'}], "stream": True},
    {"model": "m", "schema": {"a": [1, 2.5, None, True, False], "b": {"c": "é" * 90}}, "empty": {}, "none": []},
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("server", [OPEN, KEYED])
def test_programs_for_a_request_are_well_formed_and_say_the_same(body: Any, server: dict[str, Any]) -> None:
    examples = [example | {"method": "POST" if body else "GET"} for example in call("examples.js", "EXAMPLES")]
    for example, text in zip(examples, written("asCurl", examples, body, server), strict=True):
        words = shlex.split(text.replace("\\\n", " "))
        assert words[0] == "curl"
        assert server["url"] + example["path"] in words
        assert not body or json.loads(words[words.index("-d") + 1]) == body
        assert any("$DOVETAIL_API_KEY" in word for word in words) == server["hasKeys"]
    for example, program in zip(examples, written("asPython", examples, body or {}, server), strict=True):
        assert ("os.environ" in program) == server["hasKeys"]
        calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
        sdk = [node for node in calls if ast.unparse(node.func).startswith("client.")]
        given = {word.arg: ast.literal_eval(word.value) for node in sdk for word in node.keywords if word.arg}
        assert not example["call"] or given == (body or {})
    assert all(("process.env" in text) == server["hasKeys"] for text in written("asJavaScript", examples, body, server))


def written(language: str, examples: list[Any], body: Any, server: dict[str, Any]) -> list[str]:
    found: list[str] = call_many("examples.js", language, [[example, body, server] for example in examples])
    return found


@pytest.mark.parametrize("example", ["stream", "messages", "tokenize", "models"])
def test_programs_in_javascript_can_be_read(example: str, tmp_path: Path) -> None:
    assert NODE is not None
    (found,) = (each for each in call("examples.js", "EXAMPLES") if each["id"] == example)
    program = tmp_path / "program.mjs"
    program.write_text(call("examples.js", "asJavaScript", found, BODIES[2] if example != "models" else None, KEYED))
    done = subprocess.run([NODE, "--check", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def parts(client: str, server: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call("clients.js", "partsFor", client, server)
    return found


CLIENTS = ("any", "codex", "claude", "opencode", "aider", "webui", "litellm", "langchain", "lmeval")


@pytest.mark.parametrize("server", [OPEN, KEYED, ODD], ids=["open", "keyed", "odd"])
@pytest.mark.parametrize("client", CLIENTS)
def test_settings_for_clients_are_well_formed_and_name_server_and_model(client: str, server: dict[str, Any]) -> None:
    texts = []
    for part in parts(client, server):
        text, language = part["text"], part["language"]
        texts.append(text)
        if language == "toml":
            assert tomllib.loads(text)["model"] == server["model"]
        elif language == "json":
            assert list(json.loads(text)["provider"]["dovetail"]["models"]) == [server["model"]]
        elif language == "yaml":
            assert yaml.safe_load(text)["model_list"][0]["model_name"] == server["model"]
        elif language == "python":
            constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
            assert server["model"] in constants
        else:
            words = shlex.split(text.replace("\\\n", " "))
            assert not {"$(model)", "it's"} & set(words)
    whole = "\n".join(texts)
    assert server["url"] in whole
    assert client in ("webui",) or any(server["model"] in text or "it" in text for text in texts)
    if server["hasKeys"]:
        assert "YOUR_KEY" in whole or "DOVETAIL_API_KEY" in whole
    else:
        assert "YOUR_KEY" not in whole
        assert "DOVETAIL_API_KEY" not in whole


def test_long_lists_of_numbers_are_shown_by_their_beginning() -> None:
    shown = call("examples.js", "pretty", json.dumps({"embedding": [0.5] * 576, "index": 0}))
    assert "… 564 more" in shown
    assert len(shown) < 200
    assert call("examples.js", "pretty", "data: x\n\n") == "data: x\n\n"
