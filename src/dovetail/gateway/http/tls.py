"""TLS for clients: certificate and key from files, which can be replaced while connections are open.

A connection keeps the certificate that it began with. What is served over it is not known here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import uvicorn

from dovetail.config import TlsConfig
from dovetail.errors import ConfigError

_HAS_PASSPHRASE = "the key has a passphrase; write it without one, as `openssl pkey -in KEY -out PLAIN` does"
_SHUTDOWN_TIMEOUT_S = 5.0  # for a client's last word
_REASONS = {
    "KEY_VALUES_MISMATCH": "server.tls.key: {key} is not the key of the first certificate in {cert}",
    "NO_START_LINE": "server.tls: {cert} or {key} is not PEM (-----BEGIN …-----)",
    "PEM_LIB": "server.tls: {cert} or {key} is damaged, or is not PEM",
}


class Tls:
    """The certificate of new connections. `context` is the listener's; each handshake takes the one that was read
    last."""

    def __init__(self, config: TlsConfig) -> None:
        self._current = read_certificate(config)
        self.context = read_certificate(config)
        self.context.sni_callback = self._choose

    def replace(self, context: ssl.SSLContext) -> None:
        """From the next handshake on."""
        self._current = context

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL asks for every handshake, whether the client named a server or not."""
        connection.context = self._current


class TlsServer(uvicorn.Server):
    """uvicorn over HTTPS where there is a certificate, with limits on the time of handshakes, which its own start does
    not have."""

    def __init__(self, config: uvicorn.Config, tls: Tls | None, handshake_timeout_s: float) -> None:
        super().__init__(config)
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
            return
        assert sockets is not None
        (listener,) = sockets
        accepting = await asyncio.get_running_loop().create_server(
            self._make_protocol,
            sock=listener,
            ssl=self._tls.context,
            ssl_handshake_timeout=self._handshake_timeout_s,
            ssl_shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
            backlog=self.config.backlog,
        )
        self.servers = [accepting]
        self.started = True

    def _make_protocol(self) -> asyncio.Protocol:
        make = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)  # type: ignore[call-arg]


def read_certificate(config: TlsConfig) -> ssl.SSLContext:
    """Raises ConfigError that names key and file."""
    for key, path in (("cert", config.cert), ("key", config.key)):
        _check_readable(f"server.tls.{key}", path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 or later
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.cert, config.key, password=_refuse_passphrase)
    except ssl.SSLError as error:
        reason = _REASONS.get(error.reason or "", "server.tls: {cert} and {key}: {reason}")
        raise ConfigError(reason.format(cert=config.cert, key=config.key, reason=error.reason or error)) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"server.tls: {config.cert} and {config.key}: {error}") from error
    return context


def _check_readable(key: str, path: Path) -> None:
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ConfigError(f"{key}: {path} is not a file" if path.exists() else f"{key}: {path} is not there")
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: {path}: {error.strerror}") from error


def _refuse_passphrase() -> str:
    """Else OpenSSL would ask for it at the terminal."""
    raise ValueError(_HAS_PASSPHRASE)
