"""The journal of the fuzzers: nothing is run twice or left out, whenever a run is interrupted."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "fuzz"))

from journal import Journal, Share, note_find


def work_on(share: Share, count: int, done: list[int]) -> None:
    """As a child does that is killed after `count` inputs."""
    for index, _ in zip(share.rest(), range(count), strict=False):
        done.append(index)
        position, accepted, refused, spent = share.counts
        share.counts = position + 1, accepted + index % 2, refused + 1 - index % 2, spent + 0.5


def test_every_input_is_run_once_however_often_runs_are_interrupted(tmp_path: Path) -> None:
    draw, done = random.Random(1), list[int]()
    for size in (40, 7, 100, 3, 33):
        journal = Journal(tmp_path)
        for share in journal.begin_run(200, size):
            work_on(share, draw.randrange(len(share)), done)
        if draw.random() < 0.5:  # else it was killed, and the next run adds up
            journal.end_run()
    journal = Journal(tmp_path)
    assert journal.inputs == len(done) < 200
    for share in journal.begin_run(200, 50):
        work_on(share, 200, done)
    journal.end_run()
    assert sorted(done) == list(range(200))
    assert (journal.inputs, journal.accepted, journal.refused, journal.processor_s) == (200, 100, 100, 100.0)


def test_a_larger_count_adds_inputs_and_a_smaller_one_leaves_the_rest_for_later(tmp_path: Path) -> None:
    done: list[int] = []
    for count, expected in ((50, 50), (20, 50), (80, 80)):
        journal = Journal(tmp_path)
        for share in journal.begin_run(count, 16):
            work_on(share, 100, done)
        journal.end_run()
        assert journal.inputs == expected
    assert sorted(done) == list(range(80))


def test_shares_hold_as_many_inputs_as_was_asked_for(tmp_path: Path) -> None:
    assert [len(share) for share in Journal(tmp_path).begin_run(100, 30)] == [30, 30, 30, 10]


def test_finds_are_kept_with_their_input(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    note_find(tmp_path, 17, b"\x00\xff", "ended\nwith 11")
    assert journal.finds == ["17 ended with 11"]
    assert (tmp_path / "finds" / "17.input").read_bytes() == b"\x00\xff"
