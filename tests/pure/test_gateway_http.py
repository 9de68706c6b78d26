"""The HTTP surface on a fake worker: bad input of every kind, keys, quotas, limits, events, metrics."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_worker import BUSY, FAIL
from gateway_builders import make_admin, running_service
from pydantic import SecretStr
from sse import event_data

from dovetail.config import AuthConfig, Config, KeyConfig, ServerConfig
from dovetail.errors import EngineFailed
from dovetail.gateway.app import make_app
from dovetail.gateway.http import respond
from dovetail.gateway.http.answers import ReplyOptions
from dovetail.gateway.http.api import CompletionRequest
from dovetail.gateway.http.text_reply import TextReply
from dovetail.gateway.service import Service
from dovetail.gateway.slo import SloWatch
from dovetail.gateway.text.translate import translate_completion
from dovetail.types import ModelCard, Request, SamplingParams, Slo

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"model": "fake", "prompt": "hi ", "max_tokens": 6}
PARTS = ("bucket", "sum", "count")  # of a histogram
JSON = {"content-type": "application/json"}
KEYS = AuthConfig(
    keys=(
        KeyConfig(name="free", key=SecretStr("sk-free")),
        KeyConfig(name="slow", key=SecretStr("sk-slow"), requests_per_minute=2),
    )
)

Test = Callable[[httpx.AsyncClient, Service], Awaitable[None]]


def on_app(folder: Path, test: Test, *cards: ModelCard, auth: AuthConfig | None = None, **server: Any) -> None:
    async def run() -> None:
        async with running_service(folder, *cards) as service:
            await service.link.supervisors["cpu-0"].greeted
            service.is_ready = True
            app = make_app(make_admin(service, Config(server=ServerConfig(**server), auth=auth or AuthConfig())))
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30) as client:
                await asyncio.wait_for(test(client, service), 60)

    asyncio.run(run())


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param
    return error


def events(response: httpx.Response) -> list[Any]:
    lines = event_data(response)
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "the king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"model": None}, "model"),
    ({"model": ["x"]}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"n": 1.5}, "n"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"seed": "abc"}, "seed"),
    ({"seed": 10**30}, "seed"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"top_k": -2}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
]


def test_a_wrong_value_is_a_400_that_names_the_parameter(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for change, param in BAD_FIELDS:
            error = check_error(await client.post("/v1/chat/completions", json=CHAT | change), 400)
            assert (error["param"] or "").startswith(param), (change, error)
        for change, param in (
            ({"prompt": []}, "prompt"),
            ({"prompt": [[]]}, "prompt"),
            ({"prompt": ["a", 1]}, "prompt"),
            ({"prompt": [-1]}, "prompt"),
            ({"suffix": "x"}, "suffix"),
            ({"best_of": 1, "n": 2}, "best_of"),
            ({"best_of": 2, "stream": True}, "best_of"),
            ({"echo": True, "logprobs": 1, "n": 2, "stream": True}, "echo"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
            ({"logprobs": 21}, "logprobs"),
        ):
            check_error(await client.post("/v1/completions", json=TEXT | change), 400, param)

    on_app(tmp_path, test)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "fake", "prompt": "\\ud800"}',
        b'{"model": "fake", "prompt": "\xff"}',
        b'{"model": "fake", "prompt": "a", "temperature": NaN}',
        b'{"model": "fake", "prompt": "a", "temperature": Infinity}',
        b'{"model": "fake", "prompt": "a", "temperature": 1e999}',
        b'{"model": "fake", "prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
        b"[" * 100_000,
        b'{"model": "fake", "prompt": "a", "guided_json": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"model": "fake", "prompt": "a", "prompt": 5}',
    ],
)
def test_a_body_that_is_no_json_of_ours_is_a_400(tmp_path: Path, body: bytes) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/detokenize"):
            check_error(await client.post(path, content=body, headers=JSON), 400)

    on_app(tmp_path, test)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_a_body_that_is_not_announced_as_json_is_a_415(tmp_path: Path, kind: str) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = json.dumps(TEXT).encode()
        response = await client.post("/v1/completions", content=body, headers={"content-type": kind})
        assert "application/json" in check_error(response, 415)["message"]
        for fine in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
            response = await client.post("/v1/completions", content=body, headers={"content-type": fine})
            assert response.status_code == 200

    on_app(tmp_path, test)


def test_paths_methods_and_models_that_are_not_there(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        check_error(await client.get("/v1/nothing"), 404)
        response = await client.get("/v1/chat/completions")
        check_error(response, 405)
        assert response.headers["allow"] == "POST"
        check_error(await client.post("/v1/completions", json=TEXT | {"model": "gpt-9"}), 404, "model")
        check_error(await client.get("/v1/models/gpt-9"), 404, "model")
        assert (await client.get("/v1/models/fake")).json()["id"] == "fake"

    on_app(tmp_path, test)


def test_streamed_and_whole_texts_are_the_same(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            body = body | {"n": 2, "max_tokens": 40}
            whole = (await client.post(path, json=body)).json()
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = events(await client.post(path, json=body | options))
            for index in range(2):
                choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
                given = whole["choices"][index]
                if "message" in given:
                    assert choices[0]["delta"]["role"] == "assistant"
                    assert "".join(c["delta"]["content"] for c in choices) == given["message"]["content"]
                else:
                    assert "".join(choice["text"] for choice in choices) == given["text"]
                assert choices[-1]["finish_reason"] == given["finish_reason"]
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"] == whole["usage"]
            assert all(chunk["usage"] is None for chunk in chunks[:-1])

    on_app(tmp_path, test)


def test_logprobs_echo_and_several_prompts(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        answer = (await client.post("/v1/completions", json=TEXT | {"logprobs": 2, "max_tokens": 3})).json()
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["h", "i", " "]
        assert logprobs["text_offset"] == [0, 1, 2]
        answer = (await client.post("/v1/completions", json=TEXT | {"logprobs": 0, "max_tokens": 2})).json()
        assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"h": -0.5}, {"i": -0.5}]  # the chosen one always
        answer = (await client.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 2})).json()
        entry = answer["choices"][0]["logprobs"]["content"][1]
        assert entry["logprob"] == -0.5
        assert entry["top_logprobs"][1]["logprob"] == -9999.0
        answer = (await client.post("/v1/completions", json=TEXT | {"prompt": ["a", "b"], "echo": True})).json()
        assert [choice["text"] for choice in answer["choices"]] == ["a" * 7, "b" * 7]

    on_app(tmp_path, test)


def test_a_failure_after_the_first_text_is_an_event_and_before_it_a_status(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        body = TEXT | {"prompt": [FAIL], "stream": True}
        check_error(await client.post("/v1/completions", json=body), 500)
        stream = asyncio.create_task(client.post("/v1/completions", json=TEXT | {"stream": True, "max_tokens": 400}))
        while not service.unfinished:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        opened, *_ = service.cluster.remote.requests.all()
        opened.stream.fail(EngineFailed("lost"))
        chunks = events(await stream)
        assert chunks[0]["choices"]
        assert chunks[-1]["error"]["message"] == "lost"

    on_app(tmp_path, test)


def test_a_request_that_the_worker_refuses_is_a_503_that_says_when_to_return(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for stream in (False, True):
            response = await client.post("/v1/completions", json=TEXT | {"prompt": [BUSY], "stream": stream, "n": 2})
            assert check_error(response, 503)["message"] == "no room in time"
            assert response.headers["retry-after"] == "3"

    on_app(tmp_path, test)


def test_a_client_that_stops_reading_loses_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(respond, "SEND_TIMEOUT_S", 0.05)

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        model = service.models.get("fake")
        body = CompletionRequest(model="fake", prompt="a", max_tokens=100)
        job = await translate_completion(body, model, "job", 512, Slo())
        reply = TextReply(job, 0, ReplyOptions())
        response = respond.GenerationResponse(service, job, reply, stream=True, include_usage=False)

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(60)

        async def receive() -> Any:
            await asyncio.sleep(60)

        with pytest.raises(TimeoutError):
            await response({"type": "http"}, receive, send)
        assert service.unfinished == 0

    on_app(tmp_path, test)


def test_keys_are_asked_for_and_their_quotas_hold(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for headers in (
            {},
            {"authorization": "sk-free"},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer "},
        ):
            response = await client.get("/v1/models", headers=headers)
            check_error(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/live", "/version", "/openapi.json"):
            assert (await client.get(path)).status_code == 200, path
        check_error(await client.get("/metrics"), 401)
        slow = {"authorization": "Bearer sk-slow"}
        for _ in range(2):
            assert (await client.post("/v1/completions", json=TEXT, headers=slow)).status_code == 200
        response = await client.post("/v1/completions", json=TEXT, headers=slow)
        check_error(response, 429)
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert (await client.get("/v1/models", headers=slow)).status_code == 200
        free = {"authorization": "Bearer sk-free"}
        assert (await client.post("/v1/completions", json=TEXT, headers=free)).status_code == 200

    on_app(tmp_path, test, auth=KEYS)


def test_a_body_over_the_limit_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        check_error(await client.post("/v1/completions", content=b"x" * 2001), 413)
        sent = 0

        async def endless() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(1000):
                sent += 1
                yield b"x" * 100

        check_error(await client.post("/v1/completions", content=endless(), headers=JSON), 413)
        assert sent < 30

    on_app(tmp_path, test, max_body_bytes=2000)


def test_request_ids_are_echoed_when_they_are_plain(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        assert (await client.get("/live", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
        for bad in ("a b", "x" * 200, "é"):
            response = await client.get("/live", headers=[(b"x-request-id", bad.encode())])
            assert len(response.headers["x-request-id"]) == 32
        assert check_error(await client.get("/nothing"), 404)
        assert (await client.get("/nothing")).headers["x-request-id"]

    on_app(tmp_path, test)


def test_time_to_first_token_counts_from_the_socket_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/v1/completions", json=TEXT)
        model = service.models.get("fake")
        encode = type(model).encode_prompt

        async def slowly(self: object, text: str) -> list[int]:
            await asyncio.sleep(0.3)
            return await encode(self, text)  # type: ignore[arg-type]

        monkeypatch.setattr(type(model), "encode_prompt", slowly)
        assert (await client.post("/v1/completions", json=TEXT, headers={"x-slo-ttft-ms": "250"})).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'dovetail:slo_requests_total{model_name="fake",outcome="violated"} 1.0' in metrics

    on_app(tmp_path, test)


def test_waiting_for_weights_is_excused_once_and_waiting_for_anything_else_is_not() -> None:
    sampling = SamplingParams(max_tokens=4, seed=0)
    request = Request("r", "m", (1, 2), sampling, slo=Slo(1.0, 0.5))
    watch = SloWatch(request, arrival=100.0)
    watch.excuse(2.0)
    watch.token(0, 102.9)
    watch.token(1, 103.4)
    assert watch.outcome == "attained"
    watch = SloWatch(request, arrival=100.0)
    watch.excuse(0.0)  # it waited three seconds for memory
    watch.token(0, 102.9)
    assert watch.outcome == "violated"


def test_targets_in_headers_are_checked_and_counted(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for value in ("0", "-1", "nan", "inf", "soon"):
            response = await client.post("/v1/completions", json=TEXT, headers={"x-slo-ttft-ms": value})
            check_error(response, 400, "x-slo-ttft-ms")
        for headers in ({"x-slo-ttft-ms": "60000"}, {"x-slo-ttft-ms": "0.0001", "x-slo-tpot-ms": "0.0001"}):
            assert (await client.post("/v1/completions", json=TEXT, headers=headers)).status_code == 200
        flex = TEXT | {"service_tier": "flex"}
        assert (await client.post("/v1/completions", json=flex)).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'dovetail:slo_requests_total{model_name="fake",outcome="attained"} 1.0' in metrics
        assert 'dovetail:slo_requests_total{model_name="fake",outcome="violated"} 1.0' in metrics
        assert 'dovetail:cold_starts_total{model_name="fake",tier="disk"} 1.0' in metrics
        for line in (
            'class_requests_total{class="latency_sensitive",model_name="fake",outcome="attained"} 1.0',
            'class_requests_total{class="latency_sensitive",model_name="fake",outcome="violated"} 1.0',
            'class_requests_total{class="best_effort",model_name="fake",outcome="answered"} 1.0',
            'class_tokens_total{class="latency_sensitive",kind="generation",model_name="fake"} 12.0',
            'class_tokens_total{class="best_effort",kind="generation",model_name="fake"} 6.0',
            'class_tokens_total{class="best_effort",kind="prompt",model_name="fake"} 3.0',
        ):
            assert f"dovetail:{line}" in metrics
        assert 'dovetail:generation_tokens_total{model_name="fake"} 18.0' in metrics
        assert 'dovetail:request_success_total{finished_reason="length",model_name="fake"} 3.0' in metrics
        assert 'dovetail:http_requests_total{path="/v1/completions",status="200"} 3.0' in metrics

    on_app(tmp_path, test)


def test_medians_of_a_model_are_of_requests_that_somebody_waits_for(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/v1/completions", json=TEXT | {"service_tier": "flex"})
        seen = service.metrics.of_model("fake")
        assert (seen.ttft_p50_s, seen.tpot_p50_s) == (None, None)
        await client.post("/v1/completions", json=TEXT)
        counted = (await client.get("/metrics")).text
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
            assert f'dovetail:{name}_count{{model_name="fake"}} 1.0' in counted
        assert 'inter_token_latency_seconds_count{model_name="fake"} 5.0' in counted
        assert seen.ttft_p50_s is not None
        assert seen.tpot_p50_s is not None

    on_app(tmp_path, test)


TIERS = [("auto", "default"), ("default", "default"), ("scale", "default"), ("priority", "priority"), ("flex", "flex")]


@pytest.mark.parametrize(("asked", "had"), TIERS)
def test_an_answer_says_which_tier_its_request_had(tmp_path: Path, asked: str, had: str) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            answer = (await client.post(path, json=body | {"service_tier": asked})).json()
            assert answer["service_tier"] == had
            streamed = await client.post(path, json=body | {"service_tier": asked, "stream": True})
            chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
            assert {chunk["service_tier"] for chunk in chunks} == {had}
            assert "service_tier" not in (await client.post(path, json=body)).json()
        question = {"model": "fake", "input": "hi", "max_output_tokens": 4}
        answer = (await client.post("/v1/responses", json=question | {"service_tier": asked})).json()
        assert answer["service_tier"] == had

    on_app(tmp_path, test)


def test_a_draining_server_refuses_work_but_answers_probes(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        service.is_draining = True
        response = await client.post("/v1/completions", json=TEXT)
        check_error(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/live")).status_code == 200

    on_app(tmp_path, test)


def test_tokenize_and_detokenize_are_inverse(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        text = "héllo 🗼 <|end|>"
        answer = (await client.post("/tokenize", json={"model": "fake", "prompt": text})).json()
        assert answer["count"] == len(answer["tokens"])
        back = await client.post("/detokenize", json={"model": "fake", "tokens": answer["tokens"]})
        assert back.json()["prompt"] == text
        chat = {"model": "fake", "messages": CHAT["messages"], "return_token_strs": True}
        answer = (await client.post("/tokenize", json=chat)).json()
        assert answer["token_strs"][-1] == "<|assistant|>"

    on_app(tmp_path, test)


def test_an_unexpected_failure_is_a_500_in_the_same_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        monkeypatch.setattr(service, "check_admission", lambda: 1 / 0)
        error = check_error(await client.post("/v1/completions", json=TEXT), 500)
        assert "division" not in error["message"]

        class PanicException(BaseException):  # what a panic in a library's Rust becomes
            pass

        for failure in (PanicException("called `Option::unwrap()`"), RecursionError("maximum recursion depth")):

            def fail(failure: BaseException = failure) -> None:
                raise failure

            monkeypatch.setattr(service, "check_admission", fail)
            check_error(await client.post("/v1/completions", json=TEXT), 500)

    on_app(tmp_path, test)


def test_the_openapi_document_has_every_route_and_body(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        document = (await client.get("/openapi.json")).json()
        assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health"} <= set(
            document["paths"]
        )
        body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body["$ref"].removeprefix("#/components/schemas/") in document["components"]["schemas"]

    on_app(tmp_path, test)


def test_without_keys_hosts_and_origins_must_be_ours(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        async def status(**headers: str) -> int:
            return (
                await client.get("/v1/models", headers={k.replace("_", "-"): v for k, v in headers.items()})
            ).status_code

        for host in (
            "localhost",
            "LOCALHOST:8000",
            "127.0.0.1:9",
            "[::1]:8000",
            "10.1.2.3",
            "me.localhost",
            "models.example.org",
        ):
            assert await status(host=host) == 200, host
        for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "xmodels.example.org"):
            assert await status(host=host) == 421, host
        assert await status(host="localhost:8000", origin="http://localhost:8000") == 200
        for origin in (
            "null",
            "http://evil.example",
            "http://localhost:3000",
            "http://[",
            "https://localhost.evil.example",
        ):
            assert await status(host="localhost:8000", origin=origin) == 403, origin
        for site in ("cross-site", "same-site"):
            assert await status(sec_fetch_site=site) == 403
            assert await status(sec_fetch_site=site, sec_fetch_mode="navigate") == 200  # a link that was followed
        allowed = {"origin": "https://chat.example.org"}
        answer = await client.post("/v1/completions", json=TEXT, headers=allowed)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://chat.example.org")
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        assert (await client.options("/v1/completions", headers=allowed | asked)).status_code == 200
        assert (
            await client.options("/v1/completions", headers=asked | {"origin": "http://evil.example"})
        ).status_code == 400

    options = {"allowed_hosts": ("models.example.org",), "allowed_origins": ("https://chat.example.org",)}
    on_app(tmp_path, test, **options)


def test_with_keys_the_name_by_which_a_server_is_called_is_its_proxys_matter(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        headers = {"host": "api.example.org", "origin": "https://chat.example.org", "authorization": "Bearer sk-free"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200

    on_app(tmp_path, test, auth=KEYS)


def test_many_prompts_at_once_are_read_as_each_by_itself(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        prompts = [f"naïve prompt {index} " for index in range(9)]
        for extra in ({}, {"add_special_tokens": False}):
            many = (await client.post("/v1/completions", json=TEXT | extra | {"prompt": prompts})).json()
            alone = [
                (await client.post("/v1/completions", json=TEXT | extra | {"prompt": text})).json() for text in prompts
            ]
            assert [each["text"] for each in many["choices"]] == [each["choices"][0]["text"] for each in alone]

    on_app(tmp_path, test)


def test_every_metric_and_label_of_the_dashboard_is_one_that_the_server_has(tmp_path: Path) -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "deploy" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [item["query"]["query"] for item in dashboard["templating"]["list"] if item["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"dovetail:\w+", query)}

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/v1/completions", json=TEXT)
        kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", service.metrics.render().body.decode(), re.MULTILINE))
        offered = {name for name, kind in kinds.items() if kind != "histogram"}
        offered |= {f"{name}_{part}" for name, kind in kinds.items() if kind == "histogram" for part in PARTS}
        assert used <= offered, used - offered

    on_app(tmp_path, test)
    known = {"le", "model_name", "node", "tier", "outcome", "status", "finished_reason"}
    groups = [labels for query in queries for labels in re.findall(r"by \(([^)]*)\)", query)]
    grouped = {label for labels in groups for label in labels.split(", ")}
    assert grouped <= known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
