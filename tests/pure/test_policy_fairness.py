"""Who gives way to a newcomer."""

from __future__ import annotations

from dovetail.policy.fairness import QUANTUM_TOKENS, Running, who_gives_way


def test_nobody_gives_way_who_asked_for_targets_or_has_just_begun() -> None:
    assert who_gives_way([]) is None
    assert who_gives_way([Running(0, 0, 5000, True), Running(1, 1, QUANTUM_TOKENS - 1, False)]) is None


def test_the_longest_answer_gives_way_when_all_are_alone() -> None:
    running = [Running(0, 0, 150, False), Running(1, 1, 400, False), Running(2, 2, 900, True)]
    assert who_gives_way(running) == 1


def test_a_request_with_many_choices_gives_way_before_any_other() -> None:
    running = [Running(0, 0, 4000, False), *(Running(id, 1, id, False) for id in range(1, 6))]
    assert who_gives_way(running) == 5


def test_the_last_choice_of_a_request_has_its_quantum() -> None:
    assert who_gives_way([Running(7, 3, 10, False)]) is None
