"""SLOs, and shadow validation with its three cases."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.policy.headroom import (
    INFINITY,
    Candidate,
    InstanceDemand,
    Prefill,
    Refusal,
    SloRule,
    choose_turn,
    guards_decodes,
    validate_closed,
)
from dovetail.policy.shadow import MAX_TURNS, _infeasible
from dovetail.policy.shadow import validate as validate_played
from dovetail.policy.turn_rule import TurnRule

EMPTY = InstanceDemand(INFINITY, INFINITY, 0.0, 0.0, INFINITY)
RULE = TurnRule()


def decoding(deadline_s: float, decode_s: float = 0.05, tpot_s: float = 0.25) -> InstanceDemand:
    return InstanceDemand(deadline_s, deadline_s, 0.0, decode_s, tpot_s, batch=1)


def prefilling(*due_s: float, seconds: float = 0.1, ready_s: float = 0.0, decode_s: float = 0.05) -> InstanceDemand:
    waiting = tuple(Prefill(due, due, seconds, 0.25) for due in due_s)
    total_s = seconds * len(waiting)
    return InstanceDemand(
        due_s[0], INFINITY, total_s, decode_s, 0.25, batch=len(waiting), ready_s=ready_s, prefills=waiting
    )


def candidate(due_s: float, prefill_s: float, decode_s: float, tpot_s: float, urgent_s: float = INFINITY) -> Candidate:
    return Candidate(Prefill(due_s, min(due_s, urgent_s), prefill_s, tpot_s), decode_s)


def joiner(deadline_s: float = 1.0, prefill_s: float = 0.1, decode_s: float = 0.05) -> Candidate:
    return candidate(deadline_s, prefill_s, decode_s, 0.25)


def play(demands: list[InstanceDemand], candidate: Candidate, start_s: float = 0.0) -> Refusal | None:
    """The candidate joins the last one."""
    return validate_played(demands, len(demands) - 1, candidate, start_s, RULE)


def both(demands: list[InstanceDemand], target: int, candidate: Candidate, start_s: float) -> Refusal | None:
    """What the closed form and the play agree on."""
    closed = validate_closed(demands, target, candidate, start_s)
    assert validate_played(demands, target, candidate, start_s, RULE) is closed
    return closed


@pytest.mark.parametrize(("tokens", "seconds"), [(10, 0.5), (256, 0.5), (1024, 2.0), (4096, 8.0), (9000, 8.0)])
def test_the_ttft_slo_follows_the_input_between_floor_and_cap(tokens: int, seconds: float) -> None:
    assert SloRule().ttft_s(tokens) == seconds


def test_an_idle_node_takes_a_request_that_meets_its_deadline() -> None:
    assert both([EMPTY], 0, joiner(), 0.0) is None


def test_case_1_the_new_requests_first_token_is_late() -> None:
    assert both([EMPTY], 0, joiner(prefill_s=1.1), 0.0) is Refusal.FIRST_TOKEN_LATE
    assert both([EMPTY], 0, joiner(), 0.95) is Refusal.FIRST_TOKEN_LATE


def test_case_1_counts_every_iteration_that_neighbours_run_before() -> None:
    """Due in 0.1 s and paced at 0.25 s, the neighbour runs four iterations of 0.2 s before the deadline of 1 s."""
    neighbour = decoding(0.1, decode_s=0.1)
    assert both([neighbour, EMPTY], 1, joiner(prefill_s=0.59), 0.0) is None
    assert both([neighbour, EMPTY], 1, joiner(prefill_s=0.61), 0.0) is Refusal.FIRST_TOKEN_LATE


def test_case_2_a_neighbours_next_token_is_late() -> None:
    neighbour = decoding(1.05, decode_s=0.1)
    assert both([neighbour, EMPTY], 1, joiner(prefill_s=0.99), 0.0) is Refusal.NEIGHBOUR_LATE


def test_case_2_the_targets_own_running_requests_count() -> None:
    own = decoding(0.3)
    assert both([own], 0, joiner(prefill_s=0.26), 0.0) is Refusal.NEIGHBOUR_LATE
    assert both([own], 0, joiner(prefill_s=0.24), 0.0) is None


def test_case_3_one_iteration_of_everybody_exceeds_the_pace() -> None:
    loads = [decoding(5.0, 0.1), decoding(5.0, 0.1), EMPTY]
    assert both(loads, 2, joiner(decode_s=0.06), 0.0) is Refusal.DECODE_OVERCOMMITTED
    assert both(loads, 2, joiner(decode_s=0.04), 0.0) is None


def test_an_instance_that_is_still_loading_is_not_judged_by_deadlines_that_will_move() -> None:
    loading = InstanceDemand(INFINITY, INFINITY, 0.0, 0.0, INFINITY, blocked=True)
    assert validate_closed([loading], 0, joiner(deadline_s=0.01), 0.0) is None


def test_the_pace_of_the_targets_own_running_requests_counts() -> None:
    strict = decoding(5.0, decode_s=0.04, tpot_s=0.05)
    lenient = candidate(300.0, 0.1, 0.06, 60.0)
    assert both([strict], 0, lenient, 0.0) is Refusal.DECODE_OVERCOMMITTED


def test_an_instance_that_is_loading_is_played_from_when_it_is_ready() -> None:
    loading = InstanceDemand(INFINITY, INFINITY, 0.0, 0.0, INFINITY, blocked=True, ready_s=1.0)
    assert play([loading], joiner(deadline_s=1.2)) is None
    assert play([loading], joiner(deadline_s=1.05)) is Refusal.FIRST_TOKEN_LATE


def test_prefills_that_wait_for_a_load_hold_up_their_neighbours() -> None:
    """Ready at 0.5 s and due at 1 s, they take the device for 0.4 s just when the candidate's batch needs it."""
    loading = prefilling(1.0, 1.0, 1.0, 1.0, ready_s=0.5)
    assert play([loading, decoding(0.6, decode_s=0.1)], joiner(deadline_s=0.55, prefill_s=0.3)) is None
    crowded = prefilling(*[1.0] * 6, ready_s=0.5)
    answer = play([crowded, decoding(0.6, decode_s=0.1)], joiner(deadline_s=0.55, prefill_s=0.3))
    assert answer is Refusal.NEIGHBOUR_LATE


def test_everyone_must_manage_one_more_token_after_the_last_prefill() -> None:
    first, second = decoding(1.1, decode_s=0.1), decoding(1.1, decode_s=0.1)
    assert play([first, second, EMPTY], joiner(prefill_s=0.85, decode_s=0.02)) is None
    assert play([first, second, EMPTY], joiner(prefill_s=0.95, decode_s=0.02)) is Refusal.NEIGHBOUR_LATE


def test_a_silence_within_an_answer_counts_as_a_late_token_where_it_is_bounded() -> None:
    ahead = InstanceDemand(30.0, 30.0, 0.0, 0.05, 0.25, batch=1, spoke_s=0.0)
    bounded = TurnRule(max_silence_s=2.0, turn_silence_s=1.5)
    prompt = candidate(8.0, 2.5, 0.05, 0.25, urgent_s=5.5)
    assert validate_played([ahead, EMPTY], 1, prompt, 0.0, RULE) is None
    assert validate_played([ahead, EMPTY], 1, prompt, 0.0, bounded) is Refusal.NEIGHBOUR_LATE


@given(st.integers(1, 400), st.floats(0.001, 0.01))
def test_a_long_queue_ends_the_play_all_the_same(waiting: int, seconds: float) -> None:
    """Its cost is bounded: what cannot be seen to the end is refused."""
    queue = prefilling(*[8.0] * waiting, seconds=seconds)
    answer = play([queue], candidate(8.0, seconds, 0.05, 0.25))
    assert answer is (None if waiting < MAX_TURNS else Refusal.FIRST_TOKEN_LATE)


def test_a_prompt_waits_for_running_requests_only_while_both_have_time() -> None:
    assert guards_decodes(now=0.0, prefill_s=1.0, urgent_s=3.0, running_due_s=0.5)
    assert not guards_decodes(now=0.0, prefill_s=1.0, urgent_s=3.0, running_due_s=1.5)  # they have time for it
    assert not guards_decodes(now=0.6, prefill_s=1.0, urgent_s=3.0, running_due_s=0.5)  # they are late already
    assert not guards_decodes(now=3.0, prefill_s=1.0, urgent_s=3.0, running_due_s=3.5)  # it has no more time itself


@dataclass
class Someone:
    deadline_s: float
    urgent_s: float
    frees_bytes: float


def test_the_shortest_headroom_has_the_turn_and_while_there_is_slack_what_frees_most_memory() -> None:
    soon, large, small = Someone(9.0, 9.0, 2.0), Someone(10.0, 10.0, 1.0), Someone(11.0, 11.0, 3.0)
    everyone = [large, small, soon]
    assert choose_turn(everyone, 0.0, None) is soon
    assert choose_turn(everyone, 0.0, 4.0) is small
    assert choose_turn(everyone, 6.0, 4.0) is soon
    large.urgent_s = 0.4  # it has been silent for long
    assert choose_turn(everyone, 0.0, 4.0) is large
    assert choose_turn([], 0.0, 4.0) is None


@given(
    st.lists(st.tuples(st.floats(0.05, 3.0), st.floats(0.005, 0.08)), max_size=6),
    st.floats(0.01, 2.0),
    st.floats(0.0, 0.5),
)
def test_a_later_start_never_helps(neighbours: list[tuple[float, float]], prefill_s: float, later_s: float) -> None:
    loads = [decoding(deadline, decode) for deadline, decode in neighbours] + [EMPTY]
    request = joiner(prefill_s=prefill_s)
    if play(loads, request, later_s) is None:
        assert play(loads, request, 0.0) is None


def test_what_is_refused_before_it_is_played_would_be_refused_by_play(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(5)
    refused = 0
    for _ in range(3000):
        demands = [decoding(rng.uniform(0.2, 2.0), decode_s=rng.uniform(0.01, 0.08)) for _ in range(rng.randrange(4))]
        demands += [prefilling(*sorted(rng.uniform(0.3, 2.0) for _ in range(rng.randrange(1, 5)))) for _ in range(2)]
        candidate = joiner(deadline_s=rng.uniform(0.3, 2.0), prefill_s=rng.uniform(0.05, 0.6))
        if _infeasible(demands, candidate, 0.0) is not None:
            refused += 1
            with monkeypatch.context() as patch:
                patch.setattr("dovetail.policy.shadow._infeasible", lambda *_: None)
                assert play(demands, candidate) is not None
    assert refused > 100
