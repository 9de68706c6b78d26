"""When requests without a place ask again."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.cluster.waiting import CHANGED_S, MAX_FAILURES, UNCHANGED_S, WaitingRoom


@dataclass
class Due:
    due_s: float


class Asked:
    """Notes who asked; those in `refused` get no place."""

    def __init__(self, room: WaitingRoom, refused: set[int] | None = None) -> None:
        self.room = room
        self.refused = refused or set()
        self.ids: list[int] = []

    def __call__(self, id: int, now: float) -> None:
        self.ids.append(id)
        if id in self.refused:
            self.room.enter(id, Due(now + 1))


def make_room(*dues: float) -> WaitingRoom:
    """At time 10 somebody asked in vain."""
    room = WaitingRoom()
    room.enter(99, Due(0.0))
    room.retry(10.0, lambda id, now: None)
    for id, due_s in enumerate(dues):
        room.enter(id, Due(due_s))
    return room


def test_the_most_urgent_asks_first() -> None:
    room = make_room(30.0, 20.0, 25.0)
    asked = Asked(room)
    room.retry(20.0, asked)
    assert asked.ids == [1, 2, 0]
    assert room.next_s() is None


def test_they_ask_soon_after_a_change_and_else_after_a_while() -> None:
    room = make_room(20.0)
    assert room.next_s() == 10.0 + UNCHANGED_S
    asked = Asked(room)
    room.retry(10.0 + CHANGED_S, asked)
    assert asked.ids == []
    room.changed()
    assert room.next_s() == 10.0 + CHANGED_S
    room.retry(10.0 + CHANGED_S, asked)
    assert asked.ids == [0]


def test_after_a_few_in_vain_the_others_wait() -> None:
    room = make_room(*range(20, 30))
    asked = Asked(room, refused=set(range(10)))
    room.retry(20.0, asked)
    assert asked.ids == list(range(MAX_FAILURES))
    assert all(id in room for id in range(10))
    assert room.next_s() == 20.0 + UNCHANGED_S


def test_one_that_goes_with_another_does_not_ask() -> None:
    room = make_room(20.0, 21.0)
    asked: list[int] = []

    def ask(id: int, now: float) -> None:
        asked.append(id)
        room.leave(1)

    room.retry(20.0, ask)
    assert asked == [0]
    assert list(room) == []
