"""Requests to simulate: trace files with the columns arrival_s, model, input_tokens, output_tokens, plain or gzipped.

Every complaint names the file and the line.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from dovetail.errors import ConfigError

COLUMNS = ("arrival_s", "model", "input_tokens", "output_tokens")


class Arrival(NamedTuple):
    arrival_s: float
    model: int
    input_tokens: int
    output_tokens: int
    produced: tuple[int, ...] = (0,)  # by choice: the tokens that it has already
    ttft_s: float | None = None  # targets of its own
    tpot_s: float | None = None
    is_best_effort: bool = False
    goes_first: bool = False


def read_trace(path: Path) -> list[Arrival]:
    """The trace in order of arrival."""
    try:
        with _open(path) as file:
            arrivals = list(_rows(path, file))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not arrivals:
        raise ConfigError(f"{path}: line 2: no requests")
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    return arrivals


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _rows(path: Path, file: TextIO) -> Iterator[Arrival]:
    reader = csv.reader(file)
    header = next(reader, None)
    if header is None:
        raise ConfigError(f"{path}: line 1: empty file, expected the columns {', '.join(COLUMNS)}")
    names = [name.strip() for name in header]
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise ConfigError(f"{path}: line 1: unknown column {unknown[0]!r}, expected {', '.join(COLUMNS)}")
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise ConfigError(f"{path}: line 1: column {missing[0]!r} is missing")
    order = [names.index(name) for name in COLUMNS]
    for cells in reader:
        if cells:
            yield _row(path, reader.line_num, cells, order)


def _row(path: Path, line: int, cells: Sequence[str], order: Sequence[int]) -> Arrival:
    if len(cells) != len(order):
        raise ConfigError(f"{path}: line {line}: {len(cells)} values, expected {len(order)}")
    arrival, model, inputs, outputs = (cells[index] for index in order)
    try:
        row = Arrival(float(arrival), int(model), int(inputs), int(outputs))
    except ValueError as error:
        raise ConfigError(f"{path}: line {line}: cannot read {','.join(cells)!r}: {error}") from error
    if not (math.isfinite(row.arrival_s) and row.arrival_s >= 0):
        raise ConfigError(f"{path}: line {line}: arrival_s is {arrival}, expected seconds from 0")
    if row.input_tokens < 1 or row.output_tokens < 1 or row.model < 0:
        raise ConfigError(f"{path}: line {line}: model must be >= 0 and token counts >= 1, got {','.join(cells)!r}")
    return row


def first_line_of(path: Path, model: int) -> int:
    """The line of the model's first request as the file has it, for messages."""
    with _open(path) as file:
        reader = csv.reader(file)
        column = [name.strip() for name in next(reader)].index("model")
        return next((reader.line_num for cells in reader if cells and int(cells[column]) == model), 1)


def keep_models(arrivals: Sequence[Arrival], models: int) -> list[Arrival]:
    """A share of the models, spread evenly over popularity: of every eight neighbours the first `models`·8/total."""
    total = max(arrival.model for arrival in arrivals) + 1
    if models > total:
        raise ConfigError(f"--models {models}: the trace has only {total}")
    kept = models * 8 / total
    return [arrival for arrival in arrivals if arrival.model % 8 < kept]


def write_trace(path: Path, arrivals: Sequence[Arrival]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((f"{row.arrival_s:.4f}", row.model, row.input_tokens, row.output_tokens) for row in arrivals)
