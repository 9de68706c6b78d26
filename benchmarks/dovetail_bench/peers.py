"""Peers to measure against: each in a virtual environment of its own, spoken to through a child process that stays.

A peer's packages never enter our environment, where they could pull another torch or numpy. An environment is made once
and kept; where this interpreter already has all that a peer needs, it is used as it is. The child answers one command
at a time, so that starting a process and importing are not in what is measured. What cannot be had on this machine is
PeerUnavailable with the reason: a bench says so in its table and goes on.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from dovetail.errors import DovetailError
from dovetail.machine import default_root

TORCH, NUMPY = "torch==2.13.0", "numpy==2.4.6"
_READY = "ready.json"
_PIP_TIMEOUT_S = 3600.0  # or for building one
_END_S = 10.0  # for a child to end by itself, once nothing is asked of it

Report = Callable[[str], None]  # what is being done now


class PeerFailed(DovetailError):
    """A peer that is there did not do what it was asked."""


class PeerUnavailable(DovetailError):
    """A peer that cannot be had on this machine, and why."""


class Peer(msgspec.Struct, frozen=True):
    name: str
    requirements: tuple[str, ...]  # for pip, in order; the first one is installed before the others are looked at
    modules: tuple[str, ...]  # must be importable afterwards
    built: tuple[str, ...] = ()  # packages that come as source; all others must be wheels
    environment: tuple[tuple[str, str], ...] = ()  # for building and for running it
    removed: tuple[str, ...] = ()  # packages that come along, are not needed and do not go with this torch


PEERS = {
    peer.name: peer
    for peer in (
        Peer("safetensors", (TORCH, NUMPY, "safetensors==0.8.0"), ("torch", "safetensors")),
        Peer("fastsafetensors", (TORCH, NUMPY, "fastsafetensors==0.5.0"), ("torch", "fastsafetensors")),
        Peer("runai-model-streamer", (TORCH, NUMPY, "runai-model-streamer==0.17.0"), ("torch", "runai_model_streamer")),
    )
}


class _Ready(msgspec.Struct):
    """Written last, so that half an environment is never taken for a whole one."""

    requirements: tuple[str, ...]
    python: str


def default_folder() -> Path:
    return default_root() / "peers"


def find_python(peer: Peer, folder: Path) -> Path | None:
    """An interpreter that has the peer: this one, or the one made for it earlier."""
    if all(importlib.util.find_spec(module) is not None for module in peer.modules):
        return Path(sys.executable)
    python = folder / peer.name / "bin" / "python"
    try:
        ready = msgspec.json.decode((folder / peer.name / _READY).read_bytes(), type=_Ready)
    except (OSError, msgspec.DecodeError):
        return None
    is_current = ready.requirements == peer.requirements and ready.python == platform.python_version()
    return python if is_current and python.exists() else None


def set_up(
    peer: Peer,
    folder: Path,
    *,
    install: bool = True,
    wheels: Path | None = None,
    report: Report = lambda text: None,
) -> Path:
    """The peer's interpreter; makes its environment if there is none yet. PeerUnavailable says why there cannot be.

    `wheels`: a folder to install from without a network. What it lacks is taken from the machine's own Python (its
    torch, above all), in whatever version that has."""
    if (python := find_python(peer, folder)) is not None:
        return python
    if not install:
        raise PeerUnavailable(f"{peer.name} is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    with single(folder / f"{peer.name}.lock"):
        return find_python(peer, folder) or _install(peer, folder / peer.name, wheels, report)


def _install(peer: Peer, place: Path, wheels: Path | None, report: Report) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    report(f"{peer.name}: making an environment")
    _run(peer, [sys.executable, "-m", "venv", str(place)])
    python = place / "bin" / "python"
    if wheels is not None:
        _share_packages(place)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    pip += [option for name in peer.built for option in ("--no-binary", name)]
    wanted = peer.requirements
    if wheels is not None:
        pip += ["--no-index", "--find-links", str(wheels)]
        wanted = tuple(requirement.partition("==")[0] for requirement in wanted)
    for count, requirement in enumerate(wanted):
        report(f"{peer.name}: installing {requirement}")
        # With the earlier ones named again pip cannot exchange them for what this one would rather have.
        _run(peer, [*pip, *wanted[: count + 1]])
    if peer.removed:
        _run(peer, [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *peer.removed])
    report(f"{peer.name}: trying to import it")
    _run(peer, [str(python), "-c", "import " + ", ".join(peer.modules)])
    ready = _Ready(peer.requirements, platform.python_version())
    (place / _READY).write_bytes(msgspec.json.encode(ready))
    return python


def _share_packages(place: Path) -> None:
    """Whatever this interpreter can import, behind the environment's own. The option of venv for that shows the
    packages of the Python below, not those of an environment that this one is itself."""
    seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (place / "lib" / version / "site-packages" / "machine.pth").write_text("\n".join(seen) + "\n")


def _run(peer: Peer, command: list[str]) -> None:
    run_step(peer.name, command, dict(peer.environment))


def run_step(name: str, command: list[str], changes: dict[str, str] | None = None) -> None:
    """One step of setting a peer up; PeerUnavailable with what it complained of."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= changes or {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"{name} cannot be installed: {error}") from error
    if done.returncode != 0:
        here = f"{platform.machine()}, Python {platform.python_version()}"
        raise PeerUnavailable(f"{name} cannot be installed on {here}: {_reason(done.stderr)}")


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:") or "Error:" in line]
    return (errors or lines or ["no reason given"])[-1].removeprefix("ERROR:").strip()


@contextmanager
def single(path: Path) -> Iterator[None]:
    """Two benches at once make one environment."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class PeerProcess:
    """A child under the peer's interpreter: one JSON object a line in, one out. Ended on leaving, with all that it
    started. `log` takes what it writes to stderr."""

    def __init__(
        self,
        python: Path,
        script: Path,
        name: str,
        environment: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        self.name = name
        self._log = log
        # Without the script's own folder, whose modules would hide packages of the same name.
        command = [str(python), "-P", str(script), *arguments]
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        with log.open("ab") if log is not None else nullcontext() as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=variables,
                start_new_session=True,  # Ctrl-C is for the bench, which then ends its children
            )
        self._received = b""

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Of a bench that was interrupted nobody waits for an engine in the middle of its work."""
        self.close(_END_S if kind is None else 0.0)

    def ask(self, command: dict[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        line = msgspec.json.encode(command) + b"\n"
        try:
            _pipe(self._process.stdin).write(line)
            _pipe(self._process.stdin).flush()
        except BrokenPipeError as error:
            raise self._died() from error
        answer: dict[str, Any] = msgspec.json.decode(self._read_line(time.monotonic() + timeout_s))
        if "error" in answer:
            raise self._failed(answer["error"])
        return answer

    def close(self, timeout_s: float = _END_S) -> None:
        with suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()  # the child's loop ends with its input
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._kill()
        self._process.wait()
        _pipe(self._process.stdout).close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # the group is its own: whatever it left behind goes too
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read_line(self, deadline: float) -> bytes:
        output = _pipe(self._process.stdout)
        while b"\n" not in self._received:
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._kill()
                raise self._failed("no answer in time")
            part = os.read(output.fileno(), 65536)
            if not part:
                raise self._died()
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _died(self) -> PeerFailed:
        return self._failed(f"its process ended with {self._process.wait()}")

    def _failed(self, what: str) -> PeerFailed:
        return PeerFailed(f"{self.name}: {what}" + (f" (log: {self._log})" if self._log else ""))


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
