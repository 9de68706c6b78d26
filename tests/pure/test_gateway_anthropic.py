"""Anthropic's paths on a fake worker: requests become chats, answers and errors have its shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_worker import BUSY, FAIL
from gateway_builders import byte_level_tokenizer, make_card
from test_gateway_http import CHAT, KEYS, on_app

from dovetail.errors import InvalidRequest
from dovetail.gateway.http.anthropic.answer import Blocks
from dovetail.gateway.http.anthropic.request import MessagesRequest, anthropic_chat
from dovetail.gateway.service import Service
from dovetail.gateway.text.reading import CallDelta, Parts

ASKED: dict[str, Any] = {"model": "fake", "messages": CHAT["messages"], "max_tokens": 6, "temperature": 0}
TOOL: dict[str, Any] = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}


def request(**changes: Any) -> MessagesRequest:
    return MessagesRequest.model_validate_json(json.dumps(ASKED | changes))


def told(**changes: Any) -> list[dict[str, Any]]:
    chat = anthropic_chat(request(**changes), thinks=False)
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def sse(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def check_error(response: httpx.Response, status: int, kind: str, word: str) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert word in body["error"]["message"]
    assert response.headers["request-id"] == body["request_id"]


def test_a_message_says_what_the_chat_says_whole_and_in_events(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        openai = (await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 6, "temperature": 0})).json()
        whole = (await client.post("/v1/messages", json=ASKED)).json()
        assert whole["content"] == [text(openai["choices"][0]["message"]["content"])]
        assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "fake")
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
        usage = whole["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == openai["usage"]["prompt_tokens"]
        assert usage["output_tokens"] == openai["usage"]["completion_tokens"]
        events = sse(await client.post("/v1/messages?beta=true", json=ASKED | {"stream": True}))
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert events[0]["message"]["content"] == []
        said = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
        assert said == whole["content"][0]["text"]
        assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert events[-2]["usage"]["output_tokens"] == usage["output_tokens"]
        assert service.unfinished == 0

    on_app(tmp_path, test)


def test_an_answer_says_why_it_ended(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        raw = {"messages": [user(text("abcabc"))], "ignore_eos": True}
        short = (await client.post("/v1/messages", json=ASKED | raw | {"max_tokens": 2})).json()
        assert short["stop_reason"] == "max_tokens"
        whole = (await client.post("/v1/messages", json=ASKED | raw | {"max_tokens": 40})).json()
        word = whole["content"][0]["text"][5:8]
        stopped = (
            await client.post("/v1/messages", json=ASKED | raw | {"max_tokens": 40, "stop_sequences": [word]})
        ).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", word)
        far = (await client.post("/v1/messages", json=ASKED | raw | {"max_tokens": 32_000})).json()
        assert far["stop_reason"] == "model_context_window_exceeded"
        assert "32000" in far["warnings"][0]

    on_app(tmp_path, test)


def test_errors_have_their_shape_wherever_they_arise(tmp_path: Path) -> None:
    texts = byte_level_tokenizer()

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for change, status, kind, word in (
            ({"model": "nothing"}, 404, "not_found_error", "nothing"),
            ({"messages": []}, 400, "invalid_request_error", "messages"),
            ({"max_token": 5}, 400, "invalid_request_error", "did you mean 'max_tokens'?"),
            (
                {"messages": [user({"type": "image", "source": {}})]},
                400,
                "invalid_request_error",
                "messages[0].content[0]",
            ),
            ({"messages": [user(text(texts.decode([FAIL])))]}, 500, "api_error", "no luck"),
            ({"messages": [user(text(texts.decode([BUSY])))]}, 503, "overloaded_error", "no room"),
        ):
            for stream in (False, True):
                check_error(
                    await client.post("/v1/messages", json=ASKED | {"stream": stream} | change), status, kind, word
                )
        without = {key: value for key, value in ASKED.items() if key != "max_tokens"}
        check_error(await client.post("/v1/messages", json=without), 400, "invalid_request_error", "max_tokens")
        check_error(await client.get("/v1/messages"), 405, "invalid_request_error", "GET")
        check_error(await client.get("/v1/messages/drafts"), 404, "not_found_error", "no such path")
        big = await client.post("/v1/messages", json=ASKED | {"system": "x" * 5000})
        check_error(big, 413, "request_too_large", "4096")

    on_app(tmp_path, test, max_body_bytes=4096)


def test_a_key_comes_in_either_header(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        check_error(await client.post("/v1/messages", json=ASKED), 401, "authentication_error", "x-api-key")
        wrong = {"x-api-key": "sk-wrong"}
        check_error(await client.post("/v1/messages", json=ASKED, headers=wrong), 401, "authentication_error", "known")
        for headers in ({"x-api-key": "sk-free"}, {"authorization": "Bearer sk-free"}):
            assert (await client.post("/v1/messages", json=ASKED, headers=headers)).status_code == 200

    on_app(tmp_path, test, auth=KEYS)


def test_tokens_are_counted_and_models_listed(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        asked = {key: ASKED[key] for key in ("model", "messages")}
        counted = (await client.post("/v1/messages/count_tokens", json=asked)).json()
        usage = (await client.post("/v1/messages", json=ASKED)).json()["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
        headers = {"anthropic-version": "2023-06-01"}
        models = (await client.get("/v1/models", headers=headers)).json()
        assert {model["id"] for model in models["data"]} >= {"fake"}
        assert models["data"][0]["type"] == "model"
        one = await client.get("/v1/models/nothing", headers=headers)
        check_error(one, 404, "not_found_error", "nothing")

    on_app(tmp_path, test)


def test_what_is_not_done_is_named_in_the_answer(tmp_path: Path) -> None:
    odd = {
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "shiny": {"a": 1},
        "metadata": {"user_id": "u"},
        "mcp_servers": [{"type": "url", "name": "x", "url": "https://example.org"}],
        "container": "c",
        "fallbacks": [{"model": "other"}],
    }

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        found = (await client.post("/v1/messages", json=ASKED | odd)).json()["warnings"]
        for warning, word in zip(
            found, ("web_search_20250305", "shiny", "mcp_servers", "container", "fallbacks"), strict=True
        ):
            assert word in warning
        started = sse(await client.post("/v1/messages", json=ASKED | odd | {"stream": True}))[0]
        assert started["message"]["warnings"] == found

    on_app(tmp_path, test)


def test_messages_become_those_of_a_chat() -> None:
    system = [text("x-anthropic-billing-header: cc=1"), text("Be brief.", cache_control={"type": "ephemeral"})]
    call = {"type": "tool_use", "id": "toolu_abc", "name": "f", "input": {"a": 1}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "toolu_abc", "content": [text("one"), text("two")]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_abc", "content": "gone", "is_error": True}
    messages = [
        user(text("Hello.")),
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": [thought, text("I call."), call]},
        user(result, failed, text("And now?")),
        {"role": "system", "content": "Note this."},
    ]
    assert told(system=system, messages=messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello.\nGo on."},
        {
            "role": "assistant",
            "content": "I call.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "abc", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "tool_call_id": "abc", "content": "one\ntwo"},
        {"role": "tool", "tool_call_id": "abc", "content": "Error: gone"},
        {"role": "user", "content": "And now?\nNote this."},
    ]
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "body"}}
    assert told(messages=[user(plain)])[0]["content"] == "T\nbody"


def test_options_become_those_of_a_chat() -> None:
    plain = anthropic_chat(request(tools=[TOOL, {"type": "bash_20250124", "name": "bash"}]), thinks=True)
    assert plain.tools is not None
    assert [tool.function.name for tool in plain.tools] == ["f"]
    assert (plain.wanted_tokens, plain.thinking_token_budget, plain.wants_thoughts) == (6, None, None)
    assert anthropic_chat(request(tools=[TOOL], tool_choice={"type": "any"}), thinks=False).tool_choice == "required"
    named = anthropic_chat(request(tools=[TOOL], tool_choice={"type": "tool", "name": "f"}), thinks=False)
    assert named.tool_choice.function.name == "f"  # type: ignore[union-attr]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert anthropic_chat(request(thinking=thinking), thinks=True).thinking_token_budget == 1024
    assert anthropic_chat(request(thinking=thinking), thinks=False).thinking_token_budget is None
    off = anthropic_chat(request(thinking={"type": "disabled"}), thinks=True)
    assert off.chat_template_kwargs == {"enable_thinking": False}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    held = anthropic_chat(
        request(output_config={"effort": "max", "format": {"type": "json_schema", "schema": schema}}), thinks=True
    )
    assert held.response_format is not None
    assert (held.effort, held.response_format.type) == ("high", "json_schema")
    prefilled = anthropic_chat(
        request(messages=[*CHAT["messages"], {"role": "assistant", "content": "The answer is"}]), thinks=False
    )
    assert prefilled.continue_final_message
    with pytest.raises(InvalidRequest, match="needs a name"):
        anthropic_chat(request(tools=[TOOL], tool_choice={"type": "tool"}), thinks=False)


def test_parts_become_blocks_and_the_events_build_the_same_blocks() -> None:
    blocks = Blocks(iter("abc").__next__)
    parts = [
        Parts(reasoning="Hm"),
        Parts(reasoning="m."),
        Parts("I ", calls=[]),
        Parts("call."),
        Parts(calls=[CallDelta(0, "f", '{"a"')]),
        Parts(calls=[CallDelta(0, None, ": 1}"), CallDelta(1, "g", "{}")]),
    ]
    events = [event for part in parts for event in blocks.feed(part)] + list(blocks.close())
    assert [block["type"] for block in blocks.blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks.blocks[0]["thinking"] == "Hmm."
    assert blocks.blocks[2] == {"type": "tool_use", "id": "toolu_a", "name": "f", "input": {"a": 1}}
    assert blocks.blocks[3]["input"] == {}
    kinds = [event["type"] for event in events]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert [event["index"] for event in events] == sorted(event["index"] for event in events)
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert starts[2]["input"] == {}
    pieces = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"a": 1}{}'


def test_a_call_that_was_cut_short_is_shown_as_it_is() -> None:
    blocks = Blocks()
    list(blocks.feed(Parts(calls=[CallDelta(0, "f", '{"a": "b')])))
    list(blocks.close())
    assert blocks.blocks[0]["input"] == {"INVALID_JSON": '{"a": "b'}


def test_a_model_without_a_template_is_an_error_in_words(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        response = await client.post("/v1/messages", json=ASKED | {"model": "plain"})
        check_error(response, 400, "invalid_request_error", "no chat template")

    on_app(tmp_path, test, make_card(tmp_path / "plain", "plain", chat_template=None))


def test_thoughts_are_blocks_of_their_own_that_can_be_sent_back(tmp_path: Path) -> None:
    """The fake model says what its prompt says, here after an opening mark that the template has written."""
    template = "{{ messages[0].content }}{% if false %}</think>{% endif %}<think>"
    spoken = "hm</think>yes"
    asked = {"model": "thinks", "messages": [user(text(spoken))], "max_tokens": len(spoken)}

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        whole = (await client.post("/v1/messages", json=ASKED | asked)).json()
        thought, answer = whole["content"]
        assert (thought["type"], thought["thinking"], answer) == ("thinking", "hm", text("yes"))
        assert thought["signature"]
        events = sse(await client.post("/v1/messages", json=ASKED | asked | {"stream": True}))
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        kinds = list(dict.fromkeys(delta["type"] for delta in deltas))
        assert kinds == ["thinking_delta", "signature_delta", "text_delta"]
        hidden = ASKED | asked | {"thinking": {"type": "adaptive", "display": "omitted"}}
        assert (await client.post("/v1/messages", json=hidden)).json()["content"] == [text("yes")]
        back = [*asked["messages"], {"role": "assistant", "content": whole["content"]}, user(text("go on"))]
        assert (await client.post("/v1/messages", json=ASKED | asked | {"messages": back})).status_code == 200

    on_app(tmp_path, test, make_card(tmp_path / "thinks", "thinks", chat_template=template, eos_token_ids=()))
