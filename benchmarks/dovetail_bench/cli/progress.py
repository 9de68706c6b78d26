"""What a bench says on stderr: beforehand what it will do and for how long, then where it is.

That is a bar on a terminal, and lines elsewhere.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

Step = Callable[[str, int, int], None]  # what is done now, how much of it, and of how much (0: not known)

EVERY_S = 10.0  # between two lines, where there is news
SILENT_S = 60.0  # where there is none


@contextmanager
def progress(expected: str) -> Iterator[Step]:
    """`expected`: what follows, in numbers, and minutes where they are known."""
    typer.echo(expected, err=True)
    if sys.stderr.isatty():
        with _bar() as step:
            yield step
        return
    lines = Lines(lambda line: typer.echo(line, err=True), time.monotonic)
    done = threading.Event()
    thread = threading.Thread(target=_look_on, args=(lines, done), daemon=True, name="progress")
    thread.start()
    try:
        yield lines.step
    finally:
        done.set()
        thread.join()


class Lines:
    """Says where a bench is, the first time at once and then when it is looked at."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._lock = threading.Lock()
        self._started = self._said_at = clock()
        self._counts: tuple[str, int, int] = ("working", 0, 0)
        self._said: tuple[str, int, int] | None = None
        self._base = (self._started, 0, 0)  # when counting began, at how many, of how many

    def step(self, what: str, done: int, total: int) -> None:
        with self._lock:
            _, base, of = self._base
            if total != of or done < base:
                self._base = (self._clock(), done, total)
            self._counts = (what, done, total)
            if self._said is None:
                self._tell()

    def look(self) -> None:
        with self._lock:
            silent_s = self._clock() - self._said_at
            if silent_s >= SILENT_S or (silent_s >= EVERY_S and self._counts != self._said):
                self._tell()

    def _tell(self) -> None:
        self._said, self._said_at = self._counts, self._clock()
        what, done, total = self._counts
        count = f": {done} of {total}" if total else f": {done}" if done else ""
        self._say(f"{self._said_at - self._started:6.0f} s  {what}{count}{self._left()}")

    def _left(self) -> str:
        began, base, total = self._base
        done = self._counts[1] - base
        if done <= 0 or not total:
            return ""
        return f", about {span((self._clock() - began) / done * (total - self._counts[1]))} left"


def _look_on(lines: Lines, done: threading.Event) -> None:
    while not done.wait(EVERY_S):
        lines.look()


@contextmanager
def _bar() -> Iterator[Step]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), "{task.description}")
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("", total=None)
        yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total or None)


def span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
