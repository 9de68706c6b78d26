"""Speculative decoding without a model: proposals, how many are worth their rows, and what a node counts of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from driver_builders import Rig, expected, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.node.drafting import longest_decode_s
from dovetail.node.events import Computed
from dovetail.policy.speculation import Acceptance, Proposal, plan_drafts
from dovetail.policy.work import Work
from dovetail.sched.lookup import MAX_MATCH, LookupIndex, Match
from dovetail.sched.sequence import Sequence
from dovetail.types import FinishReason, SamplingParams, Speculation
from dovetail.worker.speculation import RETRY_EVERY, Costs, Speculator

# Lookup


def found(tokens: list[int], count: int = 4, prediction: tuple[int, ...] = ()) -> Match | None:
    index = LookupIndex(prediction)
    index.extend(tokens)
    return index.find(count)


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert found([1, 2, 3, 4, 5, 6, 9, 2, 3]) == Match(2, [4, 5, 6, 9])


def test_nothing_is_proposed_after_tokens_that_are_new() -> None:
    assert found([1, 2, 3, 4]) is None
    assert found([1, 2, 3, 9, 3]) is None  # one token alone
    assert found([]) is None


def test_the_longest_match_is_taken_and_of_equal_ones_the_latest() -> None:
    assert found([7, 1, 2, 50, 8, 1, 2, 60, 9, 1, 2, 70, 7, 1, 2], 1) == Match(3, [50])
    assert found([1, 2, 50, 1, 2, 60, 1, 2], 1) == Match(2, [60])


def test_a_period_goes_on() -> None:
    assert found([5, 1, 2, 3, 1, 2, 3], 7) == Match(3, [1, 2, 3, 1, 2, 3, 1])
    assert found([4, 4, 4, 4], 5) == Match(3, [4, 4, 4, 4, 4])


def test_a_prediction_is_found_and_its_end_is_an_end() -> None:
    assert found([1, 2, 10, 11], 8, prediction=(10, 11, 12, 13)) == Match(2, [12, 13])
    assert found([1, 2, 12, 13], 8, prediction=(10, 11, 12, 13)) is None


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6))
def test_an_index_that_grows_finds_what_a_search_finds(tokens: list[int], step: int) -> None:
    index = LookupIndex()
    for end in range(0, len(tokens) + 1, step):
        index.extend(tokens[:end])
        match, text = index.find(5), tokens[:end]
        lengths = {place: _match(text, place) for place in range(1, end - 1)}
        if match is None:
            assert all(length < 2 for length in lengths.values())
        else:
            places = [place for place, length in lengths.items() if length == match.length]
            assert any(text[place + 1] == match.tokens[0] for place in places)


def _match(text: list[int], place: int) -> int:
    length = 0
    while length < MAX_MATCH and length <= place and text[place - length] == text[len(text) - 1 - length]:
        length += 1
    return length


# How many


def test_free_rows_are_all_taken_and_dear_ones_not() -> None:
    sure = [Proposal(6, 0.9)]
    assert plan_drafts(sure, 1, lambda rows: 1.0, 10.0).lengths == [6]
    assert plan_drafts(sure, 1, lambda rows: float(rows), 10.0).lengths == [0]
    assert plan_drafts(sure, 1, lambda rows: 0.5 + 0.5 * rows, 10.0).lengths == [3]
    assert plan_drafts([Proposal(6, 0.4)], 1, lambda rows: 0.5 + 0.5 * rows, 10.0).lengths == [0]


def test_an_iteration_takes_no_longer_than_it_may() -> None:
    assert plan_drafts([Proposal(6, 0.9)], 1, lambda rows: 1.0 + 0.1 * rows, 1.35).lengths == [2]
    assert plan_drafts([Proposal(6, 0.9)], 1, lambda rows: 1.0 + 0.1 * rows, 0.0).lengths == [0]


def test_rows_go_to_those_whose_drafts_are_likely_right() -> None:
    lengths, _ = plan_drafts([Proposal(8, 0.2), Proposal(8, 0.9)], 2, lambda rows: 1.0 + 0.2 * rows, 10.0)
    assert lengths[0] == 0
    assert lengths[1] > 2


@given(
    st.lists(st.tuples(st.integers(0, 8), st.floats(0.0, 1.0)), max_size=5),
    st.floats(0.0, 1.0),
)
def test_drafts_never_cost_more_than_they_are_expected_to_yield(chances: list[tuple[int, float]], row_s: float) -> None:
    proposals, batch = [Proposal(*one) for one in chances], max(len(chances), 1)

    def iteration_s(rows: int) -> float:
        return 1.0 + row_s * (rows - 1)

    lengths, _ = plan_drafts(proposals, batch, iteration_s, 100.0)
    assert all(length <= one.length for length, one in zip(lengths, proposals, strict=True))
    gain = sum(one.chance**k for one, n in zip(proposals, lengths, strict=True) for k in range(1, n + 1))
    assert (batch + gain) / iteration_s(batch + sum(lengths)) >= batch / iteration_s(batch)


def test_a_chance_is_learnt_and_what_was_wrong_is_tried_again() -> None:
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.observe(0, 4)
    assert acceptance.chance(0.8) < 0.2
    for _ in range(200):
        acceptance.fade()
    assert acceptance.chance(0.8) > 0.7
    for _ in range(20):
        acceptance.observe(4, 4)
    assert acceptance.chance(0.8) > 0.95


def make_sequence(tokens: list[int], num_prompt: int = 1) -> Sequence:
    made = Sequence(0, "r", 0, tokens, num_prompt, SamplingParams(max_tokens=99, seed=0))
    made.num_computed = len(tokens) - 1
    return made


def test_proposals_stop_where_rows_cost_more_and_a_request_may_have_none() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2
    free, dear = Costs(lambda rows: 1.0, 9.0), Costs(float, 9.0)
    speculator = Speculator(Speculation("auto", tokens=5))
    assert speculator.propose([make_sequence(text)], 1, lambda: free) == {0: [1, 2, 3, 4, 5]}
    assert speculator.propose([make_sequence(text)], 1, lambda: dear) == {}
    unwilling = make_sequence(text)
    unwilling.speculates = False
    assert speculator.propose([unwilling], 1, lambda: free) == {}


def test_likely_drafts_that_seem_too_dear_are_tried_now_and_then_if_nobody_is_late_by_it() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2
    for costs, tries in ((Costs(float, 9.0), 3), (Costs(float, 2.0), 0)):
        speculator = Speculator(Speculation())
        made = [speculator.propose([make_sequence(text)], 1, lambda costs=costs: costs) for _ in range(RETRY_EVERY * 3)]
        assert [len(drafts[0]) for drafts in made if drafts] == [2] * tries


# On a node


class Knowing(Speculator):
    """Proposes what will come, up to a mistake."""

    def __init__(self, seed: int = 0, most: int = 9) -> None:
        super().__init__(Speculation("always"))
        self._random = random.Random(seed)
        self._most = most

    def propose(
        self, sequences: Iterable[Sequence], batch: int, costs: Callable[[], Costs], *_: object
    ) -> dict[int, list[int]]:
        assert costs().iteration_s(batch + 1) > 0.0
        return {one.id: self._draft(one) for one in sequences}

    def observe(self, *_: object) -> None: ...

    def _draft(self, sequence: Sequence) -> list[int]:
        known = list(sequence.tokens)
        for _ in range(self._random.randint(0, self._most)):
            known.append(next_token(known))
        return [*known[len(sequence.tokens) :], self._random.randrange(97)]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3), st.integers(0, 12))
def test_answers_and_counts_are_right_whatever_the_drafts(seed: int, choices: int, withdrawn_after: int) -> None:
    rig = Rig("ab", max_kv_tokens=160, speculator=lambda: Knowing(seed))
    rig.submit("r", "a", prompt=9, tokens=31, num_choices=choices)
    rig.submit("s", "b", prompt=30, tokens=17)
    rig.submit("gone", "a", prompt=12, tokens=40)
    for _ in range(withdrawn_after):
        if rig.commands:
            rig.finish_load()
        rig.step()
        _check_counts(rig)
    rig.abort("gone")
    rig.run()
    assert all(rig.tokens("r", choice) == expected("r", 9, 31) for choice in range(choices))
    assert rig.tokens("s") == expected("s", 30, 17)
    assert rig.events["s", 0][-1].finish is FinishReason.LENGTH
    assert [event.token for event in rig.events.get(("gone", 0), ())] == expected("gone", 12, 40)[
        : len(rig.events.get(("gone", 0), ()))
    ]
    for runner in rig.driver.runners.values():
        assert runner.scheduler.pool.num_held == 0


def _check_counts(rig: Rig) -> None:
    """The node counts the tokens that the sequences have."""
    home = rig.driver.home
    for state in rig.driver.states.values():
        if state.instance is not None and state.sequence.num_generated:
            assert home.progress(state.id) == state.sequence.num_generated
    for instance in home.node.instances.values():
        running = [rig.driver.states[work].sequence for work in instance.running]
        assert instance.tokens == sum(len(sequence.tokens) for sequence in running)
        held = sum(len(sequence.blocks) for sequence in running)
        assert held <= instance.used_blocks() + len(running)


def test_an_answer_with_right_drafts_takes_fewer_turns_and_is_ahead_of_its_time() -> None:
    turns = {}
    for most in (0, 9):
        rig = Rig("a", speculator=lambda most=most: Knowing(3, most))
        rig.submit("r", "a", prompt=9, tokens=40)
        rig.run()
        (runner,) = rig.driver.runners.values()
        turns[most] = runner.meter.turns
        events = rig.events["r", 0]
        assert sum(event.accepted for event in events) == 40 - turns[most]
    assert turns[9] < turns[0] / 2


def test_a_request_that_moves_on_goes_on_from_the_tokens_that_drafts_gave_it() -> None:
    rig = Rig("a", speculator=lambda: Knowing(5))
    rig.submit("r", "a", prompt=9, tokens=40)
    rig.finish_load()
    for _ in range(4):
        rig.step()
    (instance,) = rig.driver.runners
    assert 4 < len(rig.events["r", 0]) < 40
    rig.driver.home.preempt(instance, "test", rig.clock.now)
    rig.driver.carry_out()
    rig.run()
    assert rig.tokens("r") == expected("r", 9, 40)


def test_a_draft_takes_no_time_that_somebody_else_needs() -> None:
    rig = Rig("ab")
    rig.submit("r", "a", prompt=5, tokens=50)
    rig.submit("s", "b", prompt=5, tokens=50)
    while rig.commands:
        rig.finish_load()
    node = rig.driver.home.node
    while not all(one.running for one in node.instances.values()):
        rig.step()
    turn = node.next_turn(rig.clock.now)
    assert turn is not None
    (other,) = [one for one in node.instances.values() if one is not turn.instance]
    limit_s = longest_decode_s(node, rig.clock.now)
    assert limit_s == pytest.approx(other.running_due_s - other.decode_s() - rig.clock.now)
    assert longest_decode_s(node, other.running_due_s) == 0.0


def test_tokens_of_drafts_are_counted_with_their_own_deadlines() -> None:
    rig = Rig("a")
    rig.submit("r", "a", prompt=5, tokens=50, tpot_s=0.1)
    rig.finish_load()
    for _ in range(3):
        rig.step()
    (instance,) = rig.driver.home.node.instances.values()
    (work,) = instance.running.values()
    assert isinstance(work, Work)
    before = [instance.running_due_s]
    for extra in (0, 2, 5):
        rig.driver.home.node.next_turn(rig.clock.now)
        rig.driver.home.turn_ended(rig.clock.now, (), Computed(extra={work.id: extra} if extra else {}))
        before.append(instance.running_due_s)
    steps = [later - earlier for earlier, later in pairwise(before)]
    assert steps == pytest.approx([work.tpot_s, 3 * work.tpot_s, 6 * work.tpot_s])
