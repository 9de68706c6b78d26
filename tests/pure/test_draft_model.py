"""A draft model on a node: its blocks are those of the model that it drafts for, on every path that these take, and its
time is counted."""

from __future__ import annotations

from typing import Any

import pytest
from driver_builders import BLOCK, CheckedExecutor, Rig, expected, next_token
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import make_latency

from dovetail.policy.speculation import Proposal, drafting_gain, is_worth_catching_up, plan_drafts
from dovetail.profiles.live import LiveLatency
from dovetail.sched.blocks import BlockPool
from dovetail.sched.drafts import reserve, trim
from dovetail.sched.lookup import LookupIndex
from dovetail.sched.sequence import Sequence
from dovetail.sched.turn import Outcome, RowOutcome, Turn, TurnRow
from dovetail.types import SamplingParams, Speculation
from dovetail.worker.draft_model import DraftModel
from dovetail.worker.speculation import Costs, Speculator

# How many


def iteration_s(rows: int) -> float:
    return 1.0 + 0.05 * rows


def steps_of(seconds: float) -> Any:
    return lambda step, count: seconds * (1.0 + 0.1 * count)


def test_a_draft_model_is_asked_for_as_much_as_its_steps_are_worth() -> None:
    sure = [Proposal(6, 0.9, is_drafted=True)]
    assert plan_drafts(sure, 1, iteration_s, 100.0, steps_of(0.01)).lengths == [6]
    assert plan_drafts(sure, 1, iteration_s, 100.0, steps_of(0.3)).lengths == [4]
    assert plan_drafts(sure, 1, iteration_s, 100.0, steps_of(1.0)).lengths == [0]
    assert plan_drafts([Proposal(6, 0.2, is_drafted=True)], 1, iteration_s, 100.0, steps_of(0.1)).lengths == [0]


def test_the_time_that_drafting_takes_is_part_of_what_an_iteration_may_take() -> None:
    sure = [Proposal(6, 0.9, is_drafted=True)]
    for most_s, length in ((1.2, 0), (1.4, 2), (2.5, 6)):  # each token: 0.11 to draft and 0.05 to verify
        assert plan_drafts(sure, 1, iteration_s, most_s, steps_of(0.1)).lengths == [length]


def test_several_share_the_steps_of_a_draft_model() -> None:
    four = [Proposal(4, 0.8, is_drafted=True)] * 4
    assert plan_drafts(four, 4, iteration_s, 100.0, lambda step, count: 0.3).lengths >= [1] * 4
    assert plan_drafts(four, 4, iteration_s, 100.0, lambda step, count: 0.3 * count).lengths == [0] * 4


@given(st.floats(0.0, 1.0), st.integers(1, 8), st.integers(1, 4), st.floats(0.01, 1.0))
def test_a_quick_look_sees_the_gain_that_weighing_each_finds(
    chance: float, length: int, count: int, step: float
) -> None:
    proposal = Proposal(length, chance, is_drafted=True)
    _, rate = plan_drafts([proposal] * count, count, iteration_s, 1e9, steps_of(step))
    gain = drafting_gain(proposal, count, count, iteration_s, steps_of(step))
    assert rate / (count / iteration_s(count)) <= gain * 1.06 + 1e-9 or count > 1
    assert gain >= 1.0


def test_a_text_is_read_when_drafts_would_have_saved_what_reading_takes() -> None:
    assert not is_worth_catching_up(5, 0.1, 2.0, 0.5)
    assert is_worth_catching_up(10, 0.1, 2.0, 0.5)
    assert not is_worth_catching_up(10**6, 0.1, 1.0, 0.5)


# Room


def make_sequence(id: int, tokens: int, blocks: int, pool: BlockPool, longest: int = 99) -> Sequence:
    made = Sequence(id, "r", id, [token % 90 for token in range(tokens)], 1, SamplingParams(max_tokens=99, seed=0))
    made.blocks, made.num_computed, made.longest = pool.allocate(blocks) or [], tokens - 1, longest
    return made


def test_drafts_reserve_no_block_that_the_iteration_needs() -> None:
    for blocks, wanted, granted in (
        (6, {0: 4, 1: 3}, {0: 4, 1: 3}),
        (5, {0: 4, 1: 3}, {1: 3}),  # the one that is left is the second's: it needs one for its own token
        (5, {0: 4}, {}),
        (4, {0: 4, 1: 3}, {}),
    ):
        pool = BlockPool(blocks, BLOCK)
        both = [make_sequence(0, 8, 2, pool), make_sequence(1, 9, 2, pool)]
        assert reserve(both, wanted, pool) == granted
        for one in both:
            trim(one, pool, granted.get(one.id, 0))
            assert len(one.blocks) == (3 if one.id in granted else 2)
            trim(one, pool)
        pool.check()


def test_drafts_reserve_no_more_than_an_answer_may_have() -> None:
    pool = BlockPool(9, BLOCK)
    one = make_sequence(0, 8, 2, pool, longest=10)  # seven are there, and the iteration itself yields one
    assert reserve([one], {0: 8}, pool) == {0: 2}
    assert len(one.blocks) == 3


# On a node


@pytest.fixture
def no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """These texts repeat themselves, which would be found without a model."""
    monkeypatch.setattr(LookupIndex, "find", lambda *_: None)


class Guesser(CheckedExecutor):
    """Says what the model will say, but for one text in `wrong`."""

    wrong = 3
    fails_after = 10**9
    num_runs = 0
    num_rows = 0

    def run(self, turn: Turn) -> Outcome:
        self.num_runs += 1
        self.num_rows += turn.num_tokens
        if self.num_runs > self.fails_after:
            raise ArithmeticError("broken")
        self.launch(turn)
        return self.collect()

    def _compute(self, turn: Turn, chosen: dict[int, int]) -> tuple[Outcome, float]:
        return super()._compute(turn, chosen)[0], self.token_s

    def _chosen(self, row: TurnRow, tokens: Any) -> RowOutcome:
        shift = int(self.wrong > 0 and sum(tokens) % max(self.wrong, 1) == 0)
        return RowOutcome(row.sequence, (next_token(tokens) + shift) % 97)

    def resize(self, num_blocks: int, moves: Any = ()) -> None:
        for block, _ in moves:
            self.content.setdefault(block, {})  # what it was never asked to compute
        super().resize(num_blocks, moves)


class DraftRig(Rig):
    """Each model has a draft, which takes a tenth of its time."""

    def __init__(self, models: str, mode: Any = "auto", wrong: int = 3, draft_s: float = 5e-4, **options: Any) -> None:
        self.mode, self.wrong, self.draft_s = mode, wrong, draft_s
        self.guessers: list[Guesser] = []
        super().__init__(models, speculator=self.make, token_s=0.0, **options)

    def make(self) -> Speculator:
        guesser = Guesser(self.clock, self.max_kv_tokens // BLOCK, token_s=self.draft_s)
        guesser.wrong = self.wrong
        self.guessers.append(guesser)
        latency = LiveLatency(make_latency(decode_s=self.draft_s, prefill_s_per_k=self.draft_s * 100))
        model = DraftModel(guesser, latency, 4096, (97, 97), self.clock)
        return Speculator(Speculation(self.mode, 5), model)

    def check_free(self) -> None:
        for runner in self.driver.runners.values():
            assert runner.scheduler.pool.num_held == 0
            assert runner.speculator is not None
            assert runner.speculator.model is not None
            assert not runner.speculator.model._progress


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["auto", "always"]), st.integers(0, 4), st.integers(1, 3), st.integers(0, 14), st.integers(0, 14)
)
def test_answers_are_right_and_blocks_free_whatever_happens_to_a_draft(
    mode: str, wrong: int, choices: int, withdrawn_after: int, moved_after: int
) -> None:
    rig = DraftRig("ab", mode, wrong, max_kv_tokens=160)
    rig.submit("r", "a", prompt=9, tokens=31, num_choices=choices)
    rig.submit("s", "b", prompt=30, tokens=17)
    rig.submit("gone", "a", prompt=12, tokens=40)
    for step in range(15):
        if rig.commands:
            rig.finish_load()
        if step == withdrawn_after:
            rig.abort("gone")
        if step == moved_after and rig.driver.runners:
            rig.driver.home.preempt(next(iter(rig.driver.runners)), "test", rig.clock.now)
            rig.driver.carry_out()
        rig.step()
    rig.run()
    assert all(rig.tokens("r", choice) == expected("r", 9, 31) for choice in range(choices))
    assert rig.tokens("s") == expected("s", 30, 17)
    rig.check_free()


@pytest.mark.usefixtures("no_lookup")
def test_a_model_with_a_right_draft_takes_fewer_turns_and_one_with_a_wrong_draft_leaves_it() -> None:
    turns, runs = {}, {}
    for wrong in (0, 1):
        rig = DraftRig("a", wrong=wrong)
        rig.submit("r", "a", prompt=9, tokens=400)
        rig.run()
        assert rig.tokens("r") == expected("r", 9, 400)
        (runner,), (guesser,) = rig.driver.runners.values(), rig.guessers
        turns[wrong], runs[wrong] = runner.meter.turns, guesser.num_runs
        rig.check_free()
    assert turns[0] < 400 / 3
    assert turns[1] >= 399
    assert runs[1] < 60, "it was asked again and again"


@pytest.mark.usefixtures("no_lookup")
def test_a_draft_as_slow_as_the_model_is_tried_now_and_then_only() -> None:
    rig = DraftRig("a", wrong=0, draft_s=0.005)
    runs = []
    for id in "rst":
        rig.submit(id, "a", prompt=9, tokens=300)
        rig.run()
        (guesser,) = rig.guessers
        runs.append(guesser.num_runs)
    assert runs[0] > 0, "what it takes is not known before it was tried"
    assert runs[2] - runs[0] < 20
    rig.check_free()


@pytest.mark.usefixtures("no_lookup")
def test_the_time_of_a_draft_is_no_time_of_the_model() -> None:
    """Else what admission expects of a decode would grow with drafts."""
    rig = DraftRig("a", "always", wrong=1, draft_s=0.05)
    rig.submit("r", "a", prompt=9, tokens=60)
    rig.run()
    assert rig.driver.hostings["a"].latency.decode_s(6, 6 * 40) == pytest.approx(0.005, rel=0.05)


@pytest.mark.usefixtures("no_lookup")
def test_a_prompt_that_is_in_the_cache_is_in_that_of_the_draft() -> None:
    rig = DraftRig("a", wrong=0)
    rows = []
    for _ in range(2):
        (*_, guesser) = rig.guessers or [None]
        before = guesser.num_rows if guesser is not None else 0
        rig.submit("r", "a", prompt=120, tokens=60)
        rig.run()
        assert rig.tokens("r") == expected("r", 120, 60)
        rows.append(rig.guessers[0].num_rows - before)
        rig.events.clear()
    assert rows[0] >= 120
    assert rows[1] <= rows[0] - 110


@pytest.mark.usefixtures("no_lookup")
def test_a_draft_model_that_fails_is_given_up_and_nobody_notices() -> None:
    rig = DraftRig("a", wrong=0)
    rig.submit("r", "a", prompt=9, tokens=60)
    rig.finish_load()
    (guesser,) = rig.guessers
    guesser.fails_after = 7
    rig.run()
    assert rig.tokens("r") == expected("r", 9, 60)
    assert guesser.is_closed
    assert all(runner.scheduler.pool.num_held == 0 for runner in rig.driver.runners.values())


def test_a_draft_model_goes_with_its_model() -> None:
    rig = DraftRig("a")
    rig.submit("r", "a", prompt=9, tokens=20)
    rig.run()
    (guesser,) = rig.guessers
    assert guesser.num_blocks == rig.executors[0].num_blocks > 0
    rig.unload("a")
    assert guesser.is_closed


@pytest.mark.usefixtures("no_lookup")
def test_a_draft_takes_no_time_that_somebody_else_needs() -> None:
    """Who is due is due, and a text that the draft has not read can wait."""
    speculator = DraftRig("a").make()
    model = speculator.model
    assert model is not None
    pool = BlockPool(99, BLOCK)
    model.resize(99)
    one = make_sequence(0, 200, 51, pool)
    one.num_prompt = 60
    for most_s, is_read in ((0.0, False), (0.02, False), (10.0, True)):
        for _ in range(30):
            speculator.propose([one], 1, lambda most_s=most_s: Costs(lambda rows: 0.02, most_s), pool)
        assert (model.lag(one, pool) < 200) == is_read
