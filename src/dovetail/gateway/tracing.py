"""OpenTelemetry traces of requests, from HTTP down to the turns that computed them, by its own SDK (an extra).

A request's span has as children what it waited for (queue, load, first token), its answer, and every turn that it took
part in, as its worker reports them. Which requests are traced is the SDK's to say (OTEL_TRACES_SAMPLER, and the
caller's traceparent); for the others nothing is kept.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.errors import ConfigError
from dovetail.messages import Stats, ToGateway

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from dovetail.gateway.generation_task import Waits
    from dovetail.gateway.http.answers import UsageCount
    from dovetail.gateway.text.translate import GenerationRequest

INSTALL = "server.traces needs OpenTelemetry's SDK: pip install 'dovetail[otel]'"
EXPORT_TIMEOUT_S = 2  # a collector that does not answer delays nobody, nor the server's end
LATE_S = 5.0  # turns of a request are told this long after its end at most


class Tracing:
    """Makes spans with times of our own clock, and sends them in batches from a thread of the SDK's."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": "dovetail"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("dovetail.gateway")
        self._offset_s = time.time() - time.monotonic()
        self._contexts: dict[str, Context] = {}  # of requests whose turns are wanted
        self._ended: deque[tuple[float, str]] = deque()  # when they were over, oldest first

    @classmethod
    def to(cls, endpoint: str) -> Tracing:
        """An OTLP collector, spoken to over HTTP."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(INSTALL) from error
        return cls(OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S))

    def begin(self, scope: Scope) -> RequestTrace | None:
        """None if this one is not sampled."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"][:200]}
        span = self._tracer.start_span(scope["method"], extract(headers), SpanKind.SERVER, attributes)
        return RequestTrace(self, span) if span.is_recording() else None

    def add(self, name: str, parent: Context, start_s: float, end_s: float, **attributes: Any) -> None:
        """A span that is over, by the monotonic clock."""
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=self._ns(start_s))
        span.end(self._ns(end_s))

    def _ns(self, monotonic_s: float) -> int:
        return int((monotonic_s + self._offset_s) * 1e9)

    def watch(self, request_id: str, parent: Context) -> None:
        self._contexts[request_id] = parent

    def unwatch(self, request_id: str) -> None:
        """Its last turns are still to be told of."""
        self._ended.append((time.monotonic(), request_id))

    def observe(self, node: str, message: ToGateway) -> None:
        if not isinstance(message, Stats) or not self._contexts:
            return
        for turn in message.spans:
            for request_id in turn.traced:
                parent = self._contexts.get(request_id)
                if parent is not None:
                    facts = {"dovetail.node": node, "gen_ai.request.model": turn.model, "dovetail.tokens": turn.tokens}
                    self.add("turn", parent, turn.started_s, turn.started_s + turn.seconds, **facts)
        while self._ended and self._ended[0][0] < time.monotonic() - LATE_S:
            self._contexts.pop(self._ended.popleft()[1], None)

    def close(self) -> None:
        """What was made is sent."""
        self._provider.shutdown()


class RequestTrace:
    """One HTTP request, and the job that it became."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracing = tracing
        self._span = span
        self._context = set_span_in_context(span)
        self._spoke_s: float | None = None

    def watch(self, job: GenerationRequest) -> None:
        self._span.set_attribute("gen_ai.request.model", job.model.name)
        for request in job.requests:
            self._tracing.watch(request.id, self._context)

    def spoke(self, arrived_s: float, waits: Waits) -> None:
        placed_s = arrived_s + waits.queue
        self._spoke_s = arrived_s + waits.first_token
        self._tracing.add("queue", self._context, arrived_s, placed_s)
        if waits.load > 0:
            self._tracing.add("load", self._context, placed_s, placed_s + waits.load)
        self._tracing.add("first token", self._context, min(placed_s + waits.load, self._spoke_s), self._spoke_s)

    def unwatch(self, job: GenerationRequest, usage: UsageCount) -> None:
        total = usage.total()
        self._span.set_attribute("gen_ai.usage.input_tokens", total.prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", total.completion_tokens)
        if self._spoke_s is not None:
            self._tracing.add("answer", self._context, self._spoke_s, time.monotonic())
        for request in job.requests:
            self._tracing.unwatch(request.id)

    def status(self, code: int) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("http.response.status_code", code)
        if code >= 500:
            self._span.set_status(StatusCode.ERROR)

    def end(self, scope: Scope) -> None:
        route = getattr(scope.get("route"), "path", None)
        if route is not None:
            self._span.update_name(f"{scope['method']} {route}")
            self._span.set_attribute("http.route", route)
        self._span.end()


class TracedRequests:
    """The span of each HTTP request, as plain ASGI."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = self._tracing.begin(scope) if scope["type"] == "http" else None
        if trace is None:
            return await self._app(scope, receive, send)
        scope.setdefault("state", {})["trace"] = trace

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            trace.end(scope)
