"""Whoever makes the noise: a process of its own and of low priority, so that what its own computing takes is not
mistaken for what the server takes.

`python -m dovetail_bench.abuse_noise URL KEY MODEL LOOPING ADMIN_KEY FOLDER` reads lines of a case's name and seconds
from standard input, makes that noise for so long and answers with a line; it ends with its input.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from dovetail_bench.abuse_cases import CASES, Target

NICENESS = 10


def main(arguments: list[str]) -> None:
    os.nice(NICENESS)
    url, key, model, looping, admin_key, folder = arguments
    target = Target(url, key, model, looping, admin_key, Path(folder))
    for line in sys.stdin:
        name, seconds = line.split()
        asyncio.run(_make(name, target, float(seconds)))
        print(flush=True)


async def _make(name: str, target: Target, seconds: float) -> None:
    await CASES[name][1](target, time.monotonic() + seconds)


if __name__ == "__main__":
    main(sys.argv[1:])
