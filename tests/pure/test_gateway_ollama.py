"""Ollama's paths on a fake worker: the same answers as OpenAI's, in the form that its clients read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_worker import BUSY, FAIL
from gateway_builders import byte_level_tokenizer
from test_gateway_http import CHAT, KEYS, on_app

from dovetail.gateway.service import Service

ASKED: dict[str, Any] = {"model": "fake:latest", "messages": CHAT["messages"], "options": {"num_predict": 6}}


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_says_what_the_other_api_says_whole_and_in_lines(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        openai = (await client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 6, "temperature": 0})).json()
        whole = (await client.post("/api/chat", json=ASKED | {"stream": False})).json()
        assert whole["message"] == {"role": "assistant", "content": openai["choices"][0]["message"]["content"]}
        assert (whole["done"], whole["done_reason"], whole["eval_count"]) == (True, "stop", 4)
        assert whole["prompt_eval_count"] == openai["usage"]["prompt_tokens"]
        parts = lines(await client.post("/api/chat", json=ASKED))
        assert "".join(part["message"]["content"] for part in parts) == whole["message"]["content"]
        assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1]["total_duration"] > 0
        assert service.unfinished == 0

    on_app(tmp_path, test)


def test_prompts_are_answered_with_and_without_the_template(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = {"model": "fake", "prompt": "abc", "options": {"num_predict": 3}, "stream": False}
        raw = (await client.post("/api/generate", json=body | {"raw": True})).json()
        assert raw["response"] == "abc"
        assert raw["prompt_eval_count"] == 3
        formed = (await client.post("/api/generate", json=body | {"system": "be brief"})).json()
        assert formed["prompt_eval_count"] > 20
        loaded = (await client.post("/api/generate", json={"model": "fake"})).json()
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")

    on_app(tmp_path, test)


def test_texts_have_vectors_and_models_are_listed_and_shown(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        wanted = (await client.post("/v1/embeddings", json={"model": "fake", "input": ["ab", "c"]})).json()
        found = (await client.post("/api/embed", json={"model": "fake", "input": ["ab", "c"]})).json()
        for vector, item in zip(found["embeddings"], wanted["data"], strict=True):
            assert vector == pytest.approx(item["embedding"])
        one = (await client.post("/api/embeddings", json={"model": "fake", "prompt": "ab"})).json()
        assert sum(one["embedding"]) == 2  # not made a unit vector, as Ollama's
        tags = (await client.get("/api/tags")).json()["models"]
        assert {tag["name"] for tag in tags} == {"fake", "broken"}
        shown = (await client.post("/api/show", json={"model": "fake"})).json()
        assert shown["model_info"]["llama.context_length"] == 512
        assert "tools" in shown["capabilities"]
        assert (await client.get("/api/version")).json()["version"]

    on_app(tmp_path, test)


def test_problems_are_told_as_text_with_their_status(tmp_path: Path) -> None:
    texts = byte_level_tokenizer()

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for change, status, word in (
            ({"model": "nothing"}, 404, "nothing"),
            ({"options": {"mirostat": 2}}, 400, "mirostat"),
            ({"options": {"temprature": 1}}, 400, "temprature"),
            ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "images"),
            ({"messages": [{"role": "user", "content": texts.decode([FAIL])}]}, 500, "no luck"),
            ({"messages": [{"role": "user", "content": texts.decode([BUSY])}]}, 503, "no room"),
        ):
            for stream in (False, True):
                response = await client.post("/api/chat", json=ASKED | {"stream": stream} | change)
                assert response.status_code == status, response.text
                assert word in response.json()["error"]

    on_app(tmp_path, test)


def test_models_are_asked_with_any_key_and_not_without(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        assert (await client.post("/api/chat", json=ASKED)).status_code == 401
        free = {"authorization": "Bearer sk-free"}
        assert (await client.post("/api/chat", json=ASKED, headers=free)).status_code == 200
        assert (await client.get("/api/tags", headers=free)).status_code == 200
        assert (await client.get("/api/models", headers=free)).status_code == 403

    on_app(tmp_path, test, auth=KEYS)


def test_paths_that_are_not_here_say_what_to_do_in_words_that_its_clients_print(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for method, path, word in (
            ("POST", "/api/pull", "dovetail add"),
            ("POST", "/api/create", "dovetail add"),
            ("POST", "/api/copy", "aliases"),
            ("DELETE", "/api/delete", "dovetail rm"),
            ("POST", "/api/push", "not possible"),
            ("HEAD", "/api/blobs/sha256:0", ""),
            ("GET", "/api/chat", "GET"),
        ):
            response = await client.request(method, path, json={"model": "x"})
            assert response.status_code in (400, 405), path
            if method != "HEAD":
                assert set(response.json()) == {"error"}
                assert word in response.json()["error"]

    on_app(tmp_path, test)


def test_log_probabilities_come_whole_and_in_lines(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        asked = ASKED | {"logprobs": True, "top_logprobs": 2}
        openai_asked = CHAT | {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        openai = (await client.post("/v1/chat/completions", json=openai_asked)).json()["choices"][0]["logprobs"]
        whole = (await client.post("/api/chat", json=asked | {"stream": False})).json()
        assert whole["logprobs"] == openai["content"]
        parts = lines(await client.post("/api/chat", json=asked))
        assert [entry for part in parts for entry in part.get("logprobs", ())] == openai["content"]
        generated = {"model": "fake", "prompt": "abc", "raw": True, "stream": False, "logprobs": True}
        raw = (await client.post("/api/generate", json=generated | {"options": {"num_predict": 3}})).json()
        assert [entry["token"] for entry in raw["logprobs"]] == ["a", "b", "c"]

    on_app(tmp_path, test)
