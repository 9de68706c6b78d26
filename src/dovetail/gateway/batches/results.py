"""The answers of one batch as they come: appended to its two files and synced before they count.

The files are the truth: which lines were answered is read from them when a server starts. A last line that a machine
left unfinished is cut off; its request is made again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dovetail.gateway.batches.lines import Array
from dovetail.gateway.batches.records import CANCELLED, EXPIRED, BatchUsage, Counts


class LineResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str


class LineResult(msgspec.Struct, frozen=True):
    """What has become of one line; its id ends with the line's number."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None

    @property
    def is_answer(self) -> bool:
        return self.response is not None and self.response.status_code < 400


# Clients that read lines of a text, not of bytes, take these for ends of lines (as `str.splitlines` does). In JSON they
# stand within strings only.
_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029")


def as_line(result: Any) -> bytes:
    text: bytes = msgspec.json.encode(result)
    for end, escaped in _ENDS:
        text = text.replace(end, escaped)
    return text + b"\n"


def result_id(batch: str, number: int) -> str:
    return f"batch_req_{batch.rpartition('_')[2]}_{number}"


class _SeenUsage(msgspec.Struct, frozen=True):
    """In the words of any API."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0


class _SeenBody(msgspec.Struct, frozen=True):
    usage: _SeenUsage | None = None


class _SeenResponse(msgspec.Struct, frozen=True):
    body: _SeenBody | None = None


class _Seen(msgspec.Struct, frozen=True):
    id: str
    response: _SeenResponse | None = None
    error: LineError | None = None


_SEEN = msgspec.json.Decoder(_Seen)
_BODY = msgspec.json.Decoder(_SeenBody)


def usage_in(body: bytes) -> BatchUsage:
    """Of an answer."""
    try:
        return _usage_of(_BODY.decode(body))
    except (msgspec.DecodeError, RecursionError):
        return BatchUsage()


def _usage_of(body: _SeenBody | None) -> BatchUsage:
    if body is None or body.usage is None:
        return BatchUsage()
    used = body.usage
    prompt = used.prompt_tokens + used.input_tokens + used.cache_read_input_tokens
    return BatchUsage(prompt, used.completion_tokens + used.output_tokens)


@dataclass(frozen=True)
class Answered:
    """What the files of a batch hold."""

    numbers: Array
    counts: Counts  # without a total
    usage: BatchUsage


class ResultFiles:
    """Open for one batch. Not for two threads at once."""

    def __init__(self, output: Path, errors: Path) -> None:
        """Raises OSError."""
        self.paths = (output, errors)
        self._files: list[int] = []
        self._sizes = [0, 0]
        for path in self.paths:
            self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def recover(self) -> Answered:
        """Reads what is there, and cuts off what is no whole line."""
        numbers: list[int] = []
        kinds = {"completed": 0, "failed": 0, EXPIRED: 0, CANCELLED: 0}
        usage = BatchUsage()
        for at, path in enumerate(self.paths):
            kept = 0
            for line, seen in _whole_lines(path):
                kept += len(line)
                numbers.append(int(seen.id.rpartition("_")[2]))
                kinds[seen.error.code if seen.error else ("completed", "failed")[at]] += 1
                usage += _usage_of(seen.response.body if seen.response else None)
            os.ftruncate(self._files[at], kept)
            self._sizes[at] = kept
        counts = Counts(
            completed=kinds["completed"],
            failed=kinds["failed"],
            expired=kinds[EXPIRED],
            cancelled=kinds[CANCELLED],
        )
        found: np.ndarray[Any, Any] = np.array(numbers, dtype=np.int64)
        assert len(np.unique(found)) == len(found), "a line was answered twice"
        return Answered(found, counts, usage)

    def append(self, results: Sequence[LineResult]) -> None:
        """When it returns they are on disk. Raises OSError: then none of them is in the files."""
        texts = [b"", b""]
        for result in results:
            texts[not result.is_answer] += as_line(result)
        try:
            for at, text in enumerate(texts):
                if text:
                    _write_at(self._files[at], text, self._sizes[at])
            for at, text in enumerate(texts):
                if text:
                    os.fsync(self._files[at])
        except OSError:
            for file, size in zip(self._files, self._sizes, strict=True):
                os.ftruncate(file, size)
            raise
        for at, text in enumerate(texts):
            self._sizes[at] += len(text)

    @property
    def sizes(self) -> tuple[int, int]:
        return self._sizes[0], self._sizes[1]

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


def _whole_lines(path: Path) -> Iterator[tuple[bytes, _Seen]]:
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                seen = _SEEN.decode(line)
            except (msgspec.DecodeError, RecursionError):
                return
            yield line, seen


def _write_at(file: int, text: bytes, offset: int) -> None:
    view = memoryview(text)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
