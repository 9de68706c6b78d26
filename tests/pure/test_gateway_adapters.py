"""Adapters at the gateway: with whom they come and go, what a file says of them, on which devices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_builders import make_admin, running_service
from test_gateway_admin import FakeFile, ask, on_admin

from dovetail.cli.ps import show
from dovetail.gateway.admin.admin import Admin


async def load_adapter(client: httpx.AsyncClient, name: str, path: str, **more: Any) -> httpx.Response:
    return await client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def test_adapters_come_with_a_model_that_is_added_and_go_with_it(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        entry = {"name": "more", "source": "fake", "adapters": {"one": "one-folder"}}
        assert (await client.post("/api/models", json=entry | {"adapters": {"one": "bad"}})).status_code == 400
        assert (await client.post("/api/models", json=entry)).status_code == 201
        assert (await load_adapter(client, "two", "two-folder", base_model_name="more")).status_code == 200
        assert (await load_adapter(client, "three", "fake")).status_code == 200  # says itself what it is for
        listed = {one["id"]: one["parent"] for one in (await client.get("/v1/models")).json()["data"]}
        assert {name: listed[name] for name in ("one", "two", "three")} == {
            "one": "more",
            "two": "more",
            "three": "fake",
        }
        answer = await ask(client, "two")
        assert (answer.status_code, answer.json()["model"]) == (200, "two")
        assert (await client.patch("/api/models/two", json={"keep_alive": 1})).status_code == 409
        assert (await client.delete("/api/models/two")).status_code == 200
        assert (await ask(client, "two")).status_code == 404
        assert (await client.delete("/api/models/more")).status_code == 200
        assert (await ask(client, "one")).status_code == 404
        assert (await ask(client, "three")).status_code == 200

    on_admin(tmp_path, test)


def test_what_the_file_says_of_adapters_holds_when_it_is_read_again(tmp_path: Path) -> None:
    file = FakeFile(tmp_path)

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        async def names() -> set[str]:
            return {one["id"] for one in (await client.get("/v1/models")).json()["data"] if one["parent"]}

        await load_adapter(client, "mine", "folder", base_model_name="fake")
        for adapters in ({"one": "x"}, {"two": "y"}, {}):
            file.raw = {"models": {"fake": {"source": "fake", "adapters": adapters}}}
            await admin.reload()
            assert await names() == {"mine", *adapters}

    on_admin(tmp_path, test, file=file)


def test_ps_shows_adapters_with_their_model_and_what_their_requests_got(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        await load_adapter(client, "mine", "folder", base_model_name="fake")
        for state in ("absent", "idle"):
            status = (await client.get("/api/ps")).json()
            show(status | {"models": (await client.get("/api/models")).json()["data"]})
            (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "(adapter of fake)" in line]
            assert {"mine", state} <= set(row)
            assert (await ask(client, "mine")).status_code == 200

    on_admin(tmp_path, test)


def test_where_there_are_gpus_only_adapters_are_loaded_as_anywhere(tmp_path: Path) -> None:
    async def run() -> None:
        async with running_service(tmp_path, device="cuda:0") as service:
            await make_admin(service).add_adapter("a", "folder", "fake", in_place=False)
            (added,) = service.models.adapters_of("fake")
            assert added.name == "a"

    asyncio.run(run())
