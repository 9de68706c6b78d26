"""What agents ask of `/v1/responses`: tools of every kind, conversations, compaction; on a fake worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from gateway_builders import make_card
from test_gateway_http import KEYS, check_error, on_app

from dovetail.errors import InvalidRequest, ResponseNotFound
from dovetail.gateway.http.responses.builder import OutputBuilder
from dovetail.gateway.http.responses.conversations import MAX_ITEMS, Conversations
from dovetail.gateway.http.responses.request import Item, ResponsesRequest, responses_chat
from dovetail.gateway.http.responses.tools import ToolSet
from dovetail.gateway.service import Service
from dovetail.gateway.text.reading import CallDelta, Parts
from dovetail.types import ModelCard


def wide(folder: Path) -> ModelCard:
    """A model with room for tools in its prompt."""
    card = make_card(folder, "wide")
    return msgspec.structs.replace(card, spec=msgspec.structs.replace(card.spec, context_length=8192))


ASKED: dict[str, Any] = {"model": "fake", "input": "hi", "max_output_tokens": 6, "temperature": 0}
INNER = {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "patch"'},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {}}},
    {"type": "namespace", "name": "agents", "description": "d", "tools": [INNER]},
    PATCH,
    {"type": "web_search", "external_web_access": True},
]


def request(**changes: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate_json(json.dumps(ASKED | changes))


def told(*items: Any) -> list[dict[str, Any]]:
    chat = responses_chat(request(input=list(items), tools=TOOLS), ())
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def test_what_agents_send_along_is_accepted_and_named(tmp_path: Path) -> None:
    sent = {
        "tools": TOOLS,
        "client_metadata": {"session_id": "s"},
        "prompt_cache_key": "k",
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "low"},
        "stream_options": {"include_obfuscation": False},
        "max_tool_calls": 3,
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "store": False,
    }

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        asked = ASKED | {"model": "wide"}
        answer = (await client.post("/v1/responses", json=asked | sent)).json()
        assert answer["output"], answer
        assert [note.split()[0] for note in answer["warnings"]] == ["tools[3]:", "context_management"]
        assert answer["max_tool_calls"] == 3
        error = await client.post("/v1/responses", json=asked | {"temprature": 1})
        assert "did you mean 'temperature'" in check_error(error, 400, "temprature")["message"]
        check_error(await client.post("/v1/responses", json=asked | {"functions": [1]}), 400, "functions")
        nothing = {"input": [{"type": "web_search_call", "id": "ws"}]}
        check_error(await client.post("/v1/responses", json=asked | nothing), 400, "input")

    on_app(tmp_path, test, wide(tmp_path / "wide"))


def test_tools_of_every_kind_are_functions_to_the_model() -> None:
    chat = responses_chat(request(tools=TOOLS), ())
    assert chat.tools is not None
    assert [tool.function.name for tool in chat.tools] == ["run", "agents.close", "apply_patch"]
    patch = chat.tools[2].function
    assert 'start: "patch"' in (patch.description or "")
    assert patch.parameters is not None
    assert patch.parameters["properties"] == {"input": {"type": "string"}}
    regex = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "a+|b"}}
    held = responses_chat(request(tools=[regex]), ()).tools
    assert held is not None
    assert held[0].function.parameters == {
        "type": "object",
        "properties": {"input": {"type": "string", "pattern": "^(?:a+|b)$"}},
        "required": ["input"],
    }
    forced = responses_chat(request(tools=TOOLS, tool_choice={"type": "custom", "name": "apply_patch"}), ())
    assert forced.tool_choice.function.name == "apply_patch"  # type: ignore[union-attr]
    only_hosted = responses_chat(request(tools=TOOLS[3:], tool_choice="required"), ())
    assert (only_hosted.tools, only_hosted.tool_choice) == (None, "auto")
    with pytest.raises(InvalidRequest, match="twice"):
        responses_chat(request(tools=[*TOOLS, TOOLS[0]]), ())


def test_calls_come_back_as_they_were_offered() -> None:
    builder = OutputBuilder(ToolSet.of(request(tools=TOOLS).tools))
    calls = [
        CallDelta(0, "agents.close", "{}"),
        CallDelta(1, "apply_patch", '{"input": "a\\n'),
        CallDelta(1, None, '\\"b\\""}'),
        CallDelta(2, "run", "{}"),
    ]
    events = [event for call in calls for event in builder.feed(Parts(calls=[call]), [])] + list(builder.close())
    close, patch, run = builder.items
    assert (close.type, close.name, close.namespace) == ("function_call", "close", "agents")  # type: ignore[union-attr]
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", 'a\n"b"')  # type: ignore[union-attr]
    assert (run.type, run.name, run.namespace) == ("function_call", "run", None)  # type: ignore[union-attr]
    kinds = [event["type"] for event in events if event.get("output_index") == 1]
    assert kinds == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]


def test_a_history_with_all_of_it_becomes_messages() -> None:
    assert told(
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "message", "role": "developer", "content": "two"},
        {"role": "user", "content": "do"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"type": "function_call", "call_id": "c1", "name": "close", "namespace": "agents", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "p"},
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
    ) == [
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "do"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "agents.close", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "apply_patch", "arguments": '{"input": "p"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
    ]


def test_a_conversation_goes_on_from_answer_to_answer(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        free, slow = ({"authorization": f"Bearer sk-{name}"} for name in ("free", "slow"))
        begun = {"items": [{"role": "user", "content": "first"}], "metadata": {"a": "b"}}
        made = (await client.post("/v1/conversations", json=begun, headers=free)).json()
        assert (made["object"], made["metadata"]) == ("conversation", {"a": "b"})
        path = f"/v1/conversations/{made['id']}"
        answer = (await client.post("/v1/responses", json=ASKED | {"conversation": made["id"]}, headers=free)).json()
        assert answer["conversation"] == {"id": made["id"]}
        items = (await client.get(f"{path}/items?order=asc", headers=free)).json()["data"]
        said = answer["output"][0]["content"][0]["text"]
        assert [item["content"] for item in items[:2]] == ["first", "hi"]
        assert items[2]["content"][0]["text"] == said
        await client.post("/v1/responses", json=ASKED | {"conversation": {"id": made["id"]}}, headers=free)
        items = (await client.get(f"{path}/items", headers=free)).json()["data"]
        assert len(items) == 5
        await client.delete(f"{path}/items/{items[0]['id']}", headers=free)
        assert len((await client.get(f"{path}/items", headers=free)).json()["data"]) == 4
        check_error(await client.get(path, headers=slow), 404)
        both = ASKED | {"conversation": made["id"], "previous_response_id": "resp_1"}
        check_error(await client.post("/v1/responses", json=both, headers=free), 400, "conversation")
        assert (await client.delete(path, headers=free)).json()["deleted"]
        check_error(await client.post("/v1/responses", json=ASKED | {"conversation": made["id"]}, headers=free), 404)

    on_app(tmp_path, test, auth=KEYS)


def test_a_compacted_conversation_goes_on(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        items = [{"role": "user", "content": "do it"}, {"role": "assistant", "content": "done"}]
        compacted = (await client.post("/v1/responses/compact", json={"model": "fake", "input": items})).json()
        assert compacted["object"] == "response.compaction"
        user, summary = compacted["output"]  # of a prompt that leaves no room for a long one
        assert user["content"] == "do it"
        assert summary["type"] == "compaction"
        assert compacted["usage"]["output_tokens"] > 0
        answer = await client.post(
            "/v1/responses", json=ASKED | {"input": [summary, {"role": "user", "content": "hi"}]}
        )
        assert answer.json()["output"][0]["content"][0]["text"].startswith("Summa"), answer.text
        forged = {"type": "compaction", "encrypted_content": "aGk="}
        check_error(await client.post("/v1/responses", json=ASKED | {"input": [forged]}), 400, "input[0]")
        check_error(await client.post("/v1/responses/compact", json={"model": "fake"}), 400, "input")

    on_app(tmp_path, test)


def said(text: str) -> Item:
    return Item(role="user", content=text)


def test_conversations_are_bounded_by_number_by_bytes_and_by_items() -> None:
    kept = Conversations(max_conversations=2, max_bytes=20_000)
    first, second = (kept.create("a", [said("x")], {}) for _ in range(2))
    kept.extend(first, [said("y")])  # which makes the other one the oldest
    kept.create("a", [], {})
    assert kept.get(first.id, "a") is first
    with pytest.raises(ResponseNotFound):
        kept.get(second.id, "a")
    kept.create("a", [said("z" * 19_900)], {})
    with pytest.raises(ResponseNotFound):
        kept.get(first.id, "a")
    long = kept.create("a", [], {})
    kept.go_on(long, [said("first")], [said(str(number)) for number in range(MAX_ITEMS)])
    assert [item["content"] for item in long.items[:1]] == ["0"]
    with pytest.raises(InvalidRequest, match="at most"):
        kept.extend(long, [said("more")])
    kept.go_on(long, [], [said("last")])
    assert (len(long.items), long.items[-1]["content"]) == (MAX_ITEMS, "last")
    assert long.size_bytes == sum(len(str(item)) for item in long.items)
