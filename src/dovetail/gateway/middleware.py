"""Around every request, as plain ASGI: its id, who may call, how often, and how much they may send."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.config import KeyConfig
from dovetail.errors import PayloadTooLarge, PermissionDenied, QuotaExceeded, RequestError, Unauthenticated
from dovetail.gateway.respond import problem_response

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)
_OPEN_PATHS = {"/health", "/live", "/version", "/metrics", "/openapi.json"}  # probes and scrapers carry no key
_METERED_PATHS = {"/v1/chat/completions", "/v1/completions"}
_ADMIN_PREFIX = "/api/"
_CONFIG_PATH = "/api/config"  # sources may hold what is not for everyone
_WINDOW_S = 60.0


class RequestIds:
    """Echoes X-Request-Id where it is a plain word, gives one where not, and reports the status of each answer."""

    def __init__(self, app: ASGIApp, report: Callable[[Scope, int], None]) -> None:
        self._app = app
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        scope["state"]["arrived_s"] = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                self._report(scope, message["status"])
            await send(message)

        await self._app(scope, receive, send_with_id)


class Quota:
    """At most `limit` requests in any minute."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken: deque[float] = deque()  # times of the last minute, at most `limit`

    def take(self, now: float) -> float | None:
        """None when the request may go, else the seconds until one may."""
        while self._taken and self._taken[0] <= now - _WINDOW_S:
            self._taken.popleft()
        if len(self._taken) >= self._limit:
            return self._taken[0] + _WINDOW_S - now
        self._taken.append(now)
        return None


class Keys:
    """The keys in force. None means that the server is open, and that only this machine may change it."""

    def __init__(self, keys: Sequence[KeyConfig], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._keys: list[tuple[bytes, KeyConfig]] = []
        self._quotas: dict[str, Quota] = {}
        self.replace(keys)

    def replace(self, keys: Sequence[KeyConfig]) -> None:
        """A quota that did not change keeps what was taken from it."""
        before = {key.name: (key.requests_per_minute, self._quotas.get(key.name)) for _, key in self._keys}
        self._keys = [(_digest(key.key.get_secret_value().encode()), key) for key in keys]
        self._quotas = {}
        for key in keys:
            if key.requests_per_minute is not None:
                limit, quota = before.get(key.name, (None, None))
                kept = quota if limit == key.requests_per_minute else None
                self._quotas[key.name] = kept or Quota(key.requests_per_minute)

    def check(self, scope: Scope) -> None:
        path = scope["path"]
        if path in _OPEN_PATHS:
            return
        is_looking = scope["method"] in ("GET", "HEAD") and path != _CONFIG_PATH
        is_admin = path.startswith(_ADMIN_PREFIX) and not is_looking
        if not self._keys:
            if is_admin:
                _check_is_local(scope)
            return
        key = self._find(Headers(scope=scope).get("authorization", ""))
        if is_admin and not key.admin:
            raise PermissionDenied(
                f"the key '{key.name}' may not change the server; a key with admin: true may", code="admin_required"
            )
        if len(self._keys) > 1:  # one key alone shares with nobody
            scope.setdefault("state", {})["key"] = key.name
        self._check_quota(key, scope)

    def _check_quota(self, key: KeyConfig, scope: Scope) -> None:
        quota = self._quotas.get(key.name)
        if quota is None or scope["path"] not in _METERED_PATHS or scope["method"] != "POST":
            return
        wait_s = quota.take(self._clock())
        if wait_s is not None:
            raise QuotaExceeded(
                f"the key '{key.name}' may send {key.requests_per_minute} requests a minute",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )

    def _find(self, authorization: str) -> KeyConfig:
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise Unauthenticated("no API key: send 'Authorization: Bearer <key>'", code="missing_api_key")
        digest = _digest(given.strip().encode(errors="surrogateescape"))
        found = None
        for known, key in self._keys:  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise Unauthenticated("the API key is not known here", code="invalid_api_key")
        return found


class Auth:
    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._keys.check(scope)
            except RequestError as error:
                return await problem_response(error)(scope, receive, send)
        await self._app(scope, receive, send)


def _check_is_local(scope: Scope) -> None:
    """Without keys, the one who may change the server sits at this machine: not behind a proxy that happens to run
    here, and not a page of another site in a browser that does."""
    headers = Headers(scope=scope)
    client = (scope.get("client") or ("",))[0]
    is_forwarded = "x-forwarded-for" in headers or "forwarded" in headers
    is_foreign_page = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if is_forwarded or is_foreign_page or not _is_loopback(client):
        raise PermissionDenied(
            "a server without keys is changed from its own machine only; configure a key with admin: true",
            code="admin_required",
        )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimit:
    """Refuses a body over the limit: at once when its length is announced, else as soon as it goes over."""

    def __init__(self, app: ASGIApp, limit: Callable[[], int]) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isascii() and announced.isdigit() and int(announced[:20]) > self._limit():
            return await problem_response(self._error())(scope, receive, send)
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit():
                raise self._error()
            return message

        await self._app(scope, receive_limited, send)

    def _error(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._limit()} bytes", code="payload_too_large")
