"""When requests without a place ask again."""

from __future__ import annotations

from collections.abc import Iterable

from sim_builders import make_work

from dovetail.cluster.request import Search
from dovetail.cluster.waiting import CHANGED_S, MAX_FAILURES_CHANGED, MAX_FAILURES_OF_MODEL, WaitingRoom
from dovetail.policy.work import Work

RETRY_S = 0.25


def make_room(*dues: float, models: str = "") -> WaitingRoom:
    """They have asked in vain at time 10."""
    room = WaitingRoom()
    for id, due_s in enumerate(dues):
        work = make_work(id, models[id] if models else "a", ttft_s=due_s)
        room.enter(work, Search(work), 10.0)
    return room


def ask(room: WaitingRoom, now: float, refused: Iterable[int] = ()) -> list[int]:
    """Who asks; those in `refused` get no place."""
    asked = []
    for work in room.begin_pass(now):
        asked.append(work.id)
        room.leave(work.id)
        if work.id in refused:
            room.enter(work, Search(work), now)
    return asked


def test_the_most_urgent_asks_first() -> None:
    room = make_room(30.0, 20.0, 25.0)
    assert ask(room, 11.0) == [1, 2, 0]
    assert room.next_s() is None


def test_they_ask_soon_after_a_change_and_else_after_a_while() -> None:
    room = make_room(20.0)
    assert room.next_s() == 10.0 + RETRY_S
    assert ask(room, 10.0 + CHANGED_S) == []
    room.changed()
    assert room.next_s() == 10.0 + CHANGED_S
    assert ask(room, 10.0 + CHANGED_S) == [0]


def test_after_a_few_of_a_model_in_vain_the_others_of_it_wait() -> None:
    room = make_room(*range(20, 30), models="aaaaaaaaab")
    assert ask(room, 11.0, refused=range(10)) == [*range(MAX_FAILURES_OF_MODEL), 9]
    assert len(room) == 10
    assert room.next_s() == 11.0 + RETRY_S


def test_soon_after_a_change_only_a_few_ask_but_everybody_does_after_a_while() -> None:
    room = make_room(*range(20, 30), models="abcdefghij")
    room.changed()
    assert ask(room, 10.02, refused=range(10)) == list(range(MAX_FAILURES_CHANGED))
    room.changed()
    assert ask(room, 10.04, refused=range(10)) == list(range(MAX_FAILURES_CHANGED))
    assert ask(room, 10.25, refused=range(10)) == list(range(10))


def test_one_that_goes_with_another_does_not_ask() -> None:
    room = make_room(20.0, 21.0)
    asked = []
    for work in room.begin_pass(20.0):
        asked.append(work.id)
        room.leave(0)
        room.leave(1)
    assert asked == [0]
    assert list(room) == []


def test_everybody_whose_token_was_due_is_found_at_once_however_many_wait_before() -> None:
    room = make_room(*(20.0 + number for number in range(50)), 10.1, 10.3)
    assert room.next_s() is not None
    assert room.next_s() < 10.11  # type: ignore[operator]
    assert [work.id for work in room.expired(10.2)] == [50]
    work: Work | None = room.leave(50)
    assert work is not None
    assert [one.id for one in room.expired(10.4)] == [51]


def test_one_that_asked_several_times_expires_once() -> None:
    room = make_room(10.5)
    ask(room, 10.3, refused=[0])
    assert [work.id for work in room.expired(11.0)] == [0]


def test_one_that_goes_first_asks_before_those_that_are_due_earlier() -> None:
    room = make_room(30.0, 20.0, 25.0)
    for work in room:
        work.goes_first = work.id in (0, 2)
        work.is_best_effort = work.id == 2  # which stays behind everybody
    assert ask(room, 11.0) == [0, 1, 2]


def test_a_text_that_was_begun_asks_before_those_that_go_first() -> None:
    """A node may owe it the memory that newcomers leave alone: behind many of its model it would never ask."""
    room = make_room(30.0, 20.0, 21.0, 22.0, 23.0)
    for work in room:
        work.goes_first, work.produced = work.id > 0, 80 * (work.id == 0)
    assert ask(room, 11.0, refused=(1, 2, 3, 4))[0] == 0


def test_an_answer_that_a_node_owes_memory_asks_however_many_are_refused_there_for_its_sake() -> None:
    room = make_room(*range(20, 26), 2000.0)
    (owed,) = (one for one in room if one.id == 6)
    owed.owed_by = "node"
    assert ask(room, 11.0, refused=range(6)) == [6, *range(MAX_FAILURES_OF_MODEL)]
