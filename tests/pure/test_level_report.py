"""The header of the test suite names every kernel level once: tried natively, under emulation, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from level_report import describe, emulated_levels, run_levels


@pytest.fixture
def tool() -> ModuleType:
    return run_levels()


def test_every_level_stands_in_one_line(tool: ModuleType) -> None:
    native, emulated, untried = describe(tool.LEVELS, ["neon", "dotprod"], ["avx2"])
    assert native.endswith(": neon, dotprod")
    assert emulated.endswith(": avx2")
    assert untried.endswith(": i8mm, avxvnni, avx512, avx512vnni, avx512bf16, amx")


def test_what_other_sources_passed_does_not_count(tool: ModuleType, tmp_path: Path) -> None:
    tool.RECORD = tmp_path / "levels.json"
    assert emulated_levels(tool) == []
    outcomes = {"x86_64": {"avx2": "under emulation (qemu)", "amx": "compiled only: no emulator"}}
    tool.RECORD.write_text(json.dumps({"sources": tool.source_hash(), "outcomes": outcomes}))
    assert emulated_levels(tool) == ["avx2"]
    tool.RECORD.write_text(json.dumps({"sources": "others", "outcomes": outcomes}))
    assert emulated_levels(tool) == []


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("echo avx2 ok", "ok"),
        ("echo avx2 lacking", "lacking"),
        ("echo 'avx2: 3 x 4 by 5 tokens: wrong'; exit 1", "FAILED (avx2: 3 x 4 by 5 tokens: wrong)"),
        ("echo neon ok", "FAILED (neon ok)"),
        ("kill -ILL $$", "FAILED (exit code -4)"),
    ],
)
def test_only_a_level_that_says_so_has_passed(tool: ModuleType, tmp_path: Path, script: str, outcome: str) -> None:
    program = tmp_path / "check"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert tool.run_check(program, "avx2", []) == outcome


def test_the_levels_are_those_of_the_build_and_of_the_dispatch(tool: ModuleType) -> None:
    cmake = (tool.NATIVE / "CMakeLists.txt").read_text()
    built = [line.split("(")[1].split()[0] for line in cmake.splitlines() if line.strip().startswith("add_level(")]
    assert built == [level for levels in tool.LEVELS.values() for level in levels]
