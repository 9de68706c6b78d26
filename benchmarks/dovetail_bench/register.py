"""The register of figures in docs/measurements: which command makes which table, and how a table is written from JSON.

`record` runs a command and keeps what it printed with its commit, day and machine; `write` puts tables into pages.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.machine import read_cpu

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "measurements"
RESULTS = ROOT / "benchmarks" / "results"
VERSIONS = ("torch", "numpy", "onnxruntime")
SIMULATOR = ("src/dovetail/sim", "src/dovetail/policy", "src/dovetail/node", "src/dovetail/cluster")
LINE = re.compile(r"^Measured: (.+); (.+); (\d{4}-\d\d-\d\d), `([0-9a-f]{7,})`; measures (`.+`)\.$", re.MULTILINE)
_BLOCK = re.compile(r"<!-- table (\S+) -->\n.*?<!-- /table -->", re.DOTALL)
_TRACE = "--trace azure_128_conversation.csv.gz --profile slinfer.json"
Rows = list[list[str]]


@dataclass(frozen=True)
class Entry:
    """One table: its command as a reader types it, the folders that it measures, and its rows, headings first."""

    command: str
    measures: tuple[str, ...]
    rows: Callable[[Any], Rows]


def _compositions(found: Sequence[Mapping[str, Any]]) -> Rows:
    """A row for each size, a column for each policy."""
    names = list(dict.fromkeys(row["labels"][2] for row in found))
    rows = [
        [
            "size",
            "requests",
            *(f"{name}: met, late, broken, silence p99" for name in names),
            "served over published",
            "over played",
        ]
    ]
    for size in dict.fromkeys(row["labels"][1] for row in found):
        cells = {row["labels"][2]: row for row in found if row["labels"][1] == size}
        gains = [100 * (cells["served"]["slo_met"] / cells[other]["slo_met"] - 1) for other in ("published", "played")]
        told = [_composition(cells[name]) for name in names]
        rows.append([size, str(cells["published"]["requests"]), *told, *(f"{gain:+.1f} %" for gain in gains)])
    return rows


def _composition(row: Mapping[str, Any]) -> str:
    met = 100 * row["slo_met"] / row["requests"]
    return f"{met:.1f} %, {row['broken_promises']}, {row['broken_answers']}, {row['silence_p99_s']:.2f} s"


def _bucket(found: Mapping[str, Any]) -> Rows:
    names = {
        "weight_bytes": "weights",
        "limit_mb_per_s": "the bucket passes",
        "listening_s": "server listens after",
        "offered_s": "model can be asked for after",
        "in_memory_s": "last byte in memory after",
        "first_token_s": "first token after",
        "on_disk_s": "model complete on disk after",
        "same_text": "text as from a copy on disk",
    }
    return [["", ""], *([told, _figure(name, found[name])] for name, told in names.items())]


def _figure(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes"):
        return f"{value / 1e9:.2f} GB"
    return f"{value:.1f} s" if name.endswith("_s") and not name.endswith("per_s") else f"{value:g} MB/s"


ENTRIES = {
    f"compositions-{workload}": Entry(
        f"dovetail sim compare {_TRACE} --sweep compositions --only {workload} --limit 150 --seed 5 --json",
        SIMULATOR,
        _compositions,
    )
    for workload in ("gsm8k", "cnn", "servegen", "arxiv")
}
ENTRIES["thesis"] = Entry(
    "dovetail bench thesis --json",
    ("src/dovetail/plan",),
    lambda found: [["constant", "times", "WRN50-5, by rising SLO", "WRN50-4"], *(list(row.values()) for row in found)],
)
ENTRIES["bucket"] = Entry(
    "dovetail bench bucket --json", ("src/dovetail/store", "src/dovetail/worker", "src/dovetail/gateway"), _bucket
)


def record(name: str, data: Path | None = None) -> Path:
    """Runs the entry's command on this machine. `data`: a folder in which the files that it names are looked for."""
    if name not in ENTRIES:
        raise ConfigError(f"{name}: unknown, expected one of {', '.join(ENTRIES)}")
    entry = ENTRIES[name]
    changed = _git("status", "--porcelain", "--", *entry.measures).strip()
    if changed:
        raise ConfigError(f"{name}: commit first, since a table names the commit of its code: {changed}")
    commit = _git("rev-parse", "--short", "HEAD").strip()
    words = [_found(word, data) for word in shlex.split(entry.command)[1:]]
    done = subprocess.run([sys.executable, "-m", "dovetail", *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(f"{name}: {entry.command} ended with {done.returncode}")
    cpu = read_cpu()
    kept = {
        "name": name,
        "command": entry.command,
        "commit": commit,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": f"{cpu.cores} cores of {cpu.model} ({cpu.architecture})",
        "versions": {"python": sys.version.split()[0]} | _versions(),
        "result": json.loads(done.stdout),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return path


def _found(word: str, data: Path | None) -> str:
    if data is None or "/" in word or "." not in word:
        return word
    return str(next(iter(sorted(data.rglob(word))), word))


def _versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def pages() -> dict[Path, str]:
    """Every page of the register, with the tables of recorded runs in their places."""
    return {path: _BLOCK.sub(_block, path.read_text()) for path in _pages()}


def _pages() -> list[Path]:
    return sorted(PAGES.glob("*.md"))


def _block(found: re.Match[str]) -> str:
    name = found[1]
    path = RESULTS / f"{name}.json"
    if name not in ENTRIES or not path.exists():
        raise ConfigError(f"docs/measurements: table {name} has no entry or no recorded run")
    kept = json.loads(path.read_text())
    entry = ENTRIES[name]
    measures = ", ".join(f"`{folder}`" for folder in entry.measures)
    line = f"Measured: `{kept['command']}`; {kept['machine']}; {kept['date']}, `{kept['commit']}`; measures {measures}."
    heading, *rows = entry.rows(kept["result"])
    table = [heading, ["---"] * len(heading), *rows]
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([f"<!-- table {name} -->", "", line, "", *lines, "", "<!-- /table -->"])


def ages() -> list[tuple[str, str, str, int]]:
    """Of each table: its page, the day, the commit, and how many later commits changed what it measures."""
    rows = []
    for path in _pages():
        for _, _, day, commit, folders in LINE.findall(path.read_text()):
            paths = re.findall(r"`([^`]+)`", folders)
            later = _git("rev-list", "--count", f"{commit}..HEAD", "--", *paths).strip()
            rows.append((path.name, day, commit, int(later)))
    return rows


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout
