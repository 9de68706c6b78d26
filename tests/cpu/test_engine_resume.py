"""A request that goes on elsewhere from its tokens says exactly what it would have said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drive import Engine, make_executor, make_request

from dovetail.types import Grammar, TokenEvent

PROMPT = [72, 101, 108, 108, 111] * 4
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.5, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.9, "temperature": 0.8},
    "barred ends": {"min_tokens": 20, "stop_token_ids": tuple(range(0, 300, 2))},
    "log-probabilities": {"logprobs": 3, "temperature": 1.0},
    "a grammar": {"grammar": Grammar("regex", "(ab|cd)[0-9]{20}"), "temperature": 2.0},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_rest_of_a_resumed_answer_is_that_of_an_undisturbed_one(
    tiny_folder: Callable[[str], Path], way: str
) -> None:
    folder = tiny_folder("llama")
    # In float64, so that rounding cannot decide an argmax or a draw.
    options = {"dtype": "f64", "tokenizer_file": str(folder / "tokenizer.json"), "eos_token_ids": (256,)}
    request = make_request(PROMPT, max_tokens=24, seed=11, num_choices=2, **WAYS[way])
    whole = events_of(Engine(make_executor(folder, **options)), request)
    assert all(len(events) > 12 for events in whole.values())
    parts = {choice: tuple(event.token or 0 for event in events[: 5 + choice]) for choice, events in whole.items()}
    resumed = msgspec.structs.replace(request, generated=(parts[0], parts[1]))
    rest = events_of(Engine(make_executor(folder, **options), max_turn_tokens=7), resumed)
    for choice, events in whole.items():
        assert described(rest[choice]) == described(events[5 + choice :])


def events_of(engine: Engine, request: Any) -> dict[int, list[TokenEvent]]:
    engine.scheduler.add(request)
    found: dict[int, list[TokenEvent]] = {}
    for event in engine.drain():
        found.setdefault(event.choice, []).append(event)
    return found


def described(events: list[TokenEvent]) -> list[Any]:
    """Everything that a client sees; log-probabilities as far as rounding reaches."""
    return [
        (event.token, event.finish, None if event.logprobs is None else round(event.logprobs.chosen, 9))
        for event in events
    ]
