"""What benches say while they run where there is no terminal."""

from __future__ import annotations

import contextlib

import pytest

from dovetail_bench.cli.progress import EVERY_S, SILENT_S, Lines, progress, span


class Watched:
    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.lines = Lines(self.said.append, lambda: self.now)

    def look_at(self, now: float) -> list[str]:
        """What is said then."""
        self.now, before = now, len(self.said)
        self.lines.look()
        return self.said[before:]


def test_the_first_step_is_said_at_once_and_later_ones_now_and_then() -> None:
    watched = Watched()
    watched.lines.step("setting up llama-server", 0, 0)
    assert watched.said == ["     0 s  setting up llama-server"]
    watched.now = 1.0
    watched.lines.step("dovetail", 0, 100)
    assert watched.look_at(2.0) == []
    watched.lines.step("dovetail", 10, 100)
    assert watched.look_at(EVERY_S + 1) == ["    11 s  dovetail: 10 of 100, about 2 min left"]


def test_what_takes_long_without_news_is_not_silent() -> None:
    watched = Watched()
    watched.lines.step("building llama.cpp", 0, 0)
    assert watched.look_at(SILENT_S - 1) == []
    assert watched.look_at(SILENT_S) == [f"{SILENT_S:6.0f} s  building llama.cpp"]
    assert watched.look_at(SILENT_S + EVERY_S) == []
    assert watched.look_at(2 * SILENT_S) == [f"{2 * SILENT_S:6.0f} s  building llama.cpp"]


def test_the_time_left_is_of_the_steps_that_were_counted_last() -> None:
    watched = Watched()
    watched.lines.step("first of two contenders", 90, 100)
    watched.now = 50.0
    watched.lines.step("second", 0, 100)
    watched.now = 90.0
    watched.lines.step("second", 20, 100)
    assert watched.look_at(90.0) == ["    90 s  second: 20 of 100, about 3 min left"]


def test_a_bench_says_beforehand_what_it_does_and_ends_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(ValueError), progress("4 contenders for 5 min each: 20 min.") as step:
        step("dovetail", 1, 2)
        raise ValueError
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["4 contenders for 5 min each: 20 min.", "     0 s  dovetail: 1 of 2"]
    assert captured.out == ""


def test_times_have_the_unit_that_fits() -> None:
    assert [span(seconds) for seconds in (0.4, 89, 90, 1260)] == ["0 s", "89 s", "2 min", "21 min"]
