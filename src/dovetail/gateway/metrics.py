"""Prometheus metrics under vLLM's names with the prefix `dovetail:`, plus SLO attainment, cold starts and turns.

One registry per server. Knows messages and numbers; who calls it decides what happened.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dovetail.gateway.exposition import Exposition, expose
from dovetail.gateway.model_metrics import ModelMetrics
from dovetail.gateway.slo import SloOutcome
from dovetail.messages import InstanceStats, Loaded, Stats, ToGateway
from dovetail.types import ServiceClass

# The buckets are vLLM's, so that its dashboards work.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Durations:
    """One model's histogram of what happens at every token: counts without locks, put together when they are asked for.
    Only the gateway's loop writes."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total_s += seconds

    def add_to(self, family: HistogramMetricFamily, model: str) -> None:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = [(bound, float(count)) for bound, count in zip(bounds, accumulate(self._counts), strict=True)]
        family.add_metric([model], buckets, self._total_s)


class DurationsByModel(Collector):
    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._name, self._help, self._bounds = name, help_text, bounds
        self._models: dict[str, Durations] = {}
        registry.register(self)

    def labels(self, model: str) -> Durations:
        return self._models.setdefault(model, Durations(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        for model, durations in self._models.items():
            durations.add_to(family, model)
        yield family


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seen: dict[tuple[str, str], InstanceStats] = {}  # worker counters as of the last Stats
        self.observers: list[Callable[[], None]] = []  # set gauges when these are read
        self._queued: dict[str, int] = {}  # choices without a node, by model
        self._by_model: dict[str, ModelMetrics] = {}
        self._define_gauges()
        self._define_counters()
        self._define_histograms()
        self._define_batches()

    def _define_gauges(self) -> None:
        self.running = self._gauge("num_requests_running", "Requests in the batch.")
        self.waiting = self._gauge("num_requests_waiting", "Requests waiting for a node or their first turn.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 = all.")
        self.attainment = self._gauge("slo_attainment", "Share of requests with targets that met them, 1 = all.")
        self.resident = self._node_gauge("resident_bytes", "Memory of a worker.")
        self.budget = self._node_gauge("memory_budget_bytes", "What weights and KV pools may take.")
        self.planned = self._node_gauge("memory_planned_bytes", "What they take, or are about to.")
        self.overhead = self._node_gauge("turn_overhead_p50_seconds", "Between iterations while there was work.")
        self.resizes = self._node_gauge("kv_resizes", "KV pools resized since the worker started.")

    def _define_counters(self) -> None:
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of all requests.")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated.")
        self.success = self._counter("request_success_total", "Choices that ended.", "finished_reason")
        self.preemptions = self._counter("num_preemptions_total", "Sequences that lost their blocks.")
        self.prefix_queries = self._counter("prefix_cache_queries_total", "Prompt tokens looked up.")
        self.prefix_hits = self._counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.")
        self.turns = self._counter("turns_total", "Iterations.")
        self.turn_tokens = self._counter("turn_tokens_total", "Tokens computed in all iterations.")
        self.turn_seconds = self._counter("turn_seconds_total", "Time in iterations.")
        self.overhead_seconds = self._counter("turn_overhead_seconds_total", "Time between iterations with work there.")
        self.drafted = self._counter("spec_decode_num_draft_tokens_total", "Proposed tokens that were verified.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens_total", "Of these: right.")
        self.slo = self._counter("slo_requests_total", "Requests with targets, by outcome.", "outcome")
        self.class_tokens = self._counter("class_tokens_total", "Tokens by class of the request.", "class", "kind")
        self.class_requests = self._counter(
            "class_requests_total", "Requests that ended, by class and what they got.", "class", "outcome"
        )
        self.resumptions = self._counter("request_resumptions_total", "Requests that went on after a worker died.")
        self.cold_starts = self._counter("cold_starts_total", "Loads that a request waited for.", "tier")
        self.http = Counter(
            "dovetail:http_requests_total", "Answers by route and status.", ["path", "status"], registry=self.registry
        )
        self.restarts = Counter(
            "dovetail:worker_exits_total", "Workers that ended unasked.", ["node"], registry=self.registry
        )

    def _define_histograms(self) -> None:
        """Times are those of requests that somebody waits for."""
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self.inter_token = DurationsByModel(
            "dovetail:inter_token_latency_seconds", "Between tokens of a choice.", _TOKEN_S, self.registry
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to a place on a node.", _REQUEST_S)
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt lengths.", _TOKENS)
        self.request_generation = self._histogram("request_generation_tokens", "Answer lengths.", _TOKENS)
        self.load_seconds = self._histogram("model_load_seconds", "Opening and building a model.", _REQUEST_S)

    def _define_batches(self) -> None:
        def gauge(name: str, help_text: str, *labels: str) -> Gauge:
            return Gauge(f"dovetail:{name}", help_text, labels, registry=self.registry)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"dovetail:{name}", help_text, labels, registry=self.registry)

        self.batches = gauge("batches", "Batches that are kept.", "status")
        self.batch_running = gauge("batch_lines_running", "Lines of batches that are being answered.")
        self.batch_left = gauge("batch_lines_left", "Lines of batches in progress without an answer.")
        self.batch_limit = gauge("batch_lines_limit", "Lines that may run at a time, beside what clients ask.")
        self.batch_storage = gauge("batch_storage_bytes", "Files that are kept.")
        self.batch_lines = counter("batch_lines_total", "Lines answered, on disk.", "result")
        self.batch_tokens = counter("batch_tokens_total", "Tokens of lines of batches.", "kind")
        self.batch_retries = counter("batch_line_retries_total", "Lines that had to be asked again.")

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"dovetail:{name}", help_text, ["model_name"], registry=self.registry)

    def _node_gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"dovetail:{name}", help_text, ["node"], registry=self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"dovetail:{name}", help_text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"dovetail:{name}", help_text, ["model_name"], buckets=buckets, registry=self.registry)

    def render(self, accept: str = "", *, vllm_names: bool = False) -> Exposition:
        """`accept`: the header of that name."""
        for observe in self.observers:
            observe()
        return expose(self.registry, accept, vllm_names=vllm_names)

    def of_model(self, model: str) -> ModelMetrics:
        return self._by_model.setdefault(model, ModelMetrics())

    def observe_ttft(self, model: str, seconds: float) -> None:
        self.ttft.labels(model).observe(seconds)
        self.of_model(model).add_ttft(seconds)

    def observe_end(self, model: str, service_class: ServiceClass, outcome: SloOutcome) -> None:
        """Best effort has no targets: it is answered or not."""
        if service_class is not ServiceClass.BEST_EFFORT:
            self._observe_outcome(model, outcome)
        got = "answered" if outcome == "attained" and service_class is ServiceClass.BEST_EFFORT else outcome
        self.class_requests.labels(model, service_class.name.lower(), got).inc()

    def _observe_outcome(self, model: str, outcome: SloOutcome) -> None:
        self.slo.labels(model, outcome).inc()
        model_metrics = self.of_model(model)
        model_metrics.outcomes[outcome] += 1
        self.attainment.labels(model).set(model_metrics.attainment or 0.0)

    def num_late(self) -> int:
        """Answers that missed their targets, of all models."""
        return sum(model.outcomes["violated"] for model in self._by_model.values())

    def observe_message(self, node: str, message: ToGateway) -> None:
        if isinstance(message, Stats):
            self.resident.labels(node).set(message.resident_bytes)
            self.budget.labels(node).set(message.memory_budget_bytes)
            self.planned.labels(node).set(message.memory_planned_bytes)
            self.overhead.labels(node).set(message.overhead_p50_s)
            self.resizes.labels(node).set(message.resizes)
            for instance in message.instances:
                self._observe_instance(node, instance)
        elif isinstance(message, Loaded) and not message.again:
            self.load_seconds.labels(message.model).observe(message.times.open_s + message.times.build_s)

    def observe_queued(self, queued: Mapping[str, int]) -> None:
        """Choices that no node has taken yet, by model."""
        models = self._queued.keys() | queued.keys()
        self._queued = dict(queued)
        for model in models:
            self._set_gauges(model)

    def forget_node(self, node: str, *, has_ended: bool = True) -> None:
        """Its worker ended: nothing runs there, and the next one counts from zero. Or it cannot be reached."""
        self.restarts.labels(node).inc(has_ended)
        for key in [key for key in self._seen if key[0] == node]:
            del self._seen[key]
            self._set_gauges(key[1])

    def _set_gauges(self, model: str) -> None:
        """Over all nodes that have the model."""
        found = [stats for (_, name), stats in self._seen.items() if name == model]
        total = sum(stats.blocks_total for stats in found)
        self.running.labels(model).set(sum(stats.running for stats in found))
        waiting = sum(stats.waiting for stats in found) + self._queued.get(model, 0)
        self.waiting.labels(model).set(waiting)
        self.kv_usage.labels(model).set(sum(stats.blocks_used for stats in found) / total if total else 0.0)

    def _observe_instance(self, node: str, now: InstanceStats) -> None:
        model = now.model
        before = self._seen.get((node, model))
        self._seen[node, model] = now
        self._set_gauges(model)
        for counter, field in (
            (self.preemptions, "preemptions"),
            (self.prefix_queries, "prefix_queries"),
            (self.prefix_hits, "prefix_hits"),
            (self.turns, "turns"),
            (self.turn_tokens, "turn_tokens"),
            (self.turn_seconds, "turn_seconds"),
            (self.overhead_seconds, "overhead_seconds"),
            (self.drafted, "draft_tokens"),
            (self.accepted, "accepted_tokens"),
        ):
            total = getattr(now, field)
            known = getattr(before, field) if before is not None else 0
            # A model that was loaded anew counts from zero.
            counter.labels(model).inc(total - known if total >= known else total)
