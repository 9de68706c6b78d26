"""What `/v1/responses` keeps: its bounds in bytes, shares of keys, and responses that end in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_builders import eventually, make_admin, running_service

from dovetail.config import Config
from dovetail.errors import Overloaded, ResponseNotFound
from dovetail.gateway.admin.admin import Admin
from dovetail.gateway.app import make_app
from dovetail.gateway.http.responses.endpoints import ResponsesResponse
from dovetail.gateway.http.responses.items import ResponseRecord
from dovetail.gateway.http.responses.store import ResponseStore, StoredResponse

Test = Callable[[httpx.AsyncClient, Admin], Awaitable[None]]
KEYS = {"auth": {"keys": [{"name": name, "key": f"sk-{name}"} for name in ("a", "b")]}}


def stored(id: str, owner: str = "a", size: int = 0) -> StoredResponse:
    return StoredResponse(id, owner, background=False, record=b"x" * size, items=b"", conversation=b"")


def kept(store: ResponseStore, owner: str) -> list[str]:
    return list(store._shares[owner].responses) if owner in store._shares else []


def test_a_key_that_fills_the_store_loses_its_own_oldest_only() -> None:
    store = ResponseStore(max_bytes=100_000)
    store.add(stored("mine", "b", 30_000))
    for number in range(50):
        store.add(stored(f"{number}", "a", 20_000))
    assert kept(store, "b") == ["mine"]
    assert kept(store, "a") == ["47", "48", "49"]
    assert store.size_bytes <= 100_000
    with pytest.raises(ResponseNotFound):
        store.get("mine", "a")


def test_the_number_of_responses_is_shared_like_their_bytes() -> None:
    store = ResponseStore(max_responses=4)
    store.add(stored("mine", "b"))
    for number in range(10):
        store.add(stored(f"{number}", "a"))
    assert (kept(store, "b"), kept(store, "a")) == (["mine"], ["7", "8", "9"])


def test_a_response_that_is_kept_twice_is_counted_once() -> None:
    store = ResponseStore()
    for size in (5000, 9000, 2000):
        store.add(stored("one", size=size))
    assert store.size_bytes == store.get("one", "a").size_bytes
    store.remove("one", "a")
    assert (store.size_bytes, store._count) == (0, 0)


def on_server(folder: Path, test: Test, config: dict[str, Any] | None = None) -> None:
    async def run() -> None:
        async with running_service(folder) as service:
            await service.link.supervisors["cpu-0"].greeted
            service.is_ready = True
            admin = make_admin(service, Config.model_validate(config or {}))
            transport = httpx.ASGITransport(make_app(admin))  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as http:
                await asyncio.wait_for(test(http, admin), 60)
            await eventually(lambda: service.unfinished == 0)

    asyncio.run(run())


async def respond(client: httpx.AsyncClient, key: str = "", **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer sk-{key}"} if key else {}
    body = {"model": "fake", "input": "ab", "max_output_tokens": 4} | options
    return await client.post("/v1/responses", json=body, headers=headers)


def hold_ends(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Responses that are generated do not end before this is set."""
    finished, opened = ResponsesResponse._finished_record, asyncio.Event()

    async def slowly(self: ResponsesResponse) -> ResponseRecord:
        await opened.wait()
        return await finished(self)

    monkeypatch.setattr(ResponsesResponse, "_finished_record", slowly)
    return opened


def fill(shape: str, size: int) -> dict[str, Any]:
    """An input of so many bytes that are no text of a message."""
    if shape == "field":
        return {"input": [{"role": "user", "content": "ab", "note": "😀" + "x" * size}]}
    if shape == "deep field":
        return {"input": [{"role": "user", "content": "ab", "note": [{"a": "x" * size}]}]}
    if shape == "part":
        return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "ab", "note": "x" * size}]}]}
    if shape == "reasoning":
        thoughts = {"type": "reasoning", "content": [], "encrypted_content": "x" * size}
        return {"input": [thoughts, {"role": "user", "content": "ab"}]}
    return {"metadata": {"note": "x" * size}}


@pytest.mark.parametrize("shape", ["field", "deep field", "part", "reasoning", "metadata"])
def test_every_byte_that_is_kept_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    store = ResponseStore(max_bytes=250_000)
    monkeypatch.setattr("dovetail.gateway.http.responses.endpoints.ResponseStore", lambda: store)

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        mine = (await respond(client, "b")).json()["id"]
        ids = [(await respond(client, "a", **fill(shape, 100_000))).json()["id"] for _ in range(4)]
        assert kept(store, "a") == ids[-2:]
        assert 200_000 < store.size_bytes <= 250_000
        assert kept(store, "b") == [mine]
        shown = await client.get(f"/v1/responses/{ids[-1]}/input_items", headers={"authorization": "Bearer sk-a"})
        assert ("x" * 100_000 in shown.text) == (shape != "metadata")
        again = await respond(client, "b", previous_response_id=mine)
        assert (again.status_code, again.json()["previous_response_id"]) == (200, mine)

    on_server(tmp_path, test, KEYS)


def test_a_response_that_has_ended_is_not_cancelled_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore()
    monkeypatch.setattr("dovetail.gateway.http.responses.endpoints.ResponseStore", lambda: store)
    opened = hold_ends(monkeypatch)

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        asked = (await respond(client, background=True)).json()
        await eventually(lambda: admin.service.metrics.generation_tokens.labels("fake")._value.get() >= 4)
        await asyncio.sleep(0.1)
        cancels = [asyncio.create_task(client.post(f"/v1/responses/{asked['id']}/cancel")) for _ in range(2)]
        await asyncio.sleep(0.1)
        opened.set()
        assert [(await cancel).json()["status"] for cancel in cancels] == ["completed", "completed"]
        assert (await client.post(f"/v1/responses/{asked['id']}/cancel")).json()["status"] == "completed"
        assert store.size_bytes == store.get(asked["id"], "").size_bytes

    on_server(tmp_path, test)


def test_what_cannot_be_admitted_is_refused_when_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = hold_ends(monkeypatch)

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        admin.service.limits = replace(admin.service.limits, max_queue=3)
        asked = [await respond(client, background=True) for _ in range(5)]
        assert [one.status_code for one in asked] == [200, 200, 200, 503, 503]
        assert asked[-1].json()["error"]["code"] == "queue_full"
        opened.set()
        for one in asked[:3]:
            path = f"/v1/responses/{one.json()['id']}"
            assert (await client.post(f"{path}/cancel")).json()["status"] in ("cancelled", "completed")
            assert (await client.get(path)).json()["error"] is None

    on_server(tmp_path, test)


def test_running_responses_hold_no_more_than_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dovetail.gateway.http.responses.background.BackgroundResponses.__init__.__defaults__", (250_000,)
    )
    opened = hold_ends(monkeypatch)

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        options = {"background": True, **fill("field", 100_000)}
        asked = [await respond(client, key, **options) for key in ("a", "a", "b", "b")]
        assert [one.status_code for one in asked] == [200, 503, 200, 503]
        assert asked[1].json()["error"]["code"] == "background_full"
        opened.set()
        for key, one in (("a", asked[0]), ("b", asked[2])):
            header = {"authorization": f"Bearer sk-{key}"}
            assert (await client.delete(f"/v1/responses/{one.json()['id']}", headers=header)).status_code == 200

    on_server(tmp_path, test, KEYS)


def test_a_background_response_is_kept_though_too_many_answers_are_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.gateway.http.responses.endpoints.INLINE_REPORTS", -1)
    monkeypatch.setattr("dovetail.gateway.http.responses.endpoints._WRITE_RETRY_S", 0.01)

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        executor, refusals = admin.service.models.executors.write, iter(range(2))
        run = executor.run

        async def full(work: Callable[[], Any]) -> Any:
            if next(refusals, None) is not None:
                raise Overloaded("too many texts are waiting to be read", code="texts_full")
            return await run(work)

        monkeypatch.setattr(executor, "run", full)
        asked = (await respond(client, background=True)).json()
        await eventually(lambda: admin.service.unfinished == 0)
        shown = await client.get(f"/v1/responses/{asked['id']}")
        assert (shown.status_code, shown.json()["status"]) in [(200, "completed"), (200, "incomplete")], shown.text

    on_server(tmp_path, test)
