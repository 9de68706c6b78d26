"""Installing: which kernels a build has, and what a step says of itself."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def built(folder: Path, levels: str) -> list[str]:
    command = ["cmake", "-S", ROOT / "native", "-B", folder, "-DDOVETAIL_MODULE=OFF", f"-DDOVETAIL_LEVELS={levels}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (folder / "generated/built_levels.inc").read_text().splitlines()
    return [line.removeprefix("LEVEL(").removesuffix(")") for line in lines if line.startswith("LEVEL(")]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_an_editable_install_compiles_the_best_level_of_this_processor_and_the_weakest(tmp_path: Path) -> None:
    every, native = built(tmp_path / "all", "all"), built(tmp_path / "native", "native")
    assert len(native) <= 2 < len(every)
    assert native[0] == every[0]
    assert set(native) <= set(every)


@pytest.fixture(scope="module")
def step() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step", ROOT / "tools" / "step.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("  [7/26] Building CXX object CMakeFiles/kernels.dir/step.cpp.o\n", "compiled 7 of 26: step.cpp.o"),
        ("  -- kernels for avx2;amx, of avx2;avx512;amx\n", "kernels for avx2;amx, of avx2;avx512;amx"),
        ("Collecting torch==2.13.0\n", "gets torch==2.13.0"),
        ("Installing collected packages: a, b, c\n", "installs 3 packages"),
        ("  Running command pip subprocess\n", None),
    ],
)
def test_a_step_says_what_it_is_at(step: ModuleType, line: str, says: str | None) -> None:
    assert step.describe(line) == says


def test_a_step_that_fails_shows_what_was_said(step: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    assert step.main("1/1 this", "sh", "-c", "echo the reason; exit 3") == 3
    assert "the reason\n1/1 this: failed with 3" in capfd.readouterr().out
    assert step.main("1/1 that", "true") == 0
    assert "1/1 that: done (" in capfd.readouterr().out


def test_an_install_leaves_the_compiling_of_modules_to_their_first_import() -> None:
    """All of them take a core 45 s, of which a server imports a part."""
    steps = [
        line for line in (ROOT / "Makefile").read_text().splitlines() if "$(STEP)" in line and "pip install" in line
    ]
    assert len(steps) == 2
    assert all("--no-compile" in step for step in steps)
