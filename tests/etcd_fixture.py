"""A real etcd on free ports of this machine, from the PATH (Debian: etcd-server); tests that need it are skipped, with
the reason, where there is none."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

START_TIMEOUT_S = 30.0


def need_etcd() -> str:
    found = shutil.which("etcd")
    if found is None:
        pytest.skip("no etcd on the PATH (Debian: etcd-server)")
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Etcd:
    def __init__(self, process: subprocess.Popen[bytes], host: str, folder: Path) -> None:
        self.process = process
        self.host = host
        self.folder = folder

    def state(self, prefix: str, lease_s: int = 3) -> str:
        return f"etcd://{self.host}/{prefix}?lease={lease_s}s"

    def pause(self) -> None:
        """It keeps its connections and answers nothing, as without a quorum."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def running_etcd(folder: Path, *, tls: bool = False) -> Iterator[Etcd]:
    binary, host, peer = need_etcd(), f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    url = f"{'https' if tls else 'http'}://{host}"
    options = {
        "data-dir": folder,
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
        "auto-tls": str(tls).lower(),
        "unsafe-no-fsync": None,  # the disk of a test machine proves nothing
        "logger": "zap",
        "log-level": "error",
    }
    known = subprocess.run([binary, "--help"], capture_output=True, text=True, env=_environment()).stdout
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    if "--unsafe-no-fsync" in known:
        arguments.append("--unsafe-no-fsync")
    process = subprocess.Popen([binary, *arguments], env=_environment(), stderr=subprocess.DEVNULL)
    try:
        _await_health(process, url)
        yield Etcd(process, host, folder)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"}  # 3.4 wants to be asked twice there


def _await_health(process: subprocess.Popen[bytes], url: str) -> None:
    """It has elected itself, and writes."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"etcd ended with {process.returncode}"
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", verify=False, trust_env=False).json()["health"] == "true":
                return
        time.sleep(0.05)
    raise AssertionError("etcd never answered")
