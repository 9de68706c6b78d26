"""How commands print: sizes and counts for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as they must be: a terminal that is too narrow wraps, it hides nothing."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(*headings, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console = Console()
    wanted = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    Console(width=max(console.width, wanted)).print(table)


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def json_line(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_count(count: float) -> str:
    for unit in ("", "K", "M"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}B"


def human_age(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            number = int(seconds // size)
            return f"{number} {unit}{'s' if number > 1 else ''} ago"
    return "just now"
