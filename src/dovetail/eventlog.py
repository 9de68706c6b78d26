"""The one log of decisions, real or simulated: one JSON object a line, keys in a fixed order, times to the microsecond.

It knows the form of lines only. What is said in them is the business of those who decide.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO


def open_log(path: Path) -> EventLog:
    """A new log in this file; every line is there as soon as it is written."""
    return EventLog(path.open("w", buffering=1, encoding="utf-8"))


class EventLog:
    def __init__(self, file: TextIO, *, is_detailed: bool = False) -> None:
        self.is_detailed = is_detailed  # every turn and everything that drivers are told: many lines
        self._file = file

    def close(self) -> None:
        self._file.close()

    def header(self, **settings: Any) -> None:
        """First line: everything that a replay needs. What has no limit is null, which JSON has no number for."""
        self._file.write(json.dumps(_finite({"dovetail_sim": 1, **settings}), allow_nan=False) + "\n")

    def write(self, now: float, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"t": round(now, 6), "event": event, **values}) + "\n")

    def said(self, now: float, node: str, event: str, record: Any) -> None:
        """A record that a node has said."""
        self.write(now, event, node=node, **_flat(record))

    def decision(self, now: float, decision: Any) -> None:
        """A record of `cluster.decisions`."""
        self.write(now, type(decision).__name__.lower(), **_flat(decision))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if value == float("inf") else value


def _flat(record: Any) -> dict[str, Any]:
    """The fields of a record; a request is written as its number."""
    values: dict[str, Any] = {}
    for known in fields(record):
        value = getattr(record, known.name)
        if known.name == "work":
            values["request"] = value.id
        elif isinstance(value, float):
            values[known.name] = round(value, 6) if value != float("inf") else None
        else:
            values[known.name] = value
    return values
