"""`--tls-cert` and `--tls-key`: HTTPS without a proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.config import Config, TlsConfig
from dovetail.errors import ConfigError

TlsCert = Annotated[
    Path | None,
    typer.Option(help="Serve HTTPS with this PEM file; SIGHUP reads it again.", show_default=False),
]
TlsKey = Annotated[Path | None, typer.Option(help="The key of --tls-cert (PEM).", show_default=False)]


def tls_config(cert: Path | None, key: Path | None) -> TlsConfig | None:
    """None where neither was given."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        given, missing = ("--tls-key", "--tls-cert") if cert is None else ("--tls-cert", "--tls-key")
        raise ConfigError(f"{given} without {missing}: HTTPS takes a certificate and its key")
    return TlsConfig(cert=cert, key=key)


def check_certificate(config: Config) -> None:
    """Before anything is started. Raises ConfigError."""
    from dovetail.gateway.http.tls import read_certificate

    if config.server.tls is not None:
        read_certificate(config.server.tls)
