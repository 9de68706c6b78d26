"""What a worker takes in between two iterations."""

from __future__ import annotations

from dovetail import messages
from dovetail.worker.wire import take_in

FLOOD = [messages.Unload(f"model-{number}") for number in range(8)]


def taken(is_over_at: float) -> tuple[list[messages.ToWorker], list[messages.ToWorker]]:
    """What is handled and what is left, where a message takes a second and it is over at that time."""
    waiting: list[messages.ToWorker] = list(FLOOD)
    handled: list[messages.ToWorker] = []
    take_in(lambda: waiting.pop(0) if waiting else None, handled.append, lambda: len(handled) >= is_over_at)
    return handled, waiting


def test_everything_that_has_come_is_taken_in_while_nobody_waits_for_it() -> None:
    assert taken(float("inf")) == (FLOOD, [])


def test_of_a_flood_the_rest_stays_for_the_next_time_in_order() -> None:
    assert taken(3) == (FLOOD[:3], FLOOD[3:])


def test_one_message_is_taken_in_any_case_so_that_a_flood_comes_to_its_end() -> None:
    assert taken(0) == (FLOOD[:1], FLOOD[1:])
