"""Iterations that stop between two layers, where another model's are computed: the same bytes as without a break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from drive import Engine, make_executor, make_request
from tried import tried

from dovetail.engine.executor import CpuExecutor
from dovetail.engine.preemption import PreemptionPoint
from dovetail.native import levels
from dovetail.types import Request, TokenEvent

TinyFolder = Callable[[str], Path]
PROMPT = [(7 * i) % 251 for i in range(70)]
LEVELS = [level for level in levels() if level != "torch"]
# Adapters aside, whatever an iteration keeps from one layer to the next: latents, experts, blocks beside each other.
FAMILIES = ["llama", "gemma3", "mixtral", "opt"]


def requests() -> list[Request]:
    return [
        make_request(PROMPT, id="answer", max_tokens=6, logprobs=2),
        make_request(PROMPT[:40], id="embedding", pooling="mean"),
        make_request(PROMPT[:30], id="read", prompt_logprobs=1, max_tokens=2),
        make_request(PROMPT[5:20], id="beside", max_tokens=3),
    ]


def events_of(executor: CpuExecutor) -> list[TokenEvent]:
    engine = Engine(executor, max_turn_tokens=64)
    for request in requests():
        engine.scheduler.add(request)
    return engine.drain()


@pytest.mark.parametrize("level", tried(LEVELS))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bytes_are_the_same_with_another_models_iterations_in_between(
    tiny_folder: TinyFolder, family: str, level: str
) -> None:
    executor, other = make_executor(tiny_folder(family), level=level), make_executor(tiny_folder("llama"), level=level)
    whole, alone = events_of(executor), events_of(other)
    inner: list[list[TokenEvent]] = []

    def let_in() -> None:
        if len(inner) < 12:
            executor.preemption, kept = None, executor.preemption  # as a runner has it
            inner.append(events_of(other))
            executor.preemption = kept

    executor.preemption = preemption = PreemptionPoint(0.0, let_in)
    assert events_of(executor) == whole
    assert len(inner) == 12
    assert all(events == alone for events in inner)
    assert preemption.away_s > 0.0
    executor.preemption = None
    assert events_of(executor) == whole


@pytest.mark.parametrize("level", LEVELS[-1:])
def test_an_iteration_that_was_given_up_in_the_middle_leaves_nothing_behind(
    tiny_folder: TinyFolder, level: str
) -> None:
    executor = make_executor(tiny_folder("llama"), level=level)
    whole = events_of(executor)

    def fail() -> None:
        raise KeyboardInterrupt

    executor.preemption = PreemptionPoint(0.0, fail)
    with pytest.raises(KeyboardInterrupt):
        events_of(executor)
    executor.preemption = None
    assert events_of(executor) == whole


def test_torchs_level_does_not_stop(tiny_folder: TinyFolder) -> None:
    executor = make_executor(tiny_folder("llama"), level="torch")
    whole = events_of(executor)
    executor.preemption = PreemptionPoint(0.0, lambda: pytest.fail("it stopped"))
    assert events_of(executor) == whole
