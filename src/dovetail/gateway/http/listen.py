"""The listening socket, taken before anything costly is started, so that a port in use is known at once."""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address

from dovetail.config import Config
from dovetail.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, because asyncio sends small answers at once only where it knows that it is TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, UnicodeError) as error:
        listener.close()
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = "the port is in use" if in_use else getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    listener.setblocking(False)
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address that is listened on."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, config: Config) -> None:
    """Everyone who reaches a server without keys may use it: beyond this machine only if that was said."""
    if not is_loopback(host) and not config.auth.keys and not config.server.open_to_network:
        raise ConfigError(
            f"listening on {host} without API keys lets everyone in the network use this server; set auth.keys or "
            "DOVETAIL_API_KEY, or say --open-to-network (server.open_to_network: true) if that is meant"
        )


def base_url(listener: socket.socket, *, is_https: bool = False) -> str:
    """Where a client on this machine reaches the listener."""
    scheme = "https" if is_https else "http"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
