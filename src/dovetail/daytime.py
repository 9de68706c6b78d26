"""Hours of the day, as a configuration names them. Pure: the time is an argument."""

from __future__ import annotations

from dataclasses import dataclass

_DAY_MINUTES = 24 * 60


@dataclass(frozen=True)
class Hours:
    """A part of each day, in the server's local time; it may pass midnight."""

    begin_minute: int
    end_minute: int

    def contains(self, minute: int) -> bool:
        if self.begin_minute <= self.end_minute:
            return self.begin_minute <= minute < self.end_minute
        return minute >= self.begin_minute or minute < self.end_minute

    def __str__(self) -> str:
        return "-".join(f"{at // 60:02d}:{at % 60:02d}" for at in (self.begin_minute, self.end_minute))


def parse_hours(text: str) -> Hours:
    """Raises ValueError."""
    begin, _, end = text.partition("-")
    hours = Hours(_minute(begin, text), _minute(end, text))
    if hours.begin_minute == hours.end_minute:
        raise ValueError(f"the hours {text!r} begin and end at the same time; leave them out to run at any time")
    return hours


def _minute(clock: str, text: str) -> int:
    hour, colon, minute = clock.strip().partition(":")
    is_number = colon and all(part.isascii() and part.isdigit() and len(part) == 2 for part in (hour, minute))
    if not is_number or int(minute) > 59 or 60 * int(hour) + int(minute) > _DAY_MINUTES:
        raise ValueError(f"expected hours such as '22:00-06:00', got {text!r}")
    return (60 * int(hour) + int(minute)) % _DAY_MINUTES
