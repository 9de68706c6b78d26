"""Tools of MCP servers, called by this server: real servers of the official package, over pipes and over HTTP, and a
real server of ours with a model that follows a script."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from etcd_fixture import free_port

from dovetail.config import Config, McpConfig, parse_config
from dovetail.errors import ConfigError, Overloaded
from dovetail.gateway.http.responses.builder import OutputBuilder
from dovetail.gateway.http.responses.items import McpCall
from dovetail.gateway.http.responses.request import Item, responses_messages
from dovetail.gateway.mcp import servers as mcp_servers
from dovetail.gateway.mcp.records import Called
from dovetail.gateway.mcp.servers import McpServers, check_mcp

pytest.importorskip("mcp", reason="the package mcp is not installed (extra: mcp)")

SERVER = Path(__file__).with_name("mcp_server.py")
SCRIPTED = Path(__file__).parents[2] / "tools" / "scripted_server.py"
COMMAND = [sys.executable, str(SERVER)]
ALL = ["keep", "limits", "repeat", "wait", "fail", "end"]
NOTES = {"command": COMMAND, "tools": ALL, "timeout": "60s", "max_result": "1KiB"}

Test = Callable[[McpServers], Awaitable[None]]


def configured(**servers: Any) -> McpConfig:
    return parse_config({"mcp": {"servers": servers}}, "test").mcp


def on_servers(test: Test, **servers: Any) -> None:
    config = configured(**servers)

    async def run() -> None:
        found = McpServers(lambda: config)
        try:
            await asyncio.wait_for(test(found), 240)
        finally:
            found.close()

    asyncio.run(run())


@contextmanager
def over_http() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/", timeout=5)
                break
            except httpx.HTTPError:
                assert process.poll() is None, "the MCP server has ended"
                assert time.monotonic() < deadline, "the MCP server does not answer"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("transport", ["pipes", "http"])
def test_allowed_tools_are_listed_and_called(transport: str) -> None:
    async def test(servers: McpServers) -> None:
        assert [tool.name for tool in await servers.tools("notes")] == ["keep", "repeat"]
        keep = (await servers.tools("notes"))[0]
        assert (keep.description, keep.parameters["required"]) == ("Keep a note.", ["text"])
        assert await servers.call("notes", "keep", '{"text": "one"}') == Called("1 kept, the last: one")
        assert await servers.call("notes", "keep", '{"text": "two"}') == Called("2 kept, the last: two")
        assert await servers.call("notes", "end", "{}") == Called("the tool 'end' may not be called", is_error=True)

    if transport == "pipes":
        return on_servers(test, notes=NOTES | {"tools": ["keep", "repea*"]})
    with over_http() as url:
        on_servers(test, notes={"url": url, "tools": ["keep", "repea*"], "timeout": "60s"})


def test_what_goes_wrong_is_the_answer_of_the_call() -> None:
    async def test(servers: McpServers) -> None:
        async def failed(tool: str, arguments: str = "{}") -> str:
            called = await servers.call("notes", tool, arguments)
            assert called.is_error, called
            return called.text

        assert "no such note" in await failed("fail")
        assert await failed("keep", "[1]") == "the arguments are not a JSON object"
        assert "not a JSON object" in await failed("keep", '{"text"')
        assert "text" in await failed("keep", '{"wrong": 1}')
        long = await servers.call("notes", "repeat", '{"text": "ö", "count": 5000}')
        assert long.text.startswith("ö" * 512 + "\n[cut off: 1024 of 10000 bytes]")
        assert await failed("end")  # the connection is closed
        assert (await servers.call("notes", "keep", '{"text": "anew"}')).text == "1 kept, the last: anew"
        assert "not configured" in (await servers.call("other", "keep", "{}")).text

    on_servers(test, notes=NOTES)


def test_a_call_that_takes_too_long_is_given_up() -> None:
    async def test(servers: McpServers) -> None:
        assert (await servers.call("notes", "keep", '{"text": "a"}')).text.startswith("1 kept")
        called = await servers.call("notes", "wait", '{"seconds": 100}')
        assert called == Called("it did not answer within 3 s", is_error=True)

    on_servers(test, notes=NOTES | {"timeout": "3s"})


def test_a_server_that_is_not_there_is_a_503_that_says_so() -> None:
    async def test(servers: McpServers) -> None:
        for name, words in (("gone", "'no-such-command' is not there"), ("dead", ""), ("far", "")):
            with pytest.raises(Overloaded, match=f"the MCP server '{name}' cannot be used now: ") as raised:
                await servers.tools(name)
            assert words in raised.value.message
            assert raised.value.code == "mcp_unavailable"

    on_servers(
        test,
        gone={"command": ["no-such-command"], "tools": ["*"]},
        dead={"command": [sys.executable, "-c", ""], "tools": ["*"]},
        far={"url": f"http://127.0.0.1:{free_port()}/mcp", "tools": ["*"]},
    )


def test_a_command_gets_its_own_environment_and_none_of_the_helpers_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_SECRET", "x")

    async def test(servers: McpServers) -> None:
        assert (await servers.call("notes", "limits", "{}")).text == "True k None"

    on_servers(test, notes=NOTES | {"env": {"NOTES_KEY": "k"}})


def test_an_answer_beyond_the_helpers_memory_ends_the_helper_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "_MEMORY_BYTES", 96 << 20)

    async def test(servers: McpServers) -> None:
        assert (await servers.call("notes", "keep", '{"text": "a"}')).text.startswith("1 kept")
        flood = await servers.call("notes", "repeat", json.dumps({"text": "x" * 1000, "count": 200_000}))
        assert flood.is_error, flood.text[:100]
        assert (await servers.call("notes", "keep", '{"text": "b"}')).text == "1 kept, the last: b"

    on_servers(test, notes=NOTES)


def test_the_configuration_names_what_is_wrong_with_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": ["*"]}, "either command or url"),
        ({"command": ["a"], "url": "http://x", "tools": ["*"]}, "either command or url"),
        ({"command": ["a"], "tools": []}, "mcp.servers.notes.tools"),
        ({"command": ["a"], "tools": ["*"], "headers": {"a": "b"}}, "headers are sent to a url"),
        ({"url": "http://x", "tools": ["*"], "env": {"a": "b"}}, "env is a command's"),
        ({"url": "file:///x", "tools": ["*"]}, "mcp.servers.notes.url"),
        ({"command": ["a"], "tools": ["*"], "timeout": 5}, "5s"),
        ({"command": ["a"], "tools": ["*"], "keys": ["nobody"]}, "'nobody' is no name in auth.keys"),
    ]
    for server, words in wrong:
        with pytest.raises(ConfigError, match=words):
            configured(notes=server)
    with pytest.raises(ConfigError, match="needs a name"):
        configured(**{"a b": {"command": ["a"], "tools": ["*"]}})
    assert Config().mcp.servers == {}
    monkeypatch.setattr(mcp_servers.importlib.util, "find_spec", lambda name: None)
    check_mcp(Config())
    with pytest.raises(ConfigError, match=r"pip install 'dovetail\[mcp\]'"):
        check_mcp(Config(mcp=configured(notes=NOTES)))


ERROR = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "no such note"}]}


def test_calls_that_were_made_are_told_to_the_model() -> None:
    items = [
        Item(role="user", content="look"),
        Item(type="mcp_list_tools", server_label="notes", id="l"),
        Item(type="mcp_call", id="m1", server_label="notes", name="keep", arguments='{"text": "a"}', output="kept"),
        Item(type="mcp_call", id="m2", server_label="notes", name="fail", arguments="{}", error=ERROR),
        Item(type="mcp_call", id="m3", server_label="notes", name="fail", arguments="{}", error="gone"),
    ]
    told = [message.model_dump(exclude_none=True) for message in responses_messages(items)]
    assert [(one["role"], one.get("content")) for one in told] == [
        ("user", "look"), ("assistant", None), ("tool", "kept"), ("assistant", None), ("tool", "no such note"),
        ("assistant", None), ("tool", "gone"),
    ]  # fmt: skip
    assert told[1]["tool_calls"][0]["function"] == {"name": "notes.keep", "arguments": '{"text": "a"}'}


def test_a_call_that_was_cut_short_is_not_made() -> None:
    builder = OutputBuilder()
    call = McpCall(id="m", server_label="notes", name="keep", arguments='{"te')
    list(builder._begin(call))
    last = list(builder.close("incomplete"))[-1]
    assert (last["type"], call.status, builder.take_calls()) == ("response.output_item.done", "incomplete", [])


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose model follows a script."""
    folder = tmp_path_factory.mktemp("scripted")
    auth = {"keys": [{"name": "team", "key": "team-key"}, {"name": "other", "key": "other-key"}]}
    servers = {"notes": NOTES, "gone": {"command": ["no-such-command"], "tools": ["*"]}}
    servers["mine"] = NOTES | {"keys": ["other"]}
    (folder / "dovetail.yaml").write_text(yaml.safe_dump({"auth": auth, "mcp": {"servers": servers, "max_calls": 3}}))
    command = [sys.executable, str(SCRIPTED), str(folder), "--config", str(folder / "dovetail.yaml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(60)


def client_of(url: str, key: str = "team-key") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=240, max_retries=0)


TOOL: dict[str, Any] = {"type": "mcp", "server_label": "notes", "require_approval": "never"}


def test_a_response_goes_on_with_what_tools_came_to(scripted: str) -> None:
    client = client_of(scripted)
    asked: dict[str, Any] = {"model": "scripted", "tools": [TOOL], "max_output_tokens": 2000}
    question = 'Call notes.keep with {"text": "milk"}. Call notes.fail with {}.'
    answer = client.responses.create(**asked, input=question)
    assert [item.type for item in answer.output] == ["mcp_list_tools", "mcp_call", "mcp_call", "message"]
    listed, kept, failed, _ = answer.output
    assert {tool.name for tool in listed.tools} == set(ALL)  # type: ignore[union-attr]
    assert (kept.server_label, kept.name, kept.arguments) == ("notes", "keep", '{"text": "milk"}')  # type: ignore[union-attr]
    assert kept.output.endswith("the last: milk")  # type: ignore[union-attr]
    assert (failed.output, failed.status) == (None, "failed")  # type: ignore[union-attr]
    assert failed.error.type == "mcp_tool_execution_error"  # type: ignore[union-attr]
    assert "no such note" in answer.output_text
    assert answer.usage is not None
    again = client.responses.create(
        model="scripted", input="And then?", previous_response_id=answer.id, max_output_tokens=200
    )
    assert "no such note" in again.output_text  # of the calls that the conversation has

    names: list[str] = []
    with client.responses.stream(**asked, input=question) as stream:
        for event in stream:
            names.append(event.type)
        final = stream.get_final_response()
    assert final.output_text == answer.output_text
    assert [one for one in names if "mcp" in one and "delta" not in one] == [
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.done",
        "response.mcp_call.failed",
    ]
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 4


def test_the_number_of_calls_is_bounded_by_the_request_and_by_the_server(scripted: str) -> None:
    client = client_of(scripted)
    question = 'Call notes.keep with {"text": "a"}. ' * 5
    for limit, made in ((None, 3), (1, 1), (0, 0)):
        given = {} if limit is None else {"max_tool_calls": limit}
        answer = client.responses.create(model="scripted", input=question, tools=[TOOL], **given)  # type: ignore[call-overload]
        done = [item for item in answer.output if item.type == "mcp_call" and item.status == "completed"]
        assert len(done) == made, answer.output
        assert answer.status in ("completed", "incomplete")


def test_a_clients_own_call_ends_the_response(scripted: str) -> None:
    own = {"type": "function", "name": "shut", "parameters": {"type": "object", "properties": {}}}
    answer = client_of(scripted).responses.create(
        model="scripted",
        input='Call notes.keep with {"text": "a"}. Call shut with {}.',
        tools=[TOOL, own],  # type: ignore[list-item]
    )
    assert [item.type for item in answer.output] == ["mcp_list_tools", "mcp_call", "function_call"]


def test_servers_and_tools_that_are_not_there_or_not_allowed(scripted: str) -> None:
    def posted(key: str = "team-key", **tool: Any) -> httpx.Response:
        body = {"model": "scripted", "input": "hi", "tools": [TOOL | tool]}
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{scripted}/v1/responses", json=body, headers=headers, timeout=240)

    def warnings(answer: httpx.Response) -> str:
        assert answer.status_code == 200, answer.text
        return " ".join(answer.json()["warnings"])

    assert "no MCP server 'other' (there are: gone, notes); left out" in warnings(posted(server_label="other"))
    assert "no MCP server 'mine'" in warnings(posted(server_label="mine"))
    assert warnings(posted("other-key", server_label="mine")) == ""
    assert "has none of these tools" in warnings(posted(allowed_tools=["nothing"]))
    one = posted(allowed_tools={"tool_names": ["keep"]}).json()
    assert [tool["name"] for tool in one["output"][0]["tools"]] == ["keep"]
    gone = posted(server_label="gone")
    assert (gone.status_code, gone.json()["error"]["code"]) == (503, "mcp_unavailable")
    assert gone.headers["retry-after"]
    asks = posted(require_approval="always")
    assert (asks.status_code, asks.json()["error"]["param"]) == (400, "tools[0].require_approval")
    listed = httpx.get(f"{scripted}/v1/mcp/servers", headers={"authorization": "Bearer team-key"}, timeout=60).json()
    assert [one["name"] for one in listed["data"]] == ["gone", "notes"]


def test_a_result_beyond_the_context_is_not_shown_to_the_model(tmp_path: Path) -> None:
    """Held by the rounds alone; the request that led there is answered."""
    from dovetail.errors import ContextTooLong
    from dovetail.gateway.http.api import ChatRequest
    from dovetail.gateway.http.responses.request import ResponsesRequest
    from dovetail.gateway.http.responses.rounds import TOO_LONG, ToolRounds

    asked: list[ChatRequest] = []

    async def make_job(chat: ChatRequest) -> Any:
        asked.append(chat)
        if any("long" * 100 in message.text for message in chat.messages):
            raise ContextTooLong("too long", param="messages")
        return "job"

    servers = McpServers(lambda: configured(notes=NOTES))
    rounds = ToolRounds(servers, ResponsesRequest(input="go"), (), make_job)
    call = McpCall(id="m", server_label="notes", name="keep", arguments="{}", output="long" * 100)
    assert asyncio.run(rounds.next_job([call], [call], 5)) == "job"
    assert asked[-1].messages[-1].text == TOO_LONG
