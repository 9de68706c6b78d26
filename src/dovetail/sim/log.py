"""The event log: one JSON object a line, keys in a fixed order, times to the microsecond."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, TextIO

from dovetail.cluster.decisions import Decision
from dovetail.node.work import Work


class EventLog:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def header(self, **settings: Any) -> None:
        """First line: everything that a replay needs."""
        self._file.write(json.dumps({"dovetail_sim": 1, **settings}) + "\n")

    def write(self, now: float, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"t": round(now, 6), "event": event, **values}) + "\n")

    def said(self, now: float, node: str, event: str, record: Any) -> None:
        self.write(now, event, node=node, **_flat(record))

    def decision(self, now: float, decision: Decision) -> None:
        self.write(now, type(decision).__name__.lower(), **_flat(decision))


def _flat(record: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Work):
            values["request"] = value.id
        elif isinstance(value, float):
            values[field.name] = round(value, 6) if value != float("inf") else None
        else:
            values[field.name] = value
    return values
