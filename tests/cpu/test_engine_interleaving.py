"""The real engine under any interleaving, in float64 so that rounding cannot decide an argmax or a draw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drive import Engine, make_executor, make_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.engine.executor import CpuExecutor
from dovetail.types import TokenEvent

# One of each kind of attention: plain GQA, a window on every layer, windows on some, learned positions, experts.
FAMILIES = ["llama", "mistral", "gemma3", "opt", "mixtral"]

REQUESTS = st.tuples(
    st.integers(1, 40),  # prompt length
    st.integers(0, 2),  # which prompt text: equal ones share a prefix
    st.integers(1, 10),  # tokens to make
    st.booleans(),  # greedy or drawn
    st.integers(1, 2),  # choices
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), REQUESTS),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("resize"), st.integers(14, 30)),
        st.tuples(st.just("release")),
    ),
    min_size=3,
    max_size=16,
)


def request_of(id: str, drawn: tuple[int, int, int, bool, int]) -> Any:
    length, text, max_tokens, greedy, choices = drawn
    prompt = [(7 * i * i + 13 * text) % 300 for i in range(length)]
    return make_request(
        prompt,
        id=id,
        max_tokens=max_tokens,
        num_choices=choices,
        seed=5 + text,
        temperature=0.0 if greedy else 3.0,
        top_p=1.0 if length % 2 else 0.95,
    )


def alone(executor: CpuExecutor, request: Any) -> dict[tuple[str, int], list[int]]:
    return Engine(executor, max_turn_tokens=100).run(request)


@pytest.fixture(params=FAMILIES, scope="module")
def executor(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> CpuExecutor:
    return make_executor(tiny_folder(request.param), dtype="f64")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=ACTIONS, budget=st.integers(1, 24), batch=st.integers(1, 5))
def test_any_interleaving_gives_the_same_tokens_as_each_request_alone(
    executor: CpuExecutor, actions: list[Any], budget: int, batch: int
) -> None:
    executor.resize(executor.max_blocks)
    drawn = [action[1] for action in actions if action[0] == "add"]
    requests = [request_of(f"r{i}", one) for i, one in enumerate(drawn)]
    wanted: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        wanted |= alone(executor, request)
    assert interleaved(executor, actions, budget, batch) == wanted


def interleaved(executor: CpuExecutor, actions: list[Any], budget: int, batch: int) -> dict[tuple[str, int], list[int]]:
    engine = Engine(executor, num_blocks=16, max_turn_tokens=budget, max_batch=batch)
    events: list[TokenEvent] = []
    for i, action in enumerate(actions):
        match action:
            case ("add", drawn):
                engine.scheduler.add(request_of(f"r{i}", drawn))
            case ("step", count):
                for _ in range(count):
                    events.extend(engine.step())
            case ("resize", size):  # the pool and its memory follow each other: eviction, retirement, fresh pages
                engine.pool.resize(size)
                executor.resize(engine.pool.committed)
            case ("release",):
                engine.pool.drop_cache()
    executor.resize(engine.pool.committed)
    events.extend(engine.drain())
    assert engine.pool.num_held == 0
    tokens: dict[tuple[str, int], list[int]] = {}
    for event in events:
        assert event.error is None
        # Requests are named by their place among the actions; the reference by their place among the requests.
        name = f"r{sum(a[0] == 'add' for a in actions[: int(event.request_id[1:])])}"
        tokens.setdefault((name, event.choice), []).append(event.token)
    return tokens
