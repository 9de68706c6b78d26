"""Checks every line of a file before any of them runs, in a process of its own: what strangers wrote takes neither the
gateway's memory nor its time. `python -m dovetail.gateway.batches.check` writes the index of the lines beside the file
and a report to its standard output.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from pydantic import BaseModel

from dovetail.errors import InvalidRequest
from dovetail.gateway.batches.lines import LINE, PART, Array
from dovetail.gateway.batches.records import ENDPOINT_ALIASES, MAX_PROBLEMS, LineProblem

MODULE = "dovetail.gateway.batches.check"
# Beside what it has when it starts: the file's lines as offsets and hashes, and one line as records.
_MEMORY_BYTES = 1 << 30
_MAX_CPU_S = 3600
_NICENESS = 10
_MAX_ID_CHARS = 512
_MAX_MODELS = 4096  # that lines of one file may name
_READ_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"


class CheckOrder(msgspec.Struct, frozen=True):
    """What the process is to do."""

    file: str
    index: str  # written when there are no problems
    endpoint: str
    max_line_bytes: int
    max_lines: int
    is_wrapped: bool = False  # Anthropic's: one object with a list of requests; `file` becomes the lines
    max_lines_key: str = "batch.max_lines"


class CheckReport(msgspec.Struct, frozen=True):
    total: int
    models: tuple[str | None, ...]  # that lines name, by number
    problems: tuple[LineProblem, ...]
    trouble: str | None = None  # of this machine, not of the file: it is checked again later


class InputLine(msgspec.Struct, frozen=True):
    """As OpenAI and vLLM's `run-batch` have it."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Problem(Exception):
    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.param = message, code, param


_LINE = msgspec.json.Decoder(InputLine)


def body_kind(endpoint: str) -> type[BaseModel]:
    """Imported when it is needed: a file has lines of one endpoint."""
    from dovetail.gateway.http import api

    if endpoint == "/v1/chat/completions":
        return api.ChatRequest
    if endpoint == "/v1/completions":
        return api.CompletionRequest
    if endpoint == "/v1/embeddings":
        from dovetail.gateway.http.embeddings import EmbeddingRequest

        return EmbeddingRequest
    if endpoint == "/v1/responses":
        from dovetail.gateway.http.responses.request import ResponsesRequest

        return ResponsesRequest
    if endpoint == "/v1/messages":
        from dovetail.gateway.http.anthropic.request import MessagesRequest

        return MessagesRequest
    from dovetail.gateway.http.scoring import RerankRequest, ScoreRequest

    return RerankRequest if endpoint == "/v1/rerank" else ScoreRequest


@dataclass(frozen=True)
class _Raw:
    """A line of the file."""

    number: int  # from 1
    offset: int
    text: bytes  # at most one byte longer than a line may be


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[_Raw]:
    """Those that are not empty. Of one that is too long only the beginning is kept."""
    offset, number = 0, 0
    if file.read(len(_BOM)) == _BOM:
        offset = len(_BOM)
    file.seek(offset)
    while text := file.readline(max_bytes + 2):
        number += 1
        length = len(text)
        if not text.endswith(b"\n") and length > max_bytes:
            length += _skip_line(file)
        if stripped := text.strip():
            yield _Raw(number, offset + text.find(stripped[:1]), stripped)
        offset += length


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while piece := file.readline(_READ_BYTES):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


class LineChecker:
    """One file. Keeps a few numbers of each line."""

    def __init__(self, order: CheckOrder) -> None:
        self._order = order
        self._parse = _parser(order.endpoint)
        self._hashes = array("Q")
        self._numbers = array("Q")  # of the lines, as an editor counts them
        self._index: list[Array] = []
        self._part: list[tuple[int, int, int]] = []
        self._models: dict[str | None, int] = {}
        self.problems: list[LineProblem] = []

    def check(self, file: BinaryIO) -> CheckReport:
        for line in read_lines(file, self._order.max_line_bytes):
            if len(self._hashes) == self._order.max_lines:
                message = f"the file has more than {self._order.max_lines} lines ({self._order.max_lines_key})"
                self._note(line.number, _Problem(message, "too_many_lines"))
                break
            try:
                self._add(line)
            except _Problem as problem:
                self._note(line.number, problem)
            if len(self.problems) >= MAX_PROBLEMS:
                break
        if not self.problems:
            self._find_duplicates(file)
        if not self.problems and not self._hashes:
            self.problems.append(LineProblem("the file has no lines", "empty_file"))
        return CheckReport(len(self._hashes), tuple(self._models), tuple(self.problems))

    def index(self) -> Array:
        return np.concatenate([*self._index, np.array(self._part, dtype=LINE)])

    def _note(self, number: int | None, problem: _Problem) -> None:
        self.problems.append(LineProblem(problem.message, problem.code, number, problem.param))

    def _add(self, line: _Raw) -> None:
        limit = self._order.max_line_bytes
        if len(line.text) > limit:
            raise _Problem(f"the line is longer than {limit} bytes (server.max_body_bytes)", "line_too_long")
        entry = decode_line(line.text)
        self._check_entry(entry)
        model = self._parse(bytes(entry.body))
        if model not in self._models and len(self._models) == _MAX_MODELS:
            raise _Problem(f"the file names more than {_MAX_MODELS} models", "too_many_models", "body.model")
        number = self._models.setdefault(model, len(self._models))
        digest = hashlib.blake2b(entry.custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self._hashes.append(int.from_bytes(digest, "little"))
        self._numbers.append(line.number)
        self._part.append((line.offset, len(line.text), number))
        if len(self._part) == _READ_BYTES:
            self._index.append(np.array(self._part, dtype=LINE))
            self._part.clear()

    def _check_entry(self, entry: InputLine) -> None:
        if not 0 < len(entry.custom_id) <= _MAX_ID_CHARS:
            raise _Problem(f"custom_id needs 1 to {_MAX_ID_CHARS} characters", "invalid_custom_id", "custom_id")
        if entry.method != "POST":
            raise _Problem(f"method is {entry.method[:20]!r}; the only one is 'POST'", "invalid_method", "method")
        if ENDPOINT_ALIASES.get(entry.url, entry.url) != self._order.endpoint:
            message = f"url is {entry.url[:100]!r}, and the batch's endpoint {self._order.endpoint!r}"
            raise _Problem(message, "mismatched_url", "url")

    def _find_duplicates(self, file: BinaryIO) -> None:
        hashes = np.frombuffer(self._hashes, dtype=np.uint64) if self._hashes else np.zeros(0, dtype=np.uint64)
        order = np.argsort(hashes, kind="stable")
        alike = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        if not len(alike):
            return
        index = self.index()
        for at in alike:
            first, again = (int(order[at]), int(order[at + 1]))
            ids = [_custom_id(file, index[number]) for number in (first, again)]
            if ids[0] == ids[1]:
                message = f"custom_id {ids[1][:80]!r} is that of line {self._numbers[first]}, too"
                self._note(self._numbers[again], _Problem(message, "duplicate_custom_id", "custom_id"))
            if len(self.problems) >= MAX_PROBLEMS:
                return
        self.problems.sort(key=lambda problem: problem.line or 0)


def decode_line(text: bytes) -> InputLine:
    try:
        text.decode()
        return _LINE.decode(text)
    except UnicodeDecodeError as error:
        raise _Problem(f"the line is not UTF-8: {error.reason} at byte {error.start + 1}", "invalid_utf8") from None
    except msgspec.ValidationError as error:
        raise _Problem(f"the line needs custom_id, method, url and body: {error}", "invalid_line") from None
    except msgspec.DecodeError as error:
        raise _Problem(f"the line is not valid JSON: {error}", "invalid_json") from None
    except RecursionError:
        raise _Problem("the line is nested too deeply", "invalid_json") from None


def _parser(endpoint: str) -> Callable[[bytes], str | None]:
    """Checks a body as the endpoint would; returns the model that it names."""
    from dovetail.gateway.http.api import parse_body

    kind = body_kind(endpoint)

    def parse(body: bytes) -> str | None:
        try:
            parsed = parse_body(kind, body)
        except InvalidRequest as error:
            param = f"body.{error.param}" if error.param else "body"
            raise _Problem(error.message, error.code or "invalid_request", param) from None
        for key in ("stream", "background"):
            if getattr(parsed, key, None):
                raise _Problem(f"{key} is not possible in a batch", "unsupported_parameter", f"body.{key}")
        model: str | None = getattr(parsed, "model", None)
        return model

    return parse


def _custom_id(file: BinaryIO, line: np.void) -> str:
    text = os.pread(file.fileno(), int(line["length"]), int(line["offset"]))
    return _LINE.decode(text).custom_id


class _WrappedRequest(msgspec.Struct, frozen=True):
    custom_id: str
    params: msgspec.Raw


class _Wrapped(msgspec.Struct, frozen=True):
    requests: list[_WrappedRequest]


def unwrap(order: CheckOrder) -> LineProblem | None:
    """Anthropic's body becomes a file of lines."""
    file = Path(order.file)
    try:
        body = msgspec.json.decode(file.read_bytes(), type=_Wrapped)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineProblem(f"the body is not a batch of requests: {error}", "invalid_json")
    lines = file.with_suffix(".lines")
    with lines.open("wb") as out:
        for request in body.requests:
            params = bytes(request.params).replace(b"\n", b" ").replace(b"\r", b" ")
            out.write(msgspec.json.encode(InputLine(request.custom_id, "POST", order.endpoint, msgspec.Raw(params))))
            out.write(b"\n")
        out.flush()
        os.fsync(out.fileno())
    lines.replace(file)
    return None


def check_file(order: CheckOrder) -> CheckReport:
    try:
        return _check_file(order)
    except OSError as error:
        return CheckReport(0, (), (), trouble=f"the index of its lines cannot be written: {error.strerror}")


def _check_file(order: CheckOrder) -> CheckReport:
    if order.is_wrapped and (problem := unwrap(order)) is not None:
        return CheckReport(0, (), (problem,))
    checker = LineChecker(order)
    with Path(order.file).open("rb") as file:
        report = checker.check(file)
    if not report.problems:
        _write_index(Path(order.index), checker.index())
    return report


def lines_of_models(file: Path, index: Path, models: list[int]) -> list[tuple[int, int]]:
    """The first lines that name one of these models: their numbers in the file, from 1, and their models."""
    lines = np.fromfile(index, dtype=LINE)
    chosen = lines[np.isin(lines["model"], models)][:MAX_PROBLEMS]
    found, number, offset = [], 1, 0
    with file.open("rb") as content:
        for line in chosen:
            number += _count_lines(content, int(line["offset"]) - offset)
            offset = int(line["offset"])
            found.append((number, int(line["model"])))
    return found


def _count_lines(file: BinaryIO, count: int) -> int:
    """That end in so many bytes."""
    ended = 0
    while count and (piece := file.read(min(count, _READ_BYTES))):
        ended += piece.count(b"\n")
        count -= len(piece)
    return ended


def _write_index(path: Path, index: Array) -> None:
    part = path.with_suffix(PART)
    with part.open("wb") as file:
        file.write(index.tobytes())
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def main() -> None:
    os.nice(_NICENESS)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckOrder)
    body_kind(order.endpoint)  # imported before memory is counted
    with suppress(OSError, ValueError):  # a system without such a limit has the one on time
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    sys.stdout.buffer.write(msgspec.json.encode(check_file(order)))


if __name__ == "__main__":
    main()
