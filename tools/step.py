"""Runs one step of an installation with a line for what it is at, and all that it said if it fails.

step.py "2/3 packages" COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterable

_COMPILED = re.compile(r"^\[(\d+)/(\d+)\] (?:Building|Linking) \w+ (?:object|module|shared module) (\S+)")
_COLLECTED = re.compile(r"^(?:Collecting|Downloading|Installing collected packages:) ?(\S*)")
_QUIET_S = 10.0  # without a terminal at most a line for so long, but for each compiled file


def describe(line: str) -> str | None:
    """What the user wants to know of a line of pip's or ninja's; None = nothing."""
    line = line.strip()
    if (match := _COMPILED.match(line)) is not None:
        number, total, file = match.groups()
        return f"compiled {number} of {total}: {file.rpartition('/')[2]}"
    if line.startswith("-- kernels for "):
        return line.removeprefix("-- ")
    if line.startswith("Installing collected packages"):
        return f"installs {line.count(',') + 1} packages"
    if (match := _COLLECTED.match(line)) is not None:
        return f"gets {match.group(1)}"
    return None


def follow(lines: Iterable[str], title: str, started_s: float) -> list[str]:
    """Prints as it goes; returns everything."""
    said, last_s, last = [], started_s, ""
    for line in lines:
        said.append(line)
        what = describe(line)
        is_due = what is not None and (not what.startswith("gets ") or time.monotonic() - last_s >= _QUIET_S)
        if what is not None and is_due and what != last:
            last_s, last = time.monotonic(), what
            print(f"{title}: {what} ({last_s - started_s:.0f} s)", flush=True)
    return said


def main(title: str, *command: str) -> int:
    started_s = time.monotonic()
    print(f"{title} …", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert process.stdout is not None
    said = follow(process.stdout, title, started_s)
    if process.wait() != 0:
        print("".join(said[-200:]), end="")
        print(f"{title}: failed with {process.returncode}: {' '.join(command)}", flush=True)
    else:
        print(f"{title}: done ({time.monotonic() - started_s:.0f} s)", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
