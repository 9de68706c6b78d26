"""Pulls beside a running server: each in a child that may take so much memory and must get on, and that can be ended.

What a source holds is a stranger's: reading a small file can take minutes and gigabytes, and no thread can be stopped.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dovetail import errors
from dovetail.confined import give_way
from dovetail.errors import DovetailError, SourceError
from dovetail.store.pull_child import Done, Failed, Line, Order, Servable, Step
from dovetail.store.sources.blob_download import WAITING
from dovetail.store.sources.fetch import Progress
from dovetail.types import ModelCard

_LOOK_S = 0.2  # how often whoever waits is asked whether it still does
_lines = msgspec.json.Decoder(Line)


@dataclass(frozen=True)
class PullBounds:
    memory_bytes: int = 4 << 30  # allocated, beside the files that are mapped
    stall_s: float = 180.0  # without a byte more
    niceness: int = 10  # the cores are there to serve


def pull_in_process(
    root: Path,
    source: str,
    name: str,
    layout: str,
    progress: Progress,
    *,
    force: bool = False,
    bounds: PullBounds,
    pool: int = -1,
    on_servable: Callable[[ModelCard], None] = lambda card: None,
) -> ModelCard:
    """`Catalogue.pull`, elsewhere. What `progress` raises ends the child. `pool`: descriptor of the host pool, by which
    a model can be served while it downloads; `on_servable` is then called as soon as it can. Raises DovetailError."""
    order = Order(str(root), source, name, layout, force, bounds.memory_bytes, os.getpid(), pool)
    child = subprocess.Popen(
        [sys.executable, "-m", "dovetail.store.pull_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[pool] if pool >= 0 else [],
        process_group=0,  # it can be ended with what it has started; the session is ours, so that niceness counts
        env=dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),  # their buffers count as memory
    )
    give_way(child.pid, bounds.niceness)
    try:
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        child.stdin.close()
        return _follow(child, source, progress, bounds, on_servable)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # what it has started goes with it
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def _follow(
    child: subprocess.Popen[bytes],
    source: str,
    progress: Progress,
    bounds: PullBounds,
    on_servable: Callable[[ModelCard], None],
) -> ModelCard:
    last, since = Step("", 0, 0), time.monotonic()
    for line in _lines_of(child):
        if isinstance(line, Done):
            return line.card
        if isinstance(line, Failed):
            raise _error(line)
        if isinstance(line, Servable):
            on_servable(line.card)
            continue
        if (line is not None and line != last) or last.stage == WAITING:
            last, since = line or last, time.monotonic()
        if time.monotonic() - since > bounds.stall_s:
            raise SourceError(f"{source}: nothing came of it for {bounds.stall_s:.0f} s; the pull was ended")
        progress(last.stage, last.done_bytes, last.total_bytes)
    limit = bounds.memory_bytes >> 20
    raise SourceError(f"{source}: the pull's process ended with code {child.wait()}; it may have {limit} MB")


def _lines_of(child: subprocess.Popen[bytes]) -> Iterator[Line | None]:
    """What it says; None whenever it said nothing for a moment."""
    assert child.stdout is not None
    descriptor, rest = child.stdout.fileno(), b""
    while True:
        if not select.select([descriptor], [], [], _LOOK_S)[0]:
            yield None
            continue
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        lines = [_lines.decode(text) for text in whole]
        steps = [line for line in lines if isinstance(line, Step)]
        yield from [line for line in lines if not isinstance(line, Step)] or steps[-1:]


def _error(failed: Failed) -> DovetailError:
    kind = getattr(errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, DovetailError):
        return kind(failed.message)
    return SourceError(failed.message)
