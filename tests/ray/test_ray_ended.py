"""`up` that is told to end before it serves, at several moments of Ray's start. Run by `make cluster`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from namespaces import is_possible
from ray_machines import COMMAND, TIMEOUT_S, free_port

pytest.importorskip("ray.exceptions", reason="the extra `cluster` is not installed; `make cluster` runs these")


@pytest.fixture(scope="module", autouse=True)
def _loopback() -> None:
    """Where these run in a network of their own, it begins without."""
    if is_possible():
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=30)


def ray_session(head: subprocess.Popen[bytes]) -> int | None:
    """The session of what `up` has started as Ray's head, if it has."""
    for child in psutil.Process(head.pid).children():
        with suppress(psutil.Error):  # it may have ended since
            if "--head" in child.cmdline():
                return os.getsid(child.pid)
    return None


def members(session: int) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
    return found


def has_begun(session: int) -> bool:
    return bool(members(session))


def has_servers(session: int) -> bool:
    return "gcs_server" in members(session)


def answers(session: int) -> bool:
    """The head is up: `up` connects to it."""
    return "raylet" in members(session)


@pytest.mark.parametrize("moment", [has_begun, has_servers, answers])
def test_an_end_while_ray_starts_leaves_nothing_of_it(moment: Callable[[int], bool], tmp_path: Path) -> None:
    ports = ["--port", str(free_port()), "--cluster-port", str(free_port()), "--state", str(tmp_path / "state")]
    with (tmp_path / "log").open("wb") as log:
        head = subprocess.Popen([*COMMAND, "up", "--head-only", *ports], stdout=log, stderr=subprocess.STDOUT)
    session = None
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while session is None or not moment(session):
            assert head.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, "Ray was not started"
            time.sleep(0.01)
            session = session or ray_session(head)
        head.terminate()
        assert head.wait(60) in (0, signal.SIGTERM), (tmp_path / "log").read_text()  # the latter is how Ray exits
        assert not members(session)
    finally:
        head.kill()
        head.wait()
        if session is not None:
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
