"""The events of a stream as a client reads them; comments, by which a held stream says what it waits for, are none."""

from __future__ import annotations

import httpx


def event_data(response: httpx.Response) -> list[str]:
    """Whole lines only: `iter_lines` also breaks at the separators of Unicode, which an answer may contain."""
    lines = response.read().decode().split("\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
