"""The token by which whoever may read this user's files changes a server without keys: a file, 0600, one per port.

Being at this machine is no proof: a browser with another site's page is there too, and so is a proxy.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from dovetail.machine import default_root

KEY_VARIABLE = "DOVETAIL_API_KEY"  # of the environment: a key that comes before the token


def token_file(port: int) -> Path:
    return default_root() / "run" / f"{port}.token"


def create_token(port: int) -> str:
    """Raises OSError where the file cannot be written."""
    path = token_file(port)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)  # of a server that was killed
    token = secrets.token_urlsafe(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(token)
    return token


def remove_token(port: int) -> None:
    with suppress(OSError):
        token_file(port).unlink()


def token_for(url: str) -> str | None:
    """Of the server at this address, if that is this machine and the file is ours to read."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if host != "localhost" and not ip_address(host).is_loopback:
            return None
        return token_file(port).read_text().strip() or None
    except (OSError, ValueError):
        return None
