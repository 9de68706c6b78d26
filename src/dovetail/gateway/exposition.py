"""What `/metrics` answers: the text format or OpenMetrics, whichever the client accepts, and on request vLLM's names.

Knows the form of metrics only; what they count is `metrics`'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from prometheus_client import Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector, CollectorRegistry

_OPENMETRICS, _VERSION = "application/openmetrics-text", "version=1.0.0; charset=utf-8"
# The library by itself writes `:`, which needs no escape, as `_`.
_write_openmetrics: Callable[[Collector], bytes] = partial(openmetrics.generate_latest, escaping="allow-utf-8")
OWN_PREFIX, VLLM_PREFIX = "dovetail:", "vllm:"

# Families that vLLM exports under the same name, in the same unit and with the same meaning.
VLLM_FAMILIES = frozenset(
    f"{OWN_PREFIX}{name}"
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    )
)


class Exposition(NamedTuple):
    body: bytes
    content_type: str


class BothNames(Collector):
    """A registry's families, and those that vLLM has too under its name as well."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            if family.name in VLLM_FAMILIES:
                yield _as_vllm(family)


def expose(registry: CollectorRegistry, accept: str, *, vllm_names: bool) -> Exposition:
    families = BothNames(registry) if vllm_names else registry
    if _accepts_openmetrics(accept):
        return Exposition(_write_openmetrics(families), f"{_OPENMETRICS}; {_VERSION}")
    return Exposition(generate_latest(families), CONTENT_TYPE_PLAIN_0_0_4)


def _accepts_openmetrics(accept: str) -> bool:
    """Named, in a version that is written here, and not ranked below the text format."""
    ranks = {"text": 0.0, "openmetrics": 0.0}
    for entry in accept.lower().split(","):
        kind, *options = (part.strip() for part in entry.split(";"))
        given = dict(option.split("=", 1) for option in options if "=" in option)
        if kind == "text/plain":
            ranks["text"] = max(ranks["text"], _rank(given))
        elif kind == _OPENMETRICS and given.get("version", "1.0.0") == "1.0.0":
            ranks["openmetrics"] = max(ranks["openmetrics"], _rank(given))
    return 0 < ranks["openmetrics"] >= ranks["text"]


def _rank(options: Mapping[str, str]) -> float:
    try:
        return float(options.get("q", "1"))
    except ValueError:
        return 0.0


def _as_vllm(family: Metric) -> Metric:
    renamed = Metric(_renamed(family.name), family.documentation, family.type, family.unit)
    renamed.samples = [
        sample._replace(name=_renamed(sample.name), labels=_vllm_labels(sample.labels.items()))
        for sample in family.samples
    ]
    return renamed


def _renamed(name: str) -> str:
    return VLLM_PREFIX + name.removeprefix(OWN_PREFIX)


def _vllm_labels(labels: Iterable[tuple[str, str]]) -> dict[str, str]:
    """vLLM calls an answer whose client went away "abort"."""
    return {key: "abort" if (key, value) == ("finished_reason", "aborted") else value for key, value in labels}
