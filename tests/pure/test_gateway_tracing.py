"""Traces from HTTP to the turn, as a real OTLP receiver on loopback gets them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_builders import eventually, make_card
from test_gateway_http import TEXT, on_app

from dovetail.errors import ConfigError
from dovetail.gateway.service import Service
from dovetail.gateway.tracing import Tracing

pytest.importorskip("opentelemetry.sdk")
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def receiver() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the spans that have come."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_request_is_one_trace_from_its_http_span_to_its_turns(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
        body = TEXT | {"model": "cold", "prompt": "a secret ", "stream": True}
        await client.post("/v1/completions", json=body, headers=headers)
        await client.post("/v1/completions", json=TEXT | {"model": "nobody"})
        # Its stats come after the last token; they are observed before the answer to a later question.
        await client.post("/v1/completions", json=TEXT | {"model": "cold", "max_tokens": 1})
        await asyncio.sleep(0.1)

    with receiver() as (address, spans):
        on_app(tmp_path, test, make_card(tmp_path, "cold"), traces=address)
        asyncio.run(eventually(lambda: len(spans) > 8))
    own = [span for span in spans if span.trace_id.hex() == TRACE]
    (root,) = (span for span in own if span.name == "POST /v1/completions")
    assert root.parent_span_id.hex() == CALLER
    attributes = {item.key: item.value for item in root.attributes}
    assert attributes["gen_ai.request.model"].string_value == "cold"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 6
    assert attributes["http.response.status_code"].int_value == 200
    children = {span.name: span for span in own if span.parent_span_id == root.span_id}
    assert {"queue", "load", "first token", "answer", "turn"} == set(children)
    assert len([span for span in own if span.name == "turn"]) == 6  # a token each
    assert children["queue"].end_time_unix_nano <= children["load"].start_time_unix_nano + 1000
    assert "secret" not in str(spans)
    others = [span for span in spans if span.trace_id.hex() != TRACE and span.name == "POST /v1/completions"]
    facts = [{item.key: item.value.int_value for item in span.attributes} for span in others]
    codes = [fact["http.response.status_code"] for fact in facts]
    assert sorted(codes) == [200, 404]


def test_a_caller_that_is_not_sampled_costs_no_span(tmp_path: Path) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        await client.post("/v1/completions", json=TEXT, headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})

    with receiver() as (address, spans):
        on_app(tmp_path, test, traces=address)
    assert spans == []


def test_without_the_sdk_a_server_that_shall_trace_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'dovetail\[otel\]'"):
        Tracing.to("http://127.0.0.1:4318/v1/traces")
