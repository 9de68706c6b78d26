"""SLOs, and shadow validation with its three cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.policy.headroom import INFINITY, Joiner, Load, Refusal, SloRule, next_token_deadline, validate

EMPTY = Load(INFINITY, INFINITY, 0.0, 0.0, INFINITY)


def decoding(deadline_s: float, decode_s: float = 0.05, tpot_s: float = 0.25) -> Load:
    return Load(deadline_s, deadline_s, 0.0, decode_s, tpot_s)


def joiner(deadline_s: float = 1.0, prefill_s: float = 0.1, decode_s: float = 0.05) -> Joiner:
    return Joiner(deadline_s, prefill_s, decode_s, 0.25)


@pytest.mark.parametrize(("tokens", "seconds"), [(10, 0.5), (256, 0.5), (1024, 2.0), (4096, 8.0), (9000, 8.0)])
def test_the_ttft_slo_follows_the_input_between_floor_and_cap(tokens: int, seconds: float) -> None:
    assert SloRule().ttft_s(tokens) == seconds


def test_each_token_made_moves_the_deadline_by_one_pace() -> None:
    assert next_token_deadline(10.0, 2.0, 0.25, 0) == 12.0
    assert next_token_deadline(10.0, 2.0, 0.25, 4) == 13.0


def test_an_idle_node_takes_a_request_that_meets_its_deadline() -> None:
    assert validate([EMPTY], 0, joiner(), 0.0) is None


def test_case_1_the_new_requests_first_token_is_late() -> None:
    assert validate([EMPTY], 0, joiner(prefill_s=1.1), 0.0) is Refusal.FIRST_TOKEN_LATE
    assert validate([EMPTY], 0, joiner(), 0.95) is Refusal.FIRST_TOKEN_LATE


def test_case_1_counts_every_iteration_that_neighbours_run_before() -> None:
    """Due in 0.1 s and paced at 0.25 s, the neighbour runs four iterations of 0.2 s before the deadline of 1 s."""
    neighbour = decoding(0.1, decode_s=0.1)
    assert validate([neighbour, EMPTY], 1, joiner(prefill_s=0.59), 0.0) is None
    assert validate([neighbour, EMPTY], 1, joiner(prefill_s=0.61), 0.0) is Refusal.FIRST_TOKEN_LATE


def test_case_2_a_neighbours_next_token_is_late() -> None:
    neighbour = decoding(1.05, decode_s=0.1)
    assert validate([neighbour, EMPTY], 1, joiner(prefill_s=0.99), 0.0) is Refusal.NEIGHBOUR_LATE


def test_case_2_the_targets_own_running_requests_count() -> None:
    own = decoding(0.3)
    assert validate([own], 0, joiner(prefill_s=0.26), 0.0) is Refusal.NEIGHBOUR_LATE
    assert validate([own], 0, joiner(prefill_s=0.24), 0.0) is None


def test_case_3_one_iteration_of_everybody_exceeds_the_pace() -> None:
    loads = [decoding(5.0, 0.1), decoding(5.0, 0.1), EMPTY]
    assert validate(loads, 2, joiner(decode_s=0.06), 0.0) is Refusal.DECODE_OVERCOMMITTED
    assert validate(loads, 2, joiner(decode_s=0.04), 0.0) is None


def test_an_instance_that_is_still_loading_is_not_judged_by_deadlines_that_will_move() -> None:
    loading = Load(INFINITY, INFINITY, 0.0, 0.0, INFINITY, blocked=True)
    assert validate([loading], 0, joiner(deadline_s=0.01), 0.0) is None


@given(
    st.lists(st.tuples(st.floats(0.05, 3.0), st.floats(0.005, 0.08)), max_size=6),
    st.floats(0.01, 2.0),
    st.floats(0.0, 0.5),
)
def test_a_later_start_never_helps(neighbours: list[tuple[float, float]], prefill_s: float, later_s: float) -> None:
    loads = [decoding(deadline, decode) for deadline, decode in neighbours] + [EMPTY]
    request = joiner(prefill_s=prefill_s)
    if validate(loads, len(loads) - 1, request, later_s) is None:
        assert validate(loads, len(loads) - 1, request, 0.0) is None
