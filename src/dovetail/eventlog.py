"""The one log of decisions, real or simulated: one JSON object a line, keys in a fixed order, times to the microsecond.

It knows the form of lines only; `logschema` has their names and fields.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from dovetail.logschema import Event, line_of


def open_log(path: Path) -> EventLog:
    """Lines go to the end of this file, each as soon as it is written: gateway and worker may share it."""
    return EventLog(path.open("a", buffering=1, encoding="utf-8"))


def clear_logs(paths: Sequence[Path]) -> None:
    """What was there before is gone. To be done before anybody writes there who is started then."""
    for path in paths:
        path.write_text("", encoding="utf-8")


def open_logs(paths: Sequence[Path]) -> EventLog | None:
    """One log, every line in each of these files."""
    files = [path.open("a", buffering=1, encoding="utf-8") for path in dict.fromkeys(paths)]
    if len(files) > 1:
        return EventLog(cast(TextIO, _Several(files)))
    return EventLog(files[0]) if files else None


class _Several:
    def __init__(self, files: Sequence[TextIO]) -> None:
        self._files = files

    def write(self, text: str) -> None:
        for file in self._files:
            file.write(text)

    def close(self) -> None:
        for file in self._files:
            file.close()


class EventLog:
    def __init__(self, file: TextIO, *, is_detailed: bool = False) -> None:
        self.is_detailed = is_detailed  # every turn and everything that drivers are told: many lines
        self._file = file

    def close(self) -> None:
        self._file.close()

    def header(self, **settings: Any) -> None:
        """First line: everything that a replay needs. What has no limit is null, which JSON has no number for."""
        if not self._is_empty():
            return  # one is there: of this node, started anew, or of another that writes here
        self._file.write(json.dumps(_finite({"dovetail_sim": 1, **settings}), allow_nan=False) + "\n")

    def _is_empty(self) -> bool:
        try:
            return os.fstat(self._file.fileno()).st_size == 0  # others may write here as well
        except OSError:  # a file in memory
            return self._file.tell() == 0

    def write(self, now: float, event: Event, **values: Any) -> None:
        self.put(line_of(now, event, values))

    def put(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if value == float("inf") else value
