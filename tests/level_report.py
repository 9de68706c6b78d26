"""The lines of the test suite's header about kernel levels: tried natively, under emulation, not at all."""

from __future__ import annotations

import importlib.util
import json
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent


def run_levels() -> ModuleType:
    """native/run_levels.py, which is no package."""
    spec = importlib.util.spec_from_file_location("run_levels", ROOT / "native" / "run_levels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def level_lines() -> list[str]:
    from dovetail.native import levels

    tool = run_levels()
    return describe(tool.LEVELS, levels()[1:], emulated_levels(tool))


def emulated_levels(tool: ModuleType) -> list[str]:
    """What `make levels` ran under emulation, if the sources are still those."""
    try:
        record: dict[str, Any] = json.loads(tool.RECORD.read_text())
    except (OSError, ValueError):
        return []
    if record.get("sources") != tool.source_hash():
        return []
    outcomes = {level: outcome for levels in record["outcomes"].values() for level, outcome in levels.items()}
    return [level for level, outcome in outcomes.items() if outcome.startswith("under emulation")]


def describe(known: dict[str, tuple[str, ...]], native: list[str], emulated: list[str]) -> list[str]:
    every = [level for levels in known.values() for level in levels]
    untried = [level for level in every if level not in native and level not in emulated]
    return [
        f"kernel levels tried by these tests, natively on {platform.machine()}: {', '.join(native) or 'none'}",
        f"  under emulation, by `make levels` from these sources: {', '.join(emulated) or 'none'}",
        f"  not at all: {', '.join(untried) or 'none'}",
    ]
