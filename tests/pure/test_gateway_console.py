"""The page's files, and the history of turns that it draws."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from pydantic import SecretStr
from test_gateway_http import KEYS, TEXT, check_error, on_app

from dovetail.config import AuthConfig, KeyConfig
from dovetail.gateway import console
from dovetail.gateway.admin.turn_history import WINDOW_S, TurnWatch
from dovetail.gateway.console.handover import LIFETIME_S, Handover
from dovetail.gateway.service import Service
from dovetail.messages import InstanceStats, Stats, TurnSpan


def stats(*spans: TurnSpan, kv_bytes: int = 0) -> Stats:
    instance = InstanceStats("m", 1, 0, 64, 1, 0, kv_bytes, 0, 0, 0, 1, 1, 0.1, 0.1)
    return Stats("cpu-0", 1, (instance,), spans=spans)


def test_turns_are_kept_in_order_for_a_minute() -> None:
    now = 1000.0
    watch = TurnWatch(lambda: now)
    watch.observe("cpu-0", stats(TurnSpan("b", 999.5, 0.2, 3), TurnSpan("a", 999.0, 0.1, 1), kv_bytes=10))
    (node,) = watch.history().nodes
    assert [(turn.model, turn.ago_s, turn.tokens) for turn in node.turns] == [("a", 1.0, 1), ("b", 0.5, 3)]
    now += 2
    watch.observe("cpu-0", stats(TurnSpan("a", 1001.0, 0.1, 1), kv_bytes=20))
    (node,) = watch.history().nodes
    assert [record.kv_bytes for record in node.memory] == [{"m": 10}, {"m": 20}]
    assert watch.history(after=1000.0).nodes[0] == node.model_copy(
        update={"turns": node.turns[2:], "memory": node.memory[1:]}
    )
    assert watch.history(watch.history().now_s).nodes[0].turns == []
    now += WINDOW_S - 1.5
    (node,) = watch.history().nodes
    assert len(node.turns) == len(node.memory) == 1
    now += WINDOW_S
    assert watch.history().nodes[0].turns == []


def test_shares_of_cells_hold_what_the_turns_held() -> None:
    now = 1000.0
    watch = TurnWatch(lambda: now)
    watch.observe("cpu-0", stats(TurnSpan("a", 999.01, 0.02, 1), TurnSpan("b", 999.04, 0.02, 1), kv_bytes=10))
    watch.observe("cpu-0", stats(TurnSpan("a", 999.5, 0.28125, 64)))
    shares = watch.shares(num_cells=480)
    assert (shares.cell_s, shares.window_s) == (0.125, WINDOW_S)
    (node,) = shares.nodes
    assert [(cell.cell, cell.turns, cell.held_s) for cell in node.cells] == [
        (7992, 2, {"a": 0.02, "b": 0.02}),
        (7996, 1, {"a": 0.125}),
        (7997, 0, {"a": 0.125}),
        (7998, 0, {"a": 0.03125}),
    ]
    assert node.memory == watch.history().nodes[0].memory
    assert not any(cell.best_effort_s for cell in node.cells)
    now += 1
    watch.observe("cpu-0", stats(TurnSpan("b", 999.8, 0.03, 1)))
    (news,) = watch.shares(480, after=shares.now_s).nodes
    assert [(cell.cell, cell.turns, cell.held_s) for cell in news.cells] == [(7998, 1, {"b": 0.03})]
    now += WINDOW_S
    assert watch.shares(480).nodes[0].cells == []


def test_what_best_effort_held_is_told_apart() -> None:
    watch = TurnWatch(lambda: 1000.0)
    watch.observe("cpu-0", stats(TurnSpan("a", 999.01, 0.02, 1), TurnSpan("a", 999.04, 0.2, 8, is_best_effort=True)))
    (node,) = watch.shares(num_cells=480).nodes
    assert [(cell.held_s, cell.best_effort_s) for cell in node.cells] == [
        ({"a": 0.105}, {"a": 0.085}),
        ({"a": 0.115}, {"a": 0.115}),
    ]
    assert [turn.best_effort for turn in watch.history().nodes[0].turns] == [False, True]


def test_files_are_sent_once_and_compressed(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        plain = await client.get("/ui/app.js", headers={"accept-encoding": "identity"})
        small = await client.get("/ui/app.js", headers={"accept-encoding": "gzip"})
        assert "content-encoding" not in plain.headers
        assert small.headers["content-encoding"] == "gzip"
        assert small.content == plain.content
        assert int(small.headers["content-length"]) < len(plain.content) / 2
        assert plain.headers["vary"] == small.headers["vary"] == "Accept-Encoding"
        again = await client.get("/ui/app.js", headers={"if-none-match": plain.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await client.get("/ui/app.js", headers={"if-none-match": '"other"'})).status_code == 200

    on_app(tmp_path, test)


def test_nothing_on_the_page_reads_a_string_as_html_or_names_another_host() -> None:
    for file in Path(console.__file__).parent.iterdir():
        if file.suffix not in (".js", ".html", ".css"):
            continue
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            file
        )
        assert not re.search(r"<script>|<style|style=|\bon\w+=", text), f"{file}: inline, which the policy forbids"
        named = set(re.findall(r"https?://[\w.-]+", text))
        assert named <= {"http://www.w3.org"}, f"{file}: {named}"  # a namespace, which nothing fetches
        assert len(text.splitlines()) < 500, file


def test_a_code_is_good_once_and_for_some_minutes() -> None:
    now = 0.0
    handover = Handover(lambda: now)
    code = handover.issue("secret")
    assert handover.redeem("guess") is None
    assert handover.redeem(code) == "secret"
    assert handover.redeem(code) is None
    late, code = handover.issue("late"), handover.issue("in time")
    now = LIFETIME_S - 1
    assert handover.redeem(code) == "in time"
    now = LIFETIME_S
    assert handover.redeem(late) is None
    first, *_ = [handover.issue(f"key {number}") for number in range(65)]
    assert handover.redeem(first) is None, "codes that nobody uses do not pile up"


def test_a_key_is_handed_over_only_to_whoever_has_one(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        check_error(await client.post("/ui/code"), 401)
        check_error(await client.post("/ui/code", headers={"authorization": "Bearer wrong"}), 401)
        issued = await client.post("/ui/code", headers={"authorization": "Bearer sk-free"})
        code = issued.json()["code"]
        assert "sk-free" not in issued.text
        redeemed = await client.post("/ui/key", json={"code": code})
        assert redeemed.json() == {"key": "sk-free"}
        assert redeemed.headers["cache-control"] == "no-store"
        assert check_error(await client.post("/ui/key", json={"code": code}), 403)["code"] == "code_used"
        for body in ({}, {"code": 5}, {"code": "x" * 201}, {"code": "x", "more": 1}):
            check_error(await client.post("/ui/key", json=body), 400)

    on_app(tmp_path, test, auth=KEYS)


def test_a_server_without_keys_hands_over_its_token_alone(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for headers in ({}, {"authorization": "Bearer none"}):
            check_error(await client.post("/ui/code", headers=headers), 401)
        foreign = {"origin": "http://evil.example"}
        check_error(await client.post("/ui/key", json={"code": "x"}, headers=foreign), 403)

    on_app(tmp_path, test)


def test_the_page_is_open_and_what_it_shows_is_not(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for path in ("/", "/ui", "/docs", "/ui/app.js", "/ui/style.css", "/ui/icon.svg"):
            response = await client.get(path)
            assert response.status_code == 200, path
            policy = response.headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "unsafe" not in policy
        assert (await client.get("/ui/app.js")).headers["content-type"].startswith("text/javascript")
        for path in ("/ui/nothing.js", "/ui/__init__.py", "/ui/..%2Fapp.py"):
            assert (await client.get(path)).status_code == 404
        for path in ("/api/turns", "/api/models", "/v1/models"):
            check_error(await client.get(path), 401)
        free, admin = ({"authorization": f"Bearer {key}"} for key in ("sk-free", "sk-admin"))
        await client.post("/v1/completions", json=TEXT, headers=free)
        check_error(await client.get("/api/turns", headers=free), 403)
        assert (await client.get("/api/turns", headers=admin)).json()["window_s"] == WINDOW_S
        check_error(await client.get("/api/turns/shares", headers=free), 403)
        shares = await client.get("/api/turns/shares?cells=1200&after=0", headers=admin)
        assert shares.json()["cell_s"] == WINDOW_S / 1200
        for query in ("cells=0", "cells=nan", "cells=-1", "cells=10001", "cells=", "cells=\u00b2", "after=x"):
            told = check_error(await client.get(f"/api/turns/shares?{query}", headers=admin), 400)
            assert told["param"] == query.partition("=")[0]

    operator = KeyConfig(name="operator", key=SecretStr("sk-admin"), admin=True)
    on_app(tmp_path, test, auth=AuthConfig(keys=(*KEYS.keys, operator)))
