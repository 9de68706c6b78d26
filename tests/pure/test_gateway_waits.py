"""A cold start that can be seen: comments in a held stream, headers, and the usage where those went out too early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_builders import make_card
from test_gateway_http import TEXT, on_app

from dovetail.errors import EngineFailed
from dovetail.gateway.http import waits
from dovetail.gateway.http.waits import Standing
from dovetail.gateway.service import Service

STREAM = TEXT | {"stream": True, "stream_options": {"include_usage": True}}
HEADERS = ("x-dovetail-queue-ms", "x-dovetail-load-ms", "x-dovetail-first-token-ms")
REAL_COMMENT = waits.standing_comment
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "FIRST_S", 0.02)
    monkeypatch.setattr(waits, "EVERY_S", 0.02)


class Gate:
    """Keeps the fake worker waiting until enough was said."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, is_enough: Callable[[set[Standing]], bool]
    ) -> None:
        self._file = folder / "wait"
        self._file.touch()
        self._is_enough = is_enough
        self._said: set[Standing] = set()
        self.passed = asyncio.Event()
        monkeypatch.setattr(waits, "standing_comment", self._note)

    def _note(self, standing: Standing) -> bytes:
        self._said.add(standing)
        if self._is_enough(self._said):
            self.passed.set()
            self._file.unlink(missing_ok=True)
        return REAL_COMMENT(standing)


def read(response: httpx.Response) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Comments and events."""
    pieces = response.text.split("\n\n")
    comments = [json.loads(piece.removeprefix(": dovetail ")) for piece in pieces if piece.startswith(":")]
    events = [json.loads(piece[6:]) for piece in pieces if piece.startswith("data: {")]
    return comments, events


@pytest.mark.usefixtures("quick")
def test_a_stream_that_is_held_says_what_it_waits_for_and_then_what_that_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = Standing("loading", done_bytes=250, total_bytes=1000)
    card = make_card(tmp_path, "cold", size_bytes=1000)
    Gate(tmp_path, monkeypatch, lambda said: loading in said)

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        response = await client.post("/v1/completions", json=STREAM | {"model": "cold"})
        comments, events = read(response)
        assert {"state": "loading", "done_bytes": 250, "total_bytes": 1000} in comments
        assert len([each for each in comments if each["state"] == "loading"]) <= 2  # said again only when it is news
        last = comments[-1]
        assert last.pop("state") == "speaking"
        assert 0 < last["load_ms"] <= last["first_token_ms"]
        assert 0 <= last["queue_ms"] <= last["first_token_ms"]
        assert events[-1]["usage"]["dovetail"] == last
        assert "".join(each["choices"][0]["text"] for each in events[:-1]) == "hi hi "
        assert not any(name in response.headers for name in HEADERS)  # they were gone by then

    on_app(tmp_path, test, card)


def test_what_comes_at_once_is_as_it_was_but_for_headers_that_say_the_times(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        chat = {"model": "fake", "messages": USER, "max_tokens": 3}
        for path, body in (("/v1/completions", STREAM), ("/v1/chat/completions", chat)):
            response = await client.post(path, json=body)
            assert ": dovetail" not in response.text
            assert "queue_ms" not in response.text
            queue, load, first = (float(response.headers[name]) for name in HEADERS)
            assert 0 <= queue <= first
            assert load == 0
        response = await client.post("/v1/responses", json={"model": "fake", "input": "hi", "max_output_tokens": 3})
        assert all(name in response.headers for name in HEADERS)

    on_app(tmp_path, test)


@pytest.mark.usefixtures("quick")
def test_those_who_wait_for_a_place_are_told_their_number_unless_they_may_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal has a status of its own, which a comment would have spoilt."""
    card = make_card(tmp_path, "slow")
    Gate(tmp_path, monkeypatch, lambda said: {1, 2} <= {each.position for each in said})

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = STREAM | {"model": "slow"}
        strict = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "1000"}
        responses = await asyncio.gather(
            client.post("/v1/completions", json=body),
            client.post("/v1/completions", json=body),
            client.post("/v1/completions", json=body, headers=strict),
        )
        first, second, third = (read(response)[0] for response in responses)
        assert {one["position"] for one in (*first, *second) if one["state"] == "queued"} >= {1, 2}
        assert not [one for one in third if one["state"] == "queued"]

    on_app(tmp_path, test, card)


@pytest.mark.usefixtures("quick")
def test_openais_client_takes_a_held_stream_as_any_other(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        api = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=client, max_retries=0)
        stream = await api.completions.create(model="cold", prompt="hi ", max_tokens=6, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hi hi "
        events = await api.responses.create(model="cold", input="hi", max_output_tokens=3, stream=True)
        assert [event async for event in events][-1].type == "response.incomplete"

    on_app(tmp_path, test, make_card(tmp_path, "cold", size_bytes=1000))


@pytest.mark.usefixtures("quick")
def test_a_load_that_fails_after_a_comment_ends_the_stream_with_an_error_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = make_card(tmp_path, "cold", size_bytes=1000)

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        gate = Gate(tmp_path, monkeypatch, bool)
        held = asyncio.create_task(client.post("/v1/completions", json=STREAM | {"model": "cold"}))
        await gate.passed.wait()
        service.cluster.drop("cold", EngineFailed("the weights are truncated"))
        comments, events = read(await held)
        assert comments
        assert "truncated" in events[-1]["error"]["message"]

    on_app(tmp_path, test, card)
