"""The folder with the sockets of a gateway and its workers: nobody else's, and gone with the gateway. One that a killed
gateway left is removed by the next; the lock in it says whether its gateway lives, in whatever container."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "dovetail-gateway-"
_LOCK = "lock"
_MAX_CHARS = 60  # a socket's address has room for 107


class PrivateFolder:
    def __init__(self) -> None:
        """Mode 0700: nobody else may speak to the workers."""
        parent = Path(tempfile.gettempdir())
        if len(str(parent / _PREFIX)) + 8 > _MAX_CHARS:
            parent = Path("/tmp")
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # another user's, or one that is being made
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
