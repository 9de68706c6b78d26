"""Starts an MCP server's command without the limits of the helper that asks for it, and ends it with that helper. A
program of its own, that knows no other module: `python spawn.py COMMAND …`."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def launched(command: Sequence[str]) -> list[str]:
    """The command that starts it so."""
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def main(parent: int, command: Sequence[str]) -> None:
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (hard, hard))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was gone before
            return
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
