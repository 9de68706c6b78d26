"""What a server keeps, so that one that is started after it finds what it left (L8): one interface, and a small SQLite
file behind it. `gateway.workers.etcd_state` keeps the same for several gateways.

Facts by kind and name, written as they come about: which workers run, which models were assigned to them and confirmed,
which nodes are emptied, the keys of the wire. Nodes are right where they say otherwise. One server at a time has it.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from pathlib import Path
from typing import Any, Protocol

from dovetail.errors import ConfigError

FILE = "state.db"
MAX_FOLDER_CHARS = 80  # the address of a Unix socket in it has at most 107, on some systems 103


class Durable(Protocol):
    """Facts by kind and name; whoever has one is the only one that decides."""

    folder: Path  # of this machine: sockets and pulses of local workers, and of fronts
    machine: str  # after the kind of facts that mean nothing on another machine; empty where there is no other

    def put(self, kind: str, name: str, value: Any) -> None: ...

    def drop(self, kind: str, name: str) -> None: ...

    def get(self, kind: str, name: str) -> Any | None: ...

    def all(self, kind: str) -> dict[str, Any]:
        """By name, what was written last at the end."""

    def flush(self) -> None:
        """Returns when all of it is written, or raises `Overloaded`: it cannot be for now."""

    def trouble(self) -> str | None:
        """Why this server must not decide now; None: it may."""

    def close(self) -> None: ...


def private_folder(folder: Path) -> Path:
    """It holds keys, and whoever connects to the socket in it is obeyed."""
    folder = folder.expanduser().absolute()
    if len(str(folder)) > MAX_FOLDER_CHARS:
        raise ConfigError(f"state: {folder} is longer than {MAX_FOLDER_CHARS} characters")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"state: {folder}: {error.strerror}") from error
    return folder


def lock_folder(folder: Path, key: str) -> int:
    """The descriptor of its lock, which goes with this process. Raises ConfigError that names the key of the file."""
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{key}: {folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ConfigError(f"{key}: another server uses {folder}; give one of them a folder") from error
    return lock


class SqliteDurable:
    """A `Durable` in a folder of this machine."""

    machine = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder = private_folder(folder)
        self._lock = lock_folder(folder, "state")
        self._database = self._open(folder / FILE)

    def _open(self, file: Path) -> sqlite3.Connection:
        try:
            database = sqlite3.connect(file, isolation_level=None)  # each fact is a transaction
            # What was written survives this process at once, the machine at the next checkpoint: nothing in it outlives
            # a machine that stopped.
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=NORMAL")
            database.execute(
                "CREATE TABLE IF NOT EXISTS facts (kind TEXT, name TEXT, value TEXT, PRIMARY KEY (kind, name))"
            )
        except sqlite3.Error as error:
            os.close(self._lock)
            raise ConfigError(f"state: {file}: {error}") from error
        return database

    def put(self, kind: str, name: str, value: Any) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?, ?)", (kind, name, json.dumps(value)))

    def drop(self, kind: str, name: str) -> None:
        self._database.execute("DELETE FROM facts WHERE kind = ? AND name = ?", (kind, name))

    def get(self, kind: str, name: str) -> Any | None:
        return self.all(kind).get(name)

    def all(self, kind: str) -> dict[str, Any]:
        rows = self._database.execute("SELECT name, value FROM facts WHERE kind = ? ORDER BY rowid", (kind,))
        return {name: json.loads(value) for name, value in rows}

    def flush(self) -> None:
        """Each fact was written when it was put."""

    def trouble(self) -> str | None:
        return None

    def close(self) -> None:
        self._database.close()
        os.close(self._lock)
