"""When a model whose weights are on their way to a device is handed over: never so that others who compute wait."""

from __future__ import annotations

import threading
import time
from typing import Any

from dovetail.worker.loading import EARLY_S, LoaderThread

SHARES = (0.0, 0.1, 0.5, 0.99, 0.999, 1.0)
BEGUN_S = 10.0  # before the first look


class Weights:
    """A little more of them with each look."""

    def __init__(self) -> None:
        self.looks = 0

    def arrived_share(self) -> float:
        self.looks += 1
        return SHARES[self.looks - 1]


class Runner:
    def __init__(self, executor: Any) -> None:
        self.executor = executor


def share_at_hand_over(*, is_busy: bool) -> float:
    weights = Weights()
    loader = LoaderThread(lambda name: None, lambda: None, None, is_busy=lambda: is_busy)  # type: ignore[arg-type]
    loader._await_weights(Runner(weights), time.monotonic() - BEGUN_S)  # type: ignore[arg-type]
    return SHARES[weights.looks - 1]


def test_where_others_compute_all_of_the_weights_are_there() -> None:
    assert share_at_hand_over(is_busy=True) == 1.0


def test_where_nobody_does_the_first_prompt_begins_when_the_last_layers_will_come_soon() -> None:
    assert BEGUN_S * (1 / 0.99 - 1) > EARLY_S > BEGUN_S * (1 / 0.999 - 1)
    assert share_at_hand_over(is_busy=False) == 0.999


def test_an_executor_that_computes_where_its_weights_lie_is_not_waited_for() -> None:
    loader = LoaderThread(lambda name: None, lambda: None, None)  # type: ignore[arg-type]
    waited = threading.Thread(target=loader._await_weights, args=(Runner(object()), time.monotonic()), daemon=True)
    waited.start()
    waited.join(timeout=5.0)
    assert not waited.is_alive()
