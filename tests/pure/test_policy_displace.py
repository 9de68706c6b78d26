"""Who moves where (L7), against trying everything."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.policy.displace import Destination, MovableInstance, Move, migration_s, who_moves_where

NAMES = "abc"


def make_guest(instance: int, frees: int, **seconds: float) -> MovableInstance:
    return MovableInstance(instance, frees, tuple(Destination(name, value) for name, value in seconds.items()))


def test_the_guest_that_can_go_on_soonest_moves_there() -> None:
    plan = who_moves_where([make_guest(1, 10, a=3.0, b=2.0), make_guest(2, 10, a=4.0)], missing_bytes=10)
    assert plan is not None
    assert plan.moves == (Move(1, "b"),)
    assert plan.seconds == 2.0


def test_two_guests_that_want_the_same_place_do_not_both_get_it() -> None:
    plan = who_moves_where([make_guest(1, 5, a=1.0, b=2.0), make_guest(2, 5, a=1.0, b=6.0)], missing_bytes=10)
    assert plan is not None
    assert set(plan.moves) == {Move(1, "b"), Move(2, "a")}


def test_an_idle_guest_goes_before_anybody_moves_and_nobody_moves_in_vain() -> None:
    idle = MovableInstance(3, 10, (Destination("", 0.0),))
    plan = who_moves_where([make_guest(1, 10, a=1.0), idle], missing_bytes=10)
    assert plan is not None
    assert plan.moves == (Move(3, ""),)


def test_without_enough_to_free_there_is_no_plan() -> None:
    assert who_moves_where([make_guest(1, 9, a=1.0)], missing_bytes=10) is None
    assert who_moves_where([MovableInstance(1, 10, ())], missing_bytes=10) is None


def test_a_migration_takes_the_load_and_what_was_said() -> None:
    assert migration_s(2.0, tokens=1000, token_s=0.001, resume_s=0.5) == 3.5


guest_lists = st.lists(
    st.tuples(st.integers(0, 4), st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), max_size=3)), max_size=4
)


@settings(max_examples=150, deadline=None)
@given(guest_lists, st.sampled_from((4, 8)))
def test_no_other_way_is_sooner(drawn: list[tuple[int, dict[str, int]]], missing: int) -> None:
    guests = [make_guest(index, frees, **places) for index, (frees, places) in enumerate(drawn)]
    plan = who_moves_where(guests, missing)
    soonest = min(_all_ways(guests, missing), default=None)
    assert (None if plan is None else plan.seconds) == soonest


def _all_ways(guests: list[MovableInstance], missing: int) -> list[float]:
    found = []
    for choice in product(*[(None, *guest.destinations) for guest in guests]):
        going = [(guest, place) for guest, place in zip(guests, choice, strict=True) if place is not None]
        names = [place.name for _, place in going]
        if len(set(names)) == len(names) and sum(guest.frees_bytes for guest, _ in going) >= missing:
            found.append(max(place.seconds for _, place in going))
    return found
