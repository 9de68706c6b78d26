"""Tenants of one server over real sockets: what each may use, what each sees, and what is written down of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from edge_server import Edge, running_edge

from dovetail.config import Config, KeyConfig
from dovetail.errors import InvalidRequest, QuotaExceeded
from dovetail.gateway.http.accounts import KeyAccount, Window

TEXT = {"model": "fake", "prompt": "hi ", "max_tokens": 2}
KEYS: list[dict[str, Any]] = [
    {"name": "boss", "key": "sk-boss", "admin": True},
    {"name": "free", "key": "sk-free"},
    {"name": "four", "key": "sk-four", "requests_per_minute": 4},
    {"name": "texts", "key": "sk-texts", "requests_per_minute": 2},
    {"name": "tokens", "key": "sk-tokens", "tokens_per_minute": 40},
    {"name": "two", "key": "sk-two", "max_unfinished": 2},
    {"name": "graphs", "key": "sk-graphs", "metrics": True},
    {"name": "night", "key": "sk-night", "class": "be"},
    {"name": "urgent", "key": "sk-urgent", "priority": True},
    {"name": "late", "key": "sk-late", "priority": True, "class": "be"},
]


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    folder = tmp_path_factory.mktemp("tenants")
    logs = {"access_log": str(folder / "access.jsonl"), "audit_log": str(folder / "audit.jsonl")}
    with running_edge(folder, {"auth": {"keys": KEYS}, "server": logs | {"max_queue": 64}}) as made:
        yield made


def ask(edge: Edge, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return edge.post(path, TEXT | body, headers=bearer(key))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer sk-{key}"}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_each_prompt_counts_as_often_as_it_is_answered(edge: Edge) -> None:
    assert ask(edge, "four", prompt=["a", "b"], n=4).status_code == 400  # more than it may have in any minute
    assert ask(edge, "four", n=3).status_code == 200  # with the one before
    refused = ask(edge, "four")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert ask(edge, "free", prompt=["a"] * 32).status_code == 200


def test_requests_of_a_key_may_all_be_best_effort(edge: Edge) -> None:
    tiers = {}
    for key in ("free", "night"):
        texts = [ask(edge, key, service_tier="auto")]
        texts.append(
            edge.post("/v1/responses", {"model": "fake", "input": "hi", "service_tier": "auto"}, headers=bearer(key))
        )
        assert [text.status_code for text in texts] == [200, 200], [text.text for text in texts]
        tiers[key] = [text.json()["service_tier"] for text in texts]
    assert tiers == {"free": ["default", "default"], "night": ["flex", "flex"]}
    counted = edge.get("/metrics", headers=bearer("graphs")).text
    ended = [line for line in counted.splitlines() if line.startswith("dovetail:class_requests_total{")]
    assert [line.rsplit(" ", 1)[1] for line in ended if 'class="best_effort"' in line] == ["2.0"], ended


def test_requests_go_first_if_their_key_may(edge: Edge) -> None:
    """Whoever may not is served as usual, and told so."""
    asked = {"model": "fake", "input": "hi", "service_tier": "priority"}
    for key, had in (("free", "default"), ("urgent", "priority"), ("late", "flex")):
        assert ask(edge, key, service_tier="priority").json()["service_tier"] == had
        assert edge.post("/v1/responses", asked, headers=bearer(key)).json()["service_tier"] == had
    counted = edge.get("/metrics", headers=bearer("graphs")).text
    assert 'dovetail:class_requests_total{class="priority",model_name="fake",outcome="attained"} 2.0' in counted


def test_tokenizing_is_metered_too(edge: Edge) -> None:
    assert ask(edge, "texts", "/tokenize").status_code == 200
    assert ask(edge, "texts", "/detokenize", tokens=[1, 2]).status_code == 200
    assert ask(edge, "texts", "/tokenize").status_code == 429


def test_tokens_of_prompts_and_answers_are_metered(edge: Edge) -> None:
    assert ask(edge, "tokens", prompt="a" * 50).status_code == 400
    assert ask(edge, "tokens", prompt="a" * 30, max_tokens=12).status_code == 200
    assert ask(edge, "tokens").status_code == 429


def test_a_key_has_so_many_answers_at_a_time(edge: Edge) -> None:
    assert ask(edge, "two", n=3).status_code == 429
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, edge, "two", max_tokens=300) for _ in range(6)]
        statuses = [each.result().status_code for each in asked]
    assert statuses.count(200) >= 2
    assert set(statuses) == {200, 429}
    assert ask(edge, "two", n=2).status_code == 200


def test_whoever_has_no_place_is_told_so_before_texts_are_tokenised(edge: Edge) -> None:
    too_long = "a" * 100_000  # for the context, which tokenising finds out
    assert ask(edge, "two", prompt=too_long).status_code == 400
    assert ask(edge, "two", prompt=[too_long] * 3).status_code == 429
    assert ask(edge, "two", prompt=too_long, n=3).status_code == 429


def test_metrics_and_administration_are_not_for_every_tenant(edge: Edge) -> None:
    for path in ("/metrics", "/api/ps", "/api/models", "/api/models/fake", "/api/pulls", "/api/config"):
        assert edge.get(path).status_code == 401, path
        assert edge.get(path, headers=bearer("free")).status_code == 403, path
        assert edge.get(path, headers=bearer("boss")).status_code == 200, path
    assert edge.get("/metrics", headers=bearer("graphs")).status_code == 200
    assert edge.get("/api/ps", headers=bearer("graphs")).status_code == 403
    for headers in ({}, bearer("free")):
        assert edge.get("/health", headers=headers).json() == {"status": "ok", "config_problem": None}


def test_requests_and_acts_are_written_down_without_their_words(edge: Edge) -> None:
    ask(edge, "free", prompt="the password is swordfish", max_tokens=3, user="somebody")
    edge.post("/api/models/fake/load", headers=bearer("free"))
    edge.post("/api/models/fake/load", headers=bearer("boss"))
    access = lines(edge.folder / "access.jsonl")
    text = (edge.folder / "access.jsonl").read_text()
    assert "swordfish" not in text
    assert "sk-" not in text
    line = next(line for line in access if line["key"] == "free" and line.get("completion_tokens") == 3)
    assert (line["path"], line["status"], line["model"], line["answers"]) == ("/v1/completions", 200, "fake", 1)
    assert line["prompt_tokens"] == 25
    assert line["bytes_in"] > 50
    assert line["bytes_out"] > 50
    assert 0 <= line["first_byte_s"] <= line["seconds"]
    acts = lines(edge.folder / "audit.jsonl")
    assert [(act["key"], act["act"], act["status"]) for act in acts[-2:]] == [
        (None, "POST /api/models/fake/load", 403),
        ("boss", "POST /api/models/fake/load", 200),
    ]


def test_guesses_at_keys_are_slowed_down_and_those_who_have_one_are_not(tmp_path: Path) -> None:
    with running_edge(tmp_path, {"auth": {"keys": KEYS}}) as edge:
        assert edge.get("/v1/models", headers=bearer("free")).status_code == 200
        statuses = [edge.get("/v1/models", headers=bearer(f"guess-{i}")).status_code for i in range(30)]
        assert statuses[:20] == [401] * 20
        assert set(statuses[20:]) == {429}
        assert edge.get("/v1/models", headers=bearer("boss")).status_code == 429  # this address has never used it
        assert edge.get("/v1/models", headers=bearer("free")).status_code == 200
        assert edge.get("/live", headers=bearer("guess")).status_code in (200, 429)
        assert edge.is_alive()


def test_a_window_gives_back_what_is_a_minute_old() -> None:
    window = Window(10)
    window.add(6, 100.0)
    window.add(3, 130.5)
    assert window.wait_s(1, 131.0) == 0
    assert window.wait_s(2, 131.0) == 29
    assert window.wait_s(8, 131.0) == 59
    assert window.wait_s(8, 191.0) == 0


def test_an_account_charges_what_is_known_when_it_is_known() -> None:
    account = KeyAccount(
        KeyConfig.model_validate({"name": "k", "key": "x", "requests_per_minute": 5, "tokens_per_minute": 9})
    )
    account.begin(0.0)
    account.charge(5, 5, 0.0)
    with pytest.raises(QuotaExceeded):
        account.begin(1.0)
    account.begin(61.0)
    with pytest.raises(InvalidRequest):
        account.charge(1, 10, 61.0)
    account.add_tokens(50, 61.0)
    with pytest.raises(QuotaExceeded, match="tokens"):
        account.begin(62.0)


@pytest.mark.parametrize("key", ["", " ", "\n"])
def test_an_empty_key_is_no_key(key: str) -> None:
    with pytest.raises(ValueError, match="the key is empty"):
        Config.model_validate({"auth": {"keys": [{"name": "a", "key": key}]}})
