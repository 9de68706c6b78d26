"""`make levels`: builds the kernel check for both architectures and runs every level that it can.

Needs CMake and a C++ compiler; for what this machine lacks a cross compiler and qemu's user-mode emulator, each of
which is asked for by name where it is missing. The outcome is printed as a table and kept in build/levels.json, which
the header of the test suite reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

NATIVE = Path(__file__).resolve().parent
BUILD = NATIVE.parent / "build"
RECORD = BUILD / "levels.json"
TIMEOUT_S = 1800  # of one level; emulators are slow, and machines busy

LEVELS = {
    "aarch64": ("neon", "dotprod", "i8mm"),
    "x86_64": ("avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"),
}
PACKAGES = {"aarch64": "g++-aarch64-linux-gnu", "x86_64": "g++-x86-64-linux-gnu"}  # Debian's names
NO_EMULATOR = "qemu emulates neither AVX-512 nor AVX-VNNI nor AMX"


def source_hash() -> str:
    """Of everything that is compiled: an outcome holds for these sources only."""
    digest = hashlib.sha256()
    for path in [*sorted(NATIVE.glob("*.[ch]pp")), NATIVE / "CMakeLists.txt"]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def own_architecture() -> str:
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine())


def compiler_for(architecture: str) -> str | None:
    if architecture == own_architecture():
        return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    return shutil.which(f"{architecture}-linux-gnu-g++")


def build_check(architecture: str, compiler: str) -> Path:
    is_own = architecture == own_architecture()
    folder = BUILD / ("check" if is_own else f"cross-{architecture}")
    options = ["-DDOVETAIL_MODULE=OFF"]
    if not is_own:
        options += ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={architecture}"]
        options += [f"-DCMAKE_CXX_COMPILER={compiler}"]
    subprocess.run(["cmake", "-S", str(NATIVE), "-B", str(folder), *options], check=True, stdout=subprocess.DEVNULL)
    jobs = str(os.cpu_count() or 1)
    subprocess.run(["cmake", "--build", str(folder), "--target", "kernels_check", "-j", jobs], check=True)
    return folder / "kernels_check"


def run_check(program: Path, level: str, prefix: list[str]) -> str:
    """ok, lacking, or failed with what the program said."""
    done = subprocess.run([*prefix, str(program), level], capture_output=True, text=True, timeout=TIMEOUT_S)
    said = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 0 and said.split() in ([level, "ok"], [level, "lacking"]):
        return said.split()[1]
    return f"FAILED ({said or f'exit code {done.returncode}'})"


def emulator_for(architecture: str) -> list[str] | None:
    program = shutil.which(f"qemu-{architecture}") or shutil.which(f"qemu-{architecture}-static")
    if program is None:
        return None
    libraries = [] if architecture == own_architecture() else ["-L", f"/usr/{architecture}-linux-gnu"]
    return [program, "-cpu", "max", *libraries]


def try_level(architecture: str, level: str, program: Path) -> str:
    if architecture == own_architecture() and (outcome := run_check(program, level, [])) != "lacking":
        return "natively" if outcome == "ok" else outcome
    emulator = emulator_for(architecture)
    if emulator is None:
        return f"compiled only: qemu-{architecture} is missing (Debian: apt-get install qemu-user)"
    outcome = run_check(program, level, emulator)
    if outcome == "ok":
        return "under emulation (qemu)"
    return f"compiled only: {NO_EMULATOR}" if outcome == "lacking" else outcome


def try_architecture(architecture: str) -> dict[str, str]:
    compiler = compiler_for(architecture)
    if compiler is None:
        why = f"not at all: no compiler for {architecture} (Debian: apt-get install {PACKAGES[architecture]})"
        return dict.fromkeys(LEVELS[architecture], why)
    program = build_check(architecture, compiler)
    outcomes = {}
    for level in LEVELS[architecture]:
        outcomes[level] = try_level(architecture, level, program)
        print(f"{level}: {outcomes[level]}", flush=True)
    return outcomes


def main() -> int:
    outcomes = {architecture: try_architecture(architecture) for architecture in LEVELS}
    RECORD.write_text(json.dumps({"sources": source_hash(), "outcomes": outcomes}, indent=1) + "\n")
    print("\n| level | architecture | the kernel check ran |\n|---|---|---|")
    for architecture, levels in outcomes.items():
        for level, outcome in levels.items():
            print(f"| `{level}` | {architecture} | {outcome} |")
    return int(any("FAILED" in outcome for levels in outcomes.values() for outcome in levels.values()))


if __name__ == "__main__":
    sys.exit(main())
