"""Keeps web pages out that a browser on this machine, or in its network, was made to open.

A page cannot choose the Host and Origin that its browser sends. A server without keys answers only what is addressed
to it by a name of its own (a page that has its name resolved to this machine sends its own name) and what does not come
from another site's page, for looking and asking as much as for changing. Keys are not known to pages, so that a server
with keys checks only what it was told to.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail.errors import InvalidRequest, MisdirectedRequest, PermissionDenied, RequestError
from dovetail.gateway.http.problems import problem_response

_ANY = "*"


@dataclass(frozen=True)
class OriginRules:
    """What may change while the server runs."""

    has_keys: bool
    hosts: Sequence[str]  # names beside the loopback ones and addresses
    origins: Sequence[str]


class OriginGate:
    def __init__(self, app: ASGIApp, rules: Callable[[], OriginRules]) -> None:
        self._app = app
        self._rules = rules
        self._own_names = {"localhost", socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope), scope["method"])
            except RequestError as error:
                return await problem_response(error, scope)(scope, receive, send)
        await self._app(scope, receive, send)

    def _check(self, headers: Headers, method: str) -> None:
        rules = self._rules()
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            raise InvalidRequest("more than one Host header", code="invalid_host")
        if rules.hosts or not rules.has_keys:
            self._check_host(hosts[0] if hosts else "", rules.hosts)
        if rules.origins or not rules.has_keys:
            _check_origin(headers, hosts[0] if hosts else "", method, rules.origins)

    def _check_host(self, host: str, allowed: Sequence[str]) -> None:
        name = _host_name(host)
        if not host or _ANY in allowed or name in self._own_names or _is_address(name):
            return  # every browser sends one; an address cannot be resolved to another machine
        if name.endswith(".localhost") or name in (each.lower() for each in allowed):
            return
        raise MisdirectedRequest(
            f"this server is not known as {name[:100]!r}; server.allowed_hosts names what it answers to",
            code="unknown_host",
        )


def _check_origin(headers: Headers, host: str, method: str, allowed: Sequence[str]) -> None:
    origin = headers.get("origin")
    if _ANY in allowed or origin in allowed:
        return
    if origin is not None:
        if host and _authority(origin) == host.lower():
            return
        raise _foreign(origin)
    # What browsers send without an Origin, images and scripts, says where it is from; following a link is no call.
    site = headers.get("sec-fetch-site", "none")
    is_link = headers.get("sec-fetch-mode") == "navigate" and method in ("GET", "HEAD")
    if site not in ("none", "same-origin") and not is_link:
        raise _foreign(site)


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _foreign(origin: str) -> PermissionDenied:
    return PermissionDenied(
        f"pages of other origins ({origin[:100]}) may not call this server; see server.allowed_origins",
        code="foreign_origin",
    )


def _host_name(host: str) -> str:
    """Without the port, and an address without its brackets."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[").lower()
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
