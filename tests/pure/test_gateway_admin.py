"""Changing a running server: models that come and go, keys that may do it, a configuration that is read again."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from gateway_builders import (
    LOCAL_TOKEN,
    FakeStore,
    byte_level_tokenizer,
    eventually,
    make_admin,
    make_card,
    running_service,
)

from dovetail.config import Config, parse_config
from dovetail.errors import ConfigError, ModelNotFound
from dovetail.gateway.admin.admin import Admin
from dovetail.gateway.app import make_app
from dovetail.gateway.models import ConfiguredModels, FixedCatalogue, NamedAdapter
from dovetail.types import AdapterRef, ModelCard

TEXT = {"model": "fake", "prompt": "ab", "max_tokens": 4}
LOCAL = {"authorization": f"Bearer {LOCAL_TOKEN}"}
Test = Callable[[httpx.AsyncClient, Admin], Awaitable[None]]


class FakeFile:
    """A configuration file that a test writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raw: dict[str, Any] = {}

    def read(self) -> Config:
        return parse_config(self.raw, "dovetail.yaml")

    def offer(self, config: Config) -> ConfiguredModels:
        there = {name: model for name, model in config.models.items() if not model.source.startswith("remote:")}
        for name, model in there.items():
            if model.source == "nowhere":
                raise ConfigError(f"dovetail.yaml: models.{name}.source: nowhere: no such folder")
        missing = tuple(config.models.keys() - there.keys())
        preload = tuple(name for name, model in config.models.items() if model.preload)
        cards = [make_card(self.folder, name) for name in there]
        adapters = [
            NamedAdapter(name, AdapterRef(one, source, "1"), source, 0, in_file=True)
            for name, model in there.items()
            for one, source in model.adapters.items()
        ]
        return ConfiguredModels(FixedCatalogue(cards), config.models, preload, missing, tuple(adapters))


def on_admin(
    folder: Path, test: Test, config: Mapping[str, Any] | None = None, client: str = "127.0.0.1", file: Any = None
) -> None:
    async def run() -> None:
        async with running_service(folder) as service:
            await service.link.supervisors["cpu-0"].greeted
            service.is_ready = True
            admin = make_admin(service, Config.model_validate(config or {}), file)
            transport = httpx.ASGITransport(make_app(admin), raise_app_exceptions=False, client=(client, 1))  # type: ignore[arg-type]
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=30, headers=LOCAL
            ) as http:
                await asyncio.wait_for(test(http, admin), 60)
            assert service.unfinished == 0

    asyncio.run(run())


def store_of(admin: Admin) -> FakeStore:
    store = admin._store
    assert isinstance(store, FakeStore)
    return store


async def ask(client: httpx.AsyncClient, model: str, **options: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=TEXT | {"model": model} | options)


async def states(client: httpx.AsyncClient) -> dict[str, Any]:
    return {model["name"]: model for model in (await client.get("/api/models")).json()["data"]}


def test_a_model_that_is_here_is_served_at_once_with_its_settings(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        assert (await ask(client, "new")).status_code == 404
        body = {
            "name": "new",
            "source": "fake",
            "slo": {"ttft": "2s"},
            "keep_alive": "1m",
            "aliases": ["nick"],
            "class": "be",
        }
        added = await client.post("/api/models", json=body)
        assert added.status_code == 201, added.text
        shown = added.json()
        assert (shown["state"], shown["tier"], shown["keep_alive"], shown["class"]) == ("absent", "disk", 60, "be")
        assert (await ask(client, "new")).json()["choices"][0]["text"] == "abab"
        assert (await ask(client, "nick")).json()["model"] == "new"
        assert (await states(client))["new"]["state"] == "idle"
        listed = {model["id"]: model["root"] for model in (await client.get("/v1/models")).json()["data"]}
        assert listed == {"fake": "fake", "broken": "broken", "new": "new", "nick": "new"}
        assert (await client.get("/v1/models/nick")).json()["id"] == "nick"

    on_admin(tmp_path, test)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"name": "fake", "source": "fake"}, 409, "name"),
        ({"name": "x", "source": "fake", "aliases": ["fake"]}, 409, "name"),
        ({"name": "x", "source": "fake", "aliases": ["x"]}, 409, "name"),
        ({"name": "../x", "source": "fake"}, 400, "name"),
        ({"name": "x", "source": "nowhere"}, 400, "source"),
        ({"name": "x"}, 400, "source"),
        ({"name": "x", "source": "fake", "keep_alive": "soon"}, 400, "keep_alive"),
        ({"name": "x", "source": "fake", "keepalive": 5}, 400, "keepalive"),
        ({"name": "x", "source": "fake", "slo": {"ttft": "x"}}, 400, "slo.ttft"),
        ({"name": "x", "source": "fake", "speculative": {"draft": "nobody"}}, 400, "speculative"),
    ],
)
def test_a_model_that_cannot_be_added_is_refused_by_name(
    tmp_path: Path, body: dict[str, Any], status: int, param: str
) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        response = await client.post("/api/models", json=body)
        assert response.status_code == status, response.text
        assert response.json()["error"]["param"] == param
        assert set(await states(client)) == {"fake", "broken"}

    on_admin(tmp_path, test)


def exploding(folder: Path, letters: int) -> Path:
    """A tokenizer that makes so many letters of one, three times over. Written by hand: the library would normalise its
    own tokens while it is made."""
    file = json.loads(byte_level_tokenizer().to_str())
    file["added_tokens"] = [token for token in file["added_tokens"] if not token["normalized"]]
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * letters}
    file["normalizer"] = {"type": "Sequence", "normalizers": [replace] * 3}
    (folder / "exploding.json").write_text(json.dumps(file))
    return folder / "exploding.json"


@pytest.mark.parametrize(
    ("kind", "says"),
    [("damaged", "cannot be read"), ("exploding", "tokens of"), ("endless", "1024 MiB beyond 64 times its file")],
)
def test_a_tokenizer_that_cannot_be_used_is_found_when_its_model_is_added(tmp_path: Path, kind: str, says: str) -> None:
    (tmp_path / "damaged.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    file = tmp_path / "damaged.json" if kind == "damaged" else exploding(tmp_path, 10 if kind == "exploding" else 2000)

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        store_of(admin).cards["odd"] = msgspec.structs.replace(make_card(tmp_path, "odd"), tokenizer_file=str(file))
        added = await client.post("/api/models", json={"name": "new", "source": "odd"})
        assert (added.status_code, added.json()["error"]["param"]) == (400, "source"), added.text
        assert "the tokenizer of 'new'" in added.json()["error"]["message"]
        assert says in added.json()["error"]["message"]
        store_of(admin).cards = {"odd": store_of(admin).cards["odd"]}
        store_of(admin).gate.set()
        assert (await client.post("/api/models", json={"name": "far", "source": "remote:odd"})).status_code == 202
        await eventually(lambda: admin.pulls.all()[0].error)
        assert admin.pulls.all()[0].state == "failed"
        assert set(await states(client)) == {"fake", "broken", "far"}

    on_admin(tmp_path, test)


def test_a_model_that_has_to_be_pulled_is_there_when_it_has_come(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        added = await client.post("/api/models", json={"name": "far", "source": "remote:far", "preload": True})
        assert added.status_code == 202, added.text
        assert (added.json()["state"], added.json()["tier"]) == ("absent", "remote")
        await eventually(lambda: admin.pulls.all()[0].done_bytes == 50)
        pulls = (await client.get("/api/pulls")).json()["data"]
        assert (pulls[0]["state"], pulls[0]["stage"], pulls[0]["total_bytes"]) == ("running", "download", 100)
        waiting = await ask(client, "far")
        assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "5")
        assert "download 50 %" in waiting.json()["error"]["message"]
        assert (await client.post("/api/models", json={"name": "far", "source": "fake"})).status_code == 409
        store_of(admin).gate.set()
        await eventually(lambda: "far" in admin.service.link.nodes["cpu-0"].instances)  # preloaded
        assert (await ask(client, "far")).status_code == 200
        assert (await client.get("/api/pulls")).json()["data"][0]["state"] == "done"

    on_admin(tmp_path, test)


def test_a_pull_that_fails_says_why_and_can_be_tried_again(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        store_of(admin).gate.set()
        await client.post("/api/models", json={"name": "far", "source": "remote:bad"})
        await eventually(lambda: admin.pulls.all()[0].is_over)
        shown = (await states(client))["far"]["pull"]
        assert (shown["state"], shown["error"]) == ("failed", "remote:bad: no such model")
        failed = await ask(client, "far")
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "pull_failed")
        assert (await client.post("/api/models", json={"name": "far", "source": "remote:good"})).status_code == 202
        await eventually(lambda: "far" not in admin.service.models.arriving())
        assert (await ask(client, "far")).status_code == 200

    on_admin(tmp_path, test)


def test_a_model_that_is_removed_while_it_comes_never_arrives(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        await client.post("/api/models", json={"name": "far", "source": "remote:far"})
        await eventually(lambda: admin.pulls.all()[0].stage)
        assert (await client.delete("/api/models/far")).status_code == 200
        await eventually(lambda: admin.pulls.all()[0].state == "cancelled")
        assert (await ask(client, "far")).status_code == 404

    on_admin(tmp_path, test)


@pytest.mark.parametrize("force", [False, True])
def test_a_model_removed_while_it_serves_finishes_or_says_so(tmp_path: Path, force: bool) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        running = [asyncio.create_task(ask(client, "fake", max_tokens=300)) for _ in range(3)]
        await eventually(lambda: admin.service.unfinished == 3)
        await eventually(lambda: admin.service.metrics.generation_tokens.labels("fake")._value.get() > 10)
        removed = await client.delete("/api/models/fake", params={"force": force})
        assert removed.json() == {"name": "fake", "unfinished": 3}
        assert (await ask(client, "fake")).status_code == 404
        assert set(await states(client)) == {"broken"}
        for response in await asyncio.gather(*running):
            if force:
                assert response.status_code == 404
                assert response.json()["error"]["message"] == "'fake' was removed while it answered"
            else:
                assert response.json()["choices"][0]["text"] == "ab" * 150
        await eventually(lambda: not admin.service.link.nodes["cpu-0"].instances)
        assert (await client.post("/api/models", json={"name": "fake", "source": "fake"})).status_code == 201
        assert (await ask(client, "fake")).status_code == 200

    on_admin(tmp_path, test)


def test_settings_change_while_a_model_is_served(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        await ask(client, "fake")
        change = {"slo": {"tpot": 0.5}, "aliases": ["a", "b"]}
        changed = (await client.patch("/api/models/fake", json=change)).json()
        assert (changed["slo"], changed["aliases"]) == ({"ttft": None, "tpot": 0.5}, ["a", "b"])
        changed = (await client.patch("/api/models/b", json={"slo": {"ttft": 2}, "aliases": ["b"]})).json()
        assert changed["slo"] == {"ttft": 2.0, "tpot": 0.5}
        assert (await ask(client, "a")).status_code == 404
        assert (await ask(client, "b")).status_code == 200
        for bad in ({"aliases": ["broken"]}, {"source": "x"}, {"keep_alive": "x"}):
            assert (await client.patch("/api/models/fake", json=bad)).status_code in (400, 409)
        assert (await client.patch("/api/models/none", json={})).status_code == 404
        assert "fake" in admin.service.link.nodes["cpu-0"].instances
        await client.patch("/api/models/fake", json={"keep_alive": 0})  # it is idle, so that it goes at once
        await eventually(lambda: "fake" not in admin.service.link.nodes["cpu-0"].instances)

    on_admin(tmp_path, test)


def test_models_are_loaded_and_unloaded_when_told(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        assert (await client.post("/api/models/fake/load")).json()["state"] == "ready"
        assert (await client.post("/api/models/broken/load")).status_code == 500
        assert (await client.post("/api/models/none/load")).status_code == 404
        running = asyncio.create_task(ask(client, "fake", max_tokens=300))
        await eventually(lambda: admin.service.unfinished)
        busy = await client.post("/api/models/fake/unload")
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "model_in_use")
        assert (await client.post("/api/models/fake/unload?force=yes")).status_code == 400
        assert (await client.post("/api/models/fake/unload?force=true")).json()["unfinished"] == 1
        assert (await running).json()["error"]["code"] == "model_unloaded"
        assert (await states(client))["fake"]["state"] == "absent"
        store_of(admin).in_host = {"fake"}
        for shown in ((await states(client))["fake"], (await client.get("/api/models/fake")).json()):
            assert (shown["state"], shown["tier"]) == ("host", "host")
        assert (await ask(client, "fake")).status_code == 200

    on_admin(tmp_path, test)


def test_the_tokenizer_of_a_model_that_has_left_goes_with_its_weights(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        assert (await ask(client, "fake")).status_code == 200
        fake = vars(admin.service.models.get("fake"))
        assert "tokenizer" in fake
        assert (await client.post("/api/models/fake/unload")).status_code == 200
        await eventually(lambda: "tokenizer" not in fake)
        assert (await ask(client, "fake")).status_code == 200

    on_admin(tmp_path, test, {"store": {"host_keep_alive": "50ms"}})


KEYS = {"auth": {"keys": [{"name": "tenant", "key": "sk-tenant"}, {"name": "boss", "key": "sk-boss", "admin": True}]}}


def test_only_admin_keys_change_the_server(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        tenant, boss = ({"authorization": f"Bearer sk-{name}"} for name in ("tenant", "boss"))
        for path in ("/api/models", "/api/pulls", "/api/ps", "/api/models/fake", "/metrics"):
            assert (await client.get(path)).status_code == 401
            assert (await client.get(path, headers=tenant)).status_code == 403
            assert (await client.get(path, headers=boss)).status_code == 200
        assert (await client.post("/api/models/fake/load", headers=boss)).status_code == 200
        for response in (
            await client.delete("/api/models/fake", headers=tenant),
            await client.patch("/api/models/fake", json={}, headers=tenant),
            await client.post("/api/models/fake/unload", headers=tenant),
            await client.get("/api/config", headers=tenant),
        ):
            assert response.status_code == 403, response.text
            assert response.json()["error"]["code"] == "admin_required"
        shown = (await client.get("/api/config", headers=boss)).text
        assert "boss" in shown
        assert "sk-" not in shown

    on_admin(tmp_path, test, KEYS)


def test_without_keys_only_this_machine_changes_the_server(tmp_path: Path) -> None:
    async def far(client: httpx.AsyncClient, admin: Admin) -> None:
        assert (await client.delete("/api/models/fake")).status_code == 403
        assert (await ask(client, "fake")).status_code == 200

    async def near(client: httpx.AsyncClient, admin: Admin) -> None:
        for header in ({"authorization": ""}, {"authorization": "Bearer none"}, {"sec-fetch-site": "cross-site"}):
            assert (await client.post("/api/models/fake/unload", headers=header)).status_code == 403
        assert (await client.get("/api/config", headers={"authorization": ""})).status_code == 403
        assert (await client.get("/api/ps", headers={"authorization": ""})).status_code == 200
        assert (await client.post("/api/models/fake/unload")).status_code == 200

    async def stranger(client: httpx.AsyncClient, admin: Admin) -> None:
        """Sees that a model is there, not where it is from."""
        added = await client.post("/api/models", json={"name": "new", "source": "fake"})
        assert (added.status_code, added.json()["source"]) == (201, "fake")
        shown = (await client.get("/api/models/new", headers={"authorization": ""})).json()
        assert (shown["name"], shown["source"]) == ("new", "")
        assert all(
            model["source"] == ""
            for model in (await client.get("/api/models", headers={"authorization": ""})).json()["data"]
        )

    on_admin(tmp_path, far, client="10.0.0.7")
    on_admin(tmp_path, near, client="::1")
    on_admin(tmp_path, stranger)


def test_a_file_that_is_read_again_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    file = FakeFile(tmp_path)

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        await client.post("/api/models", json={"name": "added", "source": "fake"})
        running = asyncio.create_task(ask(client, "fake", max_tokens=300))
        await eventually(lambda: admin.service.unfinished)
        file.raw = {
            "models": {"other": {"source": "x", "aliases": ["o"]}, "far": {"source": "remote:far"}},
            "server": {"port": 9, "max_queue": 7},
            "nodes": [{"threads": 1}],
        }
        reloaded = await client.post("/api/config/reload")
        assert reloaded.status_code == 200, reloaded.text
        assert reloaded.json()["needs_restart"] == ["server.port", "nodes"]
        assert reloaded.json()["config"]["server"]["port"] == 8000
        assert admin.service.limits.max_queue == 7
        assert set(await states(client)) == {"added", "other", "far"}
        assert (await ask(client, "o")).json()["model"] == "other"
        gone = await ask(client, "fake")
        assert (gone.status_code, "model 'fake' not found" in gone.text) == (404, True)  # its files are there still
        assert (await running).json()["choices"][0]["text"] == "ab" * 150
        await eventually(lambda: "fake" not in admin.service.link.nodes["cpu-0"].instances)
        pull = admin.pulls.all()[0]
        await client.post("/api/config/reload")
        assert admin.pulls.all() == [pull], "a pull that is under way is not begun again"
        file.raw = {"models": {"other": {"source": "x"}}}
        await client.post("/api/config/reload")
        assert pull.is_cancelled
        assert (await ask(client, "o")).status_code == 404

    on_admin(tmp_path, test, file=file)


def test_a_reload_is_whole_though_the_file_names_models_that_are_not_here(tmp_path: Path) -> None:
    file = FakeFile(tmp_path)

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        for name in ("fake", "broken"):
            await ask(client, name)
        file.raw = {"models": {"fake": {"source": "remote:other"}, "kept": {"source": "x", "preload": True}}}
        reloaded = await client.post("/api/config/reload")
        assert reloaded.status_code == 200, reloaded.text
        known = admin.service.cluster.models
        # What is removed or changed goes, what is new comes.
        await eventually(lambda: {name for name, one in known.items() if one.loaded} == {"kept"})
        waiting = await ask(client, "fake")
        assert (waiting.status_code, waiting.json()["error"]["code"]) == (503, "model_pulling")
        store_of(admin).gate.set()
        await eventually(lambda: not admin.service.models.arriving())
        assert (await ask(client, "fake")).status_code == 200

    on_admin(tmp_path, test, file=file)


def test_a_reload_touches_no_model_that_the_file_does_not_change(tmp_path: Path) -> None:
    file = FakeFile(tmp_path)
    adapter = {"tuned": "folder"}

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        file.raw = {"models": {"fake": {"source": "x", "preload": True, "adapters": adapter}, "b": {"source": "x"}}}
        assert (await client.post("/api/config/reload")).status_code == 200
        await eventually(lambda: admin._residency.is_loaded("fake"))
        assert (await ask(client, "b")).status_code == 200
        admin.service.models._adapters["tuned"] = replace(admin.service.models._adapters["tuned"], created=7)
        sent: list[Any] = []
        admin.service.link.send = lambda node, message: sent.append((node, message))  # type: ignore[method-assign]
        assert (await client.post("/api/config/reload")).status_code == 200
        await asyncio.sleep(0.05)
        assert sent == []
        assert admin.service.models._adapters["tuned"].created == 7
        file.raw["models"]["b"]["keep_alive"] = "1h"
        assert (await client.post("/api/config/reload")).status_code == 200
        assert [(message.card.name, message.keep_alive_s) for _, message in sent] == [("b", 3600)]
        del admin.service.link.send  # type: ignore[method-assign]

    on_admin(tmp_path, test, file=file)


def test_a_model_that_is_on_offer_again_before_it_is_idle_stays_loaded(tmp_path: Path) -> None:
    file = FakeFile(tmp_path)
    both = {"fake": {"source": "x"}, "other": {"source": "x"}}

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        file.raw = {"models": both}
        await client.post("/api/config/reload")
        running = asyncio.create_task(ask(client, "fake", max_tokens=300))
        await eventually(lambda: admin.service.unfinished)
        for models in ({"other": both["other"]}, both):
            file.raw = {"models": models}
            assert (await client.post("/api/config/reload")).status_code == 200
        assert (await running).status_code == 200
        await asyncio.sleep(0.05)
        assert admin._residency.is_loaded("fake")

    on_admin(tmp_path, test, file=file)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"models": {"m": {"source": "x", "keepalive": 5}}}, "dovetail.yaml: models.m.keepalive: unknown key"),
        ({"models": {"m": {"source": "nowhere"}}}, "dovetail.yaml: models.m.source: nowhere: no such folder"),
        ({"server": {"max_queue": 0}}, "server.max_queue"),
    ],
)
def test_a_file_with_a_mistake_changes_nothing_and_is_reported(
    tmp_path: Path, raw: dict[str, Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = FakeFile(tmp_path)

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        file.raw = raw
        await admin.reload_and_log()
        assert problem in caplog.text
        assert "stays as it was" in caplog.text
        refused = await client.post("/api/config/reload")
        assert refused.status_code == 400
        assert problem in refused.json()["error"]["message"]
        assert set(await states(client)) == {"fake", "broken"}
        assert (await ask(client, "fake")).status_code == 200
        health = await client.get("/health")
        assert health.status_code == 200
        assert problem in health.json()["config_problem"]
        assert problem in (await client.get("/api/config")).json()["problem"]
        file.raw = {"models": {"m": {"source": "x"}}}
        assert (await client.post("/api/config/reload")).json()["problem"] is None
        assert (await client.get("/health")).json()["config_problem"] is None

    on_admin(tmp_path, test, file=file)


def test_keys_change_with_the_file_and_a_quota_remembers(tmp_path: Path) -> None:
    file = FakeFile(tmp_path)
    keys = [{"name": "slow", "key": "sk-slow", "requests_per_minute": 1}, {"name": "boss", "key": "b", "admin": True}]

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        slow, boss = {"authorization": "Bearer sk-slow"}, {"authorization": "Bearer b"}
        assert (await client.post("/v1/completions", json=TEXT, headers=slow)).status_code == 200
        file.raw = {"auth": {"keys": [keys[0] | {"key": "sk-new"}, keys[1]]}, "models": {"fake": {"source": "x"}}}
        assert (await client.post("/api/config/reload", headers=boss)).status_code == 200
        assert (await client.post("/v1/completions", json=TEXT, headers=slow)).status_code == 401
        new = {"authorization": "Bearer sk-new"}
        assert (await client.post("/v1/completions", json=TEXT, headers=new)).status_code == 429

    on_admin(tmp_path, test, {"auth": {"keys": keys}}, file=file)


def test_a_store_that_goes_away_is_named_in_every_answer(tmp_path: Path) -> None:
    class Gone:
        """A catalogue whose disk has failed, or whose folder was removed."""

        def __init__(self, error: Exception) -> None:
            self.error = error

        def cards(self) -> list[ModelCard]:
            raise self.error

        def get(self, name: str) -> ModelCard:
            raise self.error

    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        assert (await ask(client, "fake")).status_code == 200
        models = admin.service.models
        models.replace(Gone(OSError(5, "Input/output error", "/store")), {})
        for response in (await ask(client, "fake"), await client.get("/v1/models"), await client.get("/api/models")):
            assert response.status_code == 500
            assert "Input/output error: '/store'" in response.json()["error"]["message"]
        models.replace(Gone(ModelNotFound("model 'fake' not found; nothing is pulled yet")), {})
        there = await ask(client, "fake")  # the file does not name it any more
        assert there.status_code == 404
        assert "is gone" not in there.json()["error"]["message"]
        shutil.rmtree(tmp_path)
        gone = await ask(client, "fake")
        tmp_path.mkdir()
        assert gone.status_code == 404
        assert f"{tmp_path} is gone" in gone.json()["error"]["message"]
        models.replace(FixedCatalogue([make_card(tmp_path)]), {})
        assert (await ask(client, "fake")).status_code == 200

    on_admin(tmp_path, test)


def test_a_restarted_worker_gets_the_models_that_shall_always_be_there(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        admin._residency.preload = ("broken", "fake")  # one that fails does not keep the other away
        pid = admin.service.link.supervisors["cpu-0"].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: "fake" in admin.service.link.nodes["cpu-0"].instances)
        assert admin.service.link.supervisors["cpu-0"].starts == 2

    on_admin(tmp_path, test)


def test_without_a_file_there_is_nothing_to_read_again(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        refused = await client.post("/api/config/reload")
        assert refused.status_code == 400
        assert "--config" in refused.json()["error"]["message"]

    on_admin(tmp_path, test)


def test_a_file_without_keys_does_not_open_a_server_to_the_network(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, admin: Admin) -> None:
        boss = {"authorization": "Bearer sk-boss"}
        file.raw = {"server": {"host": "0.0.0.0"}}
        refused = await client.post("/api/config/reload", headers=boss)
        assert (refused.status_code, "without API keys" in refused.text) == (400, True)
        assert (await client.get("/v1/models")).status_code == 401
        file.raw = {"server": {"host": "0.0.0.0", "open_to_network": True}}
        assert (await client.post("/api/config/reload", headers=boss)).status_code == 200
        assert (await client.get("/v1/models", headers={"authorization": ""})).status_code == 200

    file = FakeFile(tmp_path)
    on_admin(tmp_path, test, {"server": {"host": "0.0.0.0"}, **KEYS}, file=file)
