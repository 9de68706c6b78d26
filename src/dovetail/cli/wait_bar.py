"""What a chat waits for before its first word, as a line or a bar on stderr that goes when the text comes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_WORDS = {"starting": "starting a worker", "loading": "loading", "computing": "reading the prompt"}


def in_words(standing: Mapping[str, Any]) -> str:
    state = str(standing["state"])
    return f"queued, number {standing['position']}" if state == "queued" else _WORDS.get(state, state)


class WaitBar:
    """Shows nothing without a terminal (`enabled`)."""

    def __init__(self, *, enabled: bool | None = None) -> None:
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._bars: Progress | None = None
        self._task: TaskID | None = None

    def show(self, standing: Mapping[str, Any]) -> None:
        """A state as the server's comments have it."""
        if not self._enabled:
            return
        if self._bars is None or self._task is None:
            self._bars, self._task = _begin()
        total = standing.get("total_bytes") if standing.get("done_bytes") else None
        self._bars.update(
            self._task, description=in_words(standing), total=total, completed=standing.get("done_bytes", 0)
        )

    def clear(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __enter__(self) -> WaitBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()


def _begin() -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeElapsedColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True)
    bars.start()
    return bars, bars.add_task("", total=None)
