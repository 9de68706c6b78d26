"""How long answers will be, and what contexts will hold when they have grown."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.policy.lengths import AnswerLengths, Likeness, expected_length, most_tokens


@pytest.mark.parametrize("seed", range(5))
def test_models_are_alike_if_their_answers_differ_no_less_than_those_of_others(seed: int) -> None:
    random = Random(seed)
    alike, different = Likeness(), Likeness()
    for number in range(1, 300):
        model = random.randrange(20)
        length = random.lognormvariate(5.0, 0.7)
        alike.add(str(model), int(length))
        different.add(str(model), int(length * 2.0 ** (model % 10)))
        assert number < 100 or (alike.is_seen and not different.is_seen)


def test_each_model_has_a_mean_of_its_own() -> None:
    lengths = AnswerLengths()
    for _ in range(60):
        lengths.add("short", 10)
        lengths.add("long", 2000)
    assert lengths.mean("short", 256.0, ()) < 40
    assert 1700 < lengths.mean("long", 256.0, ()) < 2000
    assert lengths.mean("unknown", 256.0, ()) == 256.0


def test_answers_that_run_on_raise_the_mean() -> None:
    lengths = AnswerLengths()
    lengths.add("a", 100)
    assert lengths.mean("a", 100.0, [40, 90]) == 100.0  # not longer than expected: they say nothing yet
    young = lengths.mean("a", 100.0, [300] * 10)
    assert 300 < young < lengths.mean("a", 100.0, [900] * 10)


def test_while_none_has_ended_many_that_run_speak_for_long_answers() -> None:
    lengths = AnswerLengths()
    assert lengths.mean("a", 100.0, []) == 100.0
    assert lengths.mean("a", 100.0, [90] * 40) == 360.0  # had they a mean of 100, some would have ended
    assert lengths.mean("a", 100.0, [90] * 2) == 190.0
    lengths.add("a", 100)
    assert lengths.mean("a", 100.0, [90] * 40) == 100.0


def test_what_is_told_of_a_running_answer_counts_until_it_ends() -> None:
    lengths = AnswerLengths()
    lengths.add("a", 100)
    before = lengths.mean_known("a", 100.0)
    lengths.runs("a", 7, 1000)
    assert lengths.mean_known("a", 100.0) > 2 * before
    lengths.ended(7)
    lengths.ended(8)
    assert lengths.mean_known("a", 100.0) == before


def test_an_answer_that_has_outlived_the_mean_goes_on_for_as_long() -> None:
    assert expected_length(100.0, 0) == 100.0
    assert expected_length(100.0, 100) == 100.0
    assert expected_length(100.0, 250) == 400.0


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200)), min_size=1, max_size=8),
    st.integers(1, 150),
)
def test_the_most_that_requests_hold_is_what_playing_them_to_their_ends_shows(
    lengths: list[tuple[int, int]], mean: int
) -> None:
    count, tokens = most_tokens(lengths, float(mean))
    ends = [max(int(expected_length(mean, produced)), produced + 1) for _, produced in lengths]
    most = 0
    for step in range(max(ends) + 1):
        alive = [given + made + step for (given, made), end in zip(lengths, ends, strict=True) if made + step <= end]
        most = max(most, sum(alive))
    assert tokens == pytest.approx(most)
    assert 1 <= count <= len(lengths)
