"""llama.cpp as a peer: its own server and the one of llama-cpp-python, both on one build of the library.

There are no wheels for every machine, so it is built here, once, for this CPU: from the source that the Python package
carries, which any package index has. What is missing for that is PeerUnavailable, with the reason.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from dovetail.machine import usable_cores
from dovetail_bench.peers import Peer, PeerUnavailable, Report, run_step, set_up, single

VERSION = "0.3.36"
PACKAGE = f"llama-cpp-python=={VERSION}"
_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",  # the Python package loads them too
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
SERVER, LIBRARY = "llama-server", "llama"
_SERVER_PARTS = ("COMMON", "TOOLS", "SERVER", "APP")  # not needed, and not looked for, where the library is enough


def server_binary(folder: Path) -> Path:
    return folder / "llama.cpp" / "build" / "bin" / "llama-server"


def set_up_server(folder: Path, *, install: bool = True, report: Report = lambda text: None) -> Path:
    """`llama-server`: one from the PATH, else our own build."""
    binary = server_binary(folder)
    if binary.exists():
        return binary
    found = shutil.which("llama-server")
    if found is not None:
        return Path(found)
    if not install:
        raise PeerUnavailable("llama-server is neither on the PATH nor built")
    place = binary.parents[2]
    place.mkdir(parents=True, exist_ok=True)
    with single(place.with_suffix(".lock")):
        if not binary.exists():
            _build(place, report)
    return binary


def _build(place: Path, report: Report, target: str = SERVER, wheels: Path | None = None) -> None:
    if shutil.which("cmake") is None:
        raise PeerUnavailable(f"{target} cannot be built: there is no cmake")
    source = _source(place)
    if not source.exists():
        _unpack_source(place, report, wheels)
    report("llama.cpp: building it, which takes a while")
    build = place / "build"
    parts = [f"-DLLAMA_BUILD_{part}={'ON' if target == SERVER else 'OFF'}" for part in _SERVER_PARTS]
    run_step("llama.cpp", ["cmake", "-S", str(source / "vendor" / "llama.cpp"), "-B", str(build), *_CMAKE, *parts])
    jobs = ["--target", target, "--parallel", str(usable_cores())]
    run_step("llama.cpp", ["cmake", "--build", str(build), *jobs])


def _source(place: Path) -> Path:
    return place / f"llama_cpp_python-{VERSION}"


def _unpack_source(place: Path, report: Report, wheels: Path | None) -> None:
    name = f"{_source(place).name}.tar.gz"
    if wheels is None:
        report("llama.cpp: fetching its source")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", PACKAGE]
        run_step("llama.cpp", [*pip, "--dest", str(place)])
    archive = (wheels or place) / name
    if not archive.exists():
        raise PeerUnavailable(f"llama.cpp cannot be built: {archive} is missing")
    with tarfile.open(archive) as files:
        files.extractall(place, filter="data")


def set_up_engine(
    folder: Path, *, install: bool = True, wheels: Path | None = None, report: Report = lambda text: None
) -> tuple[Path, dict[str, str]]:
    """An interpreter for `import llama_cpp` and its environment: our build's library, and the package as its source has
    it, since all of it is Python."""
    place = folder / "llama.cpp"
    libraries = server_binary(folder).parent
    place.mkdir(parents=True, exist_ok=True)
    with single(place.with_suffix(".lock")):
        if not (libraries / "libllama.so").exists():
            if not install:
                raise PeerUnavailable("llama.cpp is not built")
            _build(place, report, LIBRARY, wheels)
    modules = ("numpy", "diskcache", "jinja2", "typing_extensions")
    python = set_up(Peer("llama-cpp-engine", modules, modules), folder, install=install, wheels=wheels, report=report)
    return python, {"PYTHONPATH": str(_source(place)), "LLAMA_CPP_LIB_PATH": str(libraries)}


def set_up_python(folder: Path, *, install: bool = True, report: Report = lambda text: None) -> tuple[Path, Peer]:
    """An interpreter for `python -m llama_cpp.server`, and what must be in its environment."""
    binary = set_up_server(folder, install=install, report=report)
    libraries = server_binary(folder).parent
    if binary.parent != libraries:
        raise PeerUnavailable("llama-server is not of our own build, so that its libraries may be of another version")
    peer = Peer(
        "llama-cpp-python",
        (f"llama-cpp-python[server]=={VERSION}",),
        ("llama_cpp", "starlette_context", "uvicorn"),
        built=("llama-cpp-python",),
        environment=(
            ("CMAKE_ARGS", "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"),
            ("LLAMA_CPP_LIB_PATH", str(libraries)),
        ),
    )
    return set_up(peer, folder, install=install, report=report), peer


def version_of(binary: Path) -> str:
    done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=60)
    lines = (done.stderr + done.stdout).strip().splitlines()
    return lines[0] if lines else "unknown"
