"""One pull in a process of its own: `python -m` of this module. Says on its output, line by line, how far it is.

Whoever started it may end it at any time: a pull that is killed leaves no half (see `store.publish`).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from dovetail.errors import DovetailError
from dovetail.types import ModelCard

if TYPE_CHECKING:
    from dovetail.store.sources.bucket_model import EarlyServing


class Order(msgspec.Struct, frozen=True):
    root: str
    source: str
    name: str
    layout: str
    force: bool = False
    memory_bytes: int = 0  # that it may allocate; mapped files do not count
    parent: int = 0
    pool: int = -1  # descriptor of the host pool, where the model may be served before it is on disk


class Step(msgspec.Struct, frozen=True, tag="step"):
    stage: str
    done_bytes: int
    total_bytes: int


class Servable(msgspec.Struct, frozen=True, tag="servable"):
    """It can be loaded, from the pool, while the rest of it comes."""

    card: ModelCard


class Done(msgspec.Struct, frozen=True, tag="done"):
    card: ModelCard


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    error: str  # its class in `dovetail.errors`
    message: str


Line = Step | Servable | Done | Failed


def main() -> None:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else a terminal may stop whoever prints from behind
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    output, sys.stdout = sys.stdout.buffer, sys.stderr  # what a library prints is no line of ours
    _confine(order)
    from dovetail.store.catalogue import Catalogue

    def report(stage: str, done_bytes: int, total_bytes: int) -> None:
        _say(output, Step(stage, done_bytes, total_bytes))

    try:
        catalogue = Catalogue(Path(order.root))
        card = catalogue.pull(
            order.source,
            order.name,
            progress=report,
            layout=order.layout,
            force=order.force,
            early=_early(order, lambda name: _say(output, Servable(catalogue.arriving(name)))),
        )
    except DovetailError as error:
        _say(output, Failed(type(error).__name__, str(error)))
    except MemoryError:
        _say(output, Failed("SourceError", f"{order.source}: it needs more than {order.memory_bytes >> 20} MB"))
    else:
        _say(output, Done(card))


def _early(order: Order, on_servable: Callable[[str], None]) -> EarlyServing | None:
    from dovetail.store.host_pool.pool import HostPool
    from dovetail.store.sources.bucket_model import EarlyServing

    return EarlyServing(HostPool(order.pool), on_servable) if order.pool >= 0 else None


def _confine(order: Order) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if order.parent and os.getppid() != order.parent:
            sys.exit(1)
    if order.memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (order.memory_bytes, order.memory_bytes))


def _say(output: IO[bytes], line: Line) -> None:
    output.write(msgspec.json.encode(line) + b"\n")
    output.flush()


if __name__ == "__main__":
    main()
