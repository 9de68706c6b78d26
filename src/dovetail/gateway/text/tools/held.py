"""What of a text may be shown while it could still become a marker."""

from __future__ import annotations

from collections.abc import Sequence


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first of the markers begins, and which it is."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None)


def split_held(text: str, markers: Sequence[str]) -> tuple[str, str]:
    """What cannot be part of a marker any more, and the end that still can."""
    longest = max((len(marker) for marker in markers), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        end = text[len(text) - size :]
        if any(marker.startswith(end) for marker in markers):
            return text[: len(text) - size], end
    return text, ""


def could_become(text: str, markers: Sequence[str]) -> bool:
    return any(marker.startswith(text) for marker in markers)
