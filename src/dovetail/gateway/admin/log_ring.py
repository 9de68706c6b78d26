"""The last lines of the server's log, kept in memory for whoever asks over HTTP (`dovetail logs`)."""

from __future__ import annotations

import logging
from collections import deque

from dovetail.gateway.admin.api import LogLine, LogLines

CAPACITY = 4096
_MAX_CHARS = 2000  # of one message


class LogRing(logging.Handler):
    """Numbered, so that one who asks again gets what is new. Records come from any thread; a deque takes that."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=capacity)
        self._number = 0

    def emit(self, record: logging.LogRecord) -> None:  # holds the handler's lock
        self._number += 1
        message = record.getMessage()[:_MAX_CHARS]
        level = record.levelname.lower()
        self._lines.append(
            LogLine(number=self._number, time=record.created, level=level, logger=record.name, message=message)
        )

    def lines(self, *, after: int = 0, limit: int | None = None, level: int = logging.INFO) -> LogLines:
        """Those of this level and above that came after the given number; of them the last `limit`."""
        levels = logging.getLevelNamesMapping()
        found = [
            line for line in tuple(self._lines) if line.number > after and levels[line.level.upper()] >= level
        ]  # fmt: skip
        if limit is not None:
            found = found[len(found) - min(limit, len(found)) :]
        return LogLines(data=found, last=self._number)
