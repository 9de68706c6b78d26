"""`/metrics` as the parsers of Prometheus read it: formats, names of vLLM, and who counts as waiting."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx
from gateway_builders import make_card
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from test_gateway_http import TEXT, on_app

from dovetail.gateway.exposition import VLLM_FAMILIES
from dovetail.gateway.service import Service


def families(text: str, parse: Callable[[str], Iterable[Metric]]) -> dict[str, Metric]:
    return {family.name: family for family in parse(text)}


OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"


def test_metrics_have_the_format_that_is_accepted_and_a_real_parser_reads_both(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/v1/completions", json=TEXT)
        plain = await client.get("/metrics")
        for _ in range(100):  # the worker tells its statistics after the answer
            if "dovetail:kv_cache_usage_perc{" in plain.text:
                break
            await asyncio.sleep(0.05)
            plain = await client.get("/metrics")
        assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        asked = await client.get("/metrics", headers={"accept": OPENMETRICS})
        assert asked.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0;")
        assert asked.text.endswith("# EOF\n")
        assert asked.headers["vary"] == plain.headers["vary"] == "accept"
        texts = families(plain.text, text_string_to_metric_families)
        opens = families(asked.text, openmetrics_families)
        for name in (
            "dovetail:generation_tokens",
            "dovetail:inter_token_latency_seconds",
            "dovetail:kv_cache_usage_perc",
        ):
            assert opens[name].samples[0].value == texts[name].samples[0].value
            assert opens[name].type == texts[name].type
        assert {name.removesuffix("_created") for name in texts} == set(opens)

    on_app(tmp_path, test)


ACCEPTED = (
    ("application/openmetrics-text", True),
    ("text/plain;version=0.0.4,application/openmetrics-text;version=1.0.0", True),
    ("application/openmetrics-text;version=1.0.0;escaping=underscores", True),
    ("APPLICATION/OpenMetrics-Text; Version=1.0.0", True),
    ("application/openmetrics-text;version=0.0.1;q=0.9, text/plain;version=0.0.4;q=0.5", False),
    ("application/openmetrics-text;version=1.0.0;q=0.2,text/plain;q=0.5", False),
    ("application/openmetrics-text;version=1.0.0;q=0", False),
    ("application/openmetrics-text;version=abc", False),
    ("application/openmetrics-text;q=many", False),
    ("*/*", False),
    (";;;,=,q=", False),
)


def test_the_accept_header_chooses_and_a_strange_one_is_no_error(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        for accept, is_open in ACCEPTED:
            answer = await client.get("/metrics", headers={"accept": accept})
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("application/openmetrics-text") == is_open, accept
            found = families(answer.text, openmetrics_families if is_open else text_string_to_metric_families)
            assert "dovetail:num_requests_running" in found

    on_app(tmp_path, test)


def test_vllms_names_are_there_where_they_are_asked_for_with_the_same_figures(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/v1/completions", json=TEXT)
        service.metrics.success.labels("fake", "aborted").inc()
        for accept, parse in (("", text_string_to_metric_families), (OPENMETRICS, openmetrics_families)):
            found = families((await client.get("/metrics", headers={"accept": accept})).text, parse)
            assert {f"vllm:{name.partition(':')[2]}" for name in VLLM_FAMILIES} <= found.keys()
            for name in VLLM_FAMILIES:
                ours, theirs = found[name], found[f"vllm:{name.partition(':')[2]}"]
                assert (ours.type, len(ours.samples)) == (theirs.type, len(theirs.samples))
                assert [sample.value for sample in ours.samples] == [sample.value for sample in theirs.samples]
            reasons = {sample.labels["finished_reason"] for sample in found["vllm:request_success"].samples}
            assert "abort" in reasons
            assert "aborted" not in reasons
            assert "vllm:turns" not in found

    on_app(tmp_path, test, vllm_metrics=True)


def test_vllms_names_are_not_there_by_themselves(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/v1/completions", json=TEXT)
        assert "vllm:" not in (await client.get("/metrics")).text

    on_app(tmp_path, test)


def test_requests_that_no_node_has_taken_yet_count_as_waiting(tmp_path: Path) -> None:
    card = make_card(tmp_path, "slow")
    is_held = tmp_path / "wait"
    is_held.touch()  # the fake worker loads for as long as it is there

    async def test(client: httpx.AsyncClient, service: Service) -> None:
        async def waiting() -> float:
            text = (await client.get("/metrics")).text
            found = re.search(r'^dovetail:num_requests_waiting\{model_name="slow"\} (\S+)$', text, re.MULTILINE)
            return float(found[1]) if found is not None else 0.0

        text = TEXT | {"model": "slow"}
        asked = [asyncio.create_task(client.post("/v1/completions", json=text)) for _ in range(3)]
        while await waiting() < 2:
            assert not any(one.done() for one in asked)
            await asyncio.sleep(0.01)
        is_held.unlink()
        assert [one.status_code for one in await asyncio.gather(*asked)] == [200] * 3
        assert await waiting() == 0

    on_app(tmp_path, test, card)
