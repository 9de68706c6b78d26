"""The configuration in force, and what came of the last attempt to change it.

Applies what may change while the server runs; says what takes a restart. Reading files is the command line's.
"""

from __future__ import annotations

import ssl
import time
from typing import Any

from dovetail.config import Config
from dovetail.gateway.admin.keys import ApiKeys
from dovetail.gateway.http.listen import check_exposure
from dovetail.gateway.http.origins import OriginRules
from dovetail.gateway.http.tls import Tls, read_certificate
from dovetail.gateway.mcp.servers import check_mcp

# Sockets and processes are made of these once.
_FIXED_SERVER: tuple[str, ...] = ("host", "port", "max_connections", "header_timeout", "allowed_origins")
_FIXED_SERVER += ("access_log", "audit_log", "traces", "state", "outlive")
_FIXED = (*(f"server.{key}" for key in _FIXED_SERVER), "nodes", "store", "batch.folder")


class Settings:
    def __init__(self, config: Config, file: str | None = None) -> None:
        self.config = config
        self.file = file  # None = everything was said on the command line
        self.loaded_at = time.time()
        self.problem: str | None = None  # why the last reading was refused
        self.needs_restart: tuple[str, ...] = ()  # keys that differ in the file and stay as they were
        self.keys = ApiKeys(config.auth.keys, time.monotonic)
        tls = config.server.tls
        self.tls = Tls(tls) if tls is not None else None
        self._renewed: ssl.SSLContext | None = None  # checked, not accepted yet

    @property
    def max_body_bytes(self) -> int:
        return self.config.server.max_body_bytes

    @property
    def drain_timeout_s(self) -> float:
        return self.config.server.drain_timeout

    @property
    def origin_rules(self) -> OriginRules:
        server = self.config.server
        return OriginRules(bool(self.config.auth.keys), server.allowed_hosts, server.allowed_origins)

    def check(self, config: Config) -> None:
        """Raises ConfigError for what this server must not become: open to everyone by a file without keys, or without
        a certificate."""
        check_exposure(self.config.server.host, config)
        check_mcp(config)
        tls = config.server.tls
        self._renewed = read_certificate(tls) if tls is not None and self.tls is not None else None

    def accept(self, config: Config) -> None:
        self.needs_restart = tuple(key for key in _FIXED if _value(config, key) != _value(self.config, key))
        if (config.server.tls is None) != (self.tls is None):  # the listener speaks either HTTP or HTTPS
            self.needs_restart += ("server.tls",)
            config = config.model_copy(
                update={"server": config.server.model_copy(update={"tls": self.config.server.tls})}
            )
        elif self.tls is not None and self._renewed is not None:
            self.tls.replace(self._renewed)
        server = config.server.model_copy(update={key: getattr(self.config.server, key) for key in _FIXED_SERVER})
        fixed = {"server": server, "nodes": self.config.nodes, "store": self.config.store}
        fixed["batch"] = config.batch.model_copy(update={"folder": self.config.batch.folder})
        self.config = config.model_copy(update=fixed)
        self.keys.replace(config.auth.keys)
        self.loaded_at = time.time()
        self.problem = None

    def refuse(self, problem: str) -> None:
        self.problem = problem


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
