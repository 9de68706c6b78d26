"""The folder of a gateway's sockets: gone with it, or with the next gateway where it was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dovetail.gateway.workers.private_folder import PrivateFolder

LEFT = """
import os, dovetail.gateway.workers.private_folder as module
module._MAX_CHARS = 4096
print(module.PrivateFolder().path, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_folder_of_a_gateway_that_was_killed_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("dovetail.gateway.workers.private_folder._MAX_CHARS", 4096)
    alive = PrivateFolder()
    abandoned = Path(subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True).stdout.strip())
    assert abandoned.parent == tmp_path
    assert abandoned.is_dir()
    (tmp_path / "dovetail-gateway-someone").mkdir()  # without a lock: it is being made
    second = PrivateFolder()
    assert {path.name for path in tmp_path.iterdir()} == {
        alive.path.name,
        second.path.name,
        "dovetail-gateway-someone",
    }
    assert alive.path.stat().st_mode & 0o777 == 0o700
    for folder in (alive, second):
        folder.remove()
        assert not folder.path.exists()
