"""Chunks cut from a frame are what building each from records gives; token times are what Prometheus would count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from dovetail.gateway.generation_task import Delta
from dovetail.gateway.http.answers import ReplyOptions, UsageCount
from dovetail.gateway.http.chat_reply import ChatReply
from dovetail.gateway.http.text_reply import TextReply
from dovetail.gateway.metrics import DurationsByModel
from dovetail.types import FinishReason

TEXTS = st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6), min_size=2, max_size=6)


@dataclass(frozen=True)
class Slowly(ReplyOptions):
    """Builds every chunk from records."""

    @property
    def is_plain(self) -> bool:
        return False


class _Model:
    name = 'any "model"'
    vocabulary: Any = None


class _Request:
    num_choices = 2


class _Job:
    id = "1"
    model = _Model()
    requests = (_Request(),)
    warnings = ()


def chunks(kind: Any, options: ReplyOptions, texts: list[str]) -> list[bytes]:
    reply = kind(_Job(), 7, options)
    told: list[bytes] = []
    usage = UsageCount(3)
    for number, text in enumerate(texts):
        end = FinishReason.LENGTH if number == len(texts) - 1 else None
        delta = Delta(number % 2, text, [number], finish=end)
        usage.add(delta)
        chunk = reply.chunk(delta, usage)
        told.append(chunk if isinstance(chunk, bytes) else chunk.model_dump_json(exclude_unset=True).encode())
    return told


@pytest.mark.parametrize("kind", [ChatReply, TextReply])
@given(texts=TEXTS, with_usage=st.booleans())
def test_a_chunk_is_the_same_however_it_is_made(kind: Any, texts: list[str], with_usage: bool) -> None:
    fast = chunks(kind, ReplyOptions(with_usage=with_usage), texts)
    assert fast == chunks(kind, Slowly(with_usage=with_usage), texts)


@given(st.lists(st.floats(0.0, 5.0), max_size=50))
def test_token_times_are_counted_as_prometheus_counts_them(seconds: list[float]) -> None:
    bounds, ours, theirs = (0.01, 0.1, 1.0, 2.5), CollectorRegistry(), CollectorRegistry()
    durations = DurationsByModel("dovetail:x_seconds", "Times.", bounds, ours)
    histogram = Histogram("dovetail:x_seconds", "Times.", ["model_name"], buckets=bounds, registry=theirs)
    for value in seconds:
        durations.labels("m").observe(value)
        histogram.labels("m").observe(value)
    wanted = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == wanted
