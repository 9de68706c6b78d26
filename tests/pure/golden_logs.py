"""Detailed event logs of many runs, each as a SHA-256: the papers' presets on the shared traces, and fault storms of
the named policies and of what a server runs. A refactoring changes no digest.

`python tests/pure/golden_logs.py` compares with `golden/digests.json` and exits 1 if one differs; `--write` writes
that file, `--keep DIR` keeps the logs: run it before and after a change, then `diff` the case that it names.

The digests are those of x86-64 with glibc: durations come from logarithms and powers, of which another libm may round
the last bit otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import platform
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from dovetail.eventlog import EventLog
from dovetail.sim.compositions import policy
from dovetail.sim.setup import Setup, build
from dovetail.sim.storm import VIOLATIONS, run_one

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
DIGESTS = Path(__file__).parent / "golden" / "digests.json"
PRESETS = ("slinfer", "sllm", "sllm+c", "sllm+c+s", "serverlessllm", "dovetail")
TRACES = ("conversation", "sharegpt", "humaneval")
MODELS = 32  # of the traces' 128
LIMIT_S = 240.0  # arrivals after this are left out
SEEDS = 100  # of each kind of storm
MACHINE = f"{platform.machine()} {platform.libc_ver()[0] or platform.system()}"

Run = Callable[[EventLog], None]


def run_preset(name: str, ablations: tuple[str, ...], trace: str, log: EventLog) -> None:
    setup = Setup(
        SHARED / "traces" / f"azure_128_{trace}.csv.gz",
        SHARED / "profiles" / "slinfer.json",
        policy(name, ablations),
        models=MODELS,
        limit_s=LIMIT_S,
    )
    build(setup, log).run()


def run_storm(seed: int, of_server: bool, log: EventLog) -> None:
    run_one(seed, of_server=of_server, log=log)


def cases() -> Iterator[tuple[str, Run]]:
    if (SHARED / "traces").exists():
        for trace in TRACES:
            for name in PRESETS:
                yield f"{name} on {trace}", partial(run_preset, name, (), trace)
            yield f"slinfer, disaggregated, on {trace}", partial(run_preset, "slinfer", ("pd",), trace)
    for seed in range(SEEDS):
        yield f"storm {seed}", partial(run_storm, seed, False)
        yield f"server storm {seed}", partial(run_storm, seed, True)


def log_of(run: Run) -> str:
    """Of a run that violates an invariant, up to there."""
    file = io.StringIO()
    try:
        run(EventLog(file, is_detailed=True))
    except VIOLATIONS as error:
        file.write(f"{type(error).__name__}: {error}\n")
    return file.getvalue()


def digest_of(name: str, run: Run, keep: Path | None) -> tuple[str, str]:
    text = log_of(run)
    if keep is not None:
        (keep / f"{name.replace(' ', '_').replace(',', '')}.jsonl").write_text(text)
    return name, hashlib.sha256(text.encode()).hexdigest()


def digests(keep: Path | None) -> dict[str, str]:
    with ProcessPoolExecutor() as pool:
        futures = [pool.submit(digest_of, name, run, keep) for name, run in cases()]
        return dict(future.result() for future in futures)


def compare(found: dict[str, str]) -> int:
    stored = json.loads(DIGESTS.read_text())
    known = stored["digests"]
    if stored["machine"] != MACHINE:
        print(f"The digests are of {stored['machine']}, this is {MACHINE}: the last bit of a duration may differ.")
    if missing := known.keys() - found.keys():
        print(f"Not run, because {SHARED / 'traces'} is not there: {len(missing)} cases.")
    changed = [name for name, digest in found.items() if known.get(name) != digest]
    for name in changed:
        print(f"differs: {name}" if name in known else f"new: {name}")
    print(f"{len(found)} logs, {len(changed)} differ")
    return 1 if changed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write the digests instead of comparing")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs there")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    found = digests(options.keep)
    if not options.write:
        return compare(found)
    DIGESTS.parent.mkdir(exist_ok=True)
    DIGESTS.write_text(json.dumps({"machine": MACHINE, "digests": found}, indent=1) + "\n")
    print(f"{len(found)} digests written to {DIGESTS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
