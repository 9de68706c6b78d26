"""As much of etcd v3 as a state needs, over its JSON gateway: keys, transactions, leases, a password, TLS.

Knows nothing of who leads. Passwords are in no message and no log.

Written here because the clients for Python that are maintained bring gRPC and protobuf, and the one most used (etcd3)
has had no release since 2018; the JSON gateway is part of every etcd, and httpx is here anyway.
"""

from __future__ import annotations

import json
import ssl
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

import httpx

from dovetail.config import parse_duration
from dovetail.errors import ConfigError, DovetailError

SCHEMES = {"etcd://": "http", "etcds://": "https"}
FORM = "etcd://[USER:PASSWORD@]HOST:PORT[,HOST2:PORT]/PREFIX"
LEASE_S = 10  # after the last word of who leads, another one may
_FILES = ("ca", "cert", "key")  # of etcds://
_UNAUTHENTICATED, _UNAVAILABLE = 16, (4, 8, 13, 14)  # codes of gRPC; timed out, overloaded, internal, no quorum


class EtcdError(DovetailError):
    """etcd has refused, and says why."""


class EtcdUnreachable(EtcdError):
    """No answer, or no quorum: it may be better in a moment."""


@dataclass(frozen=True)
class EtcdAddress:
    """`--state etcd://…`, read."""

    endpoints: tuple[str, ...]  # URLs, tried one after the other
    prefix: str  # of every key, with no slash at either end
    lease_s: int = LEASE_S
    user: str = ""
    password: str = field(default="", repr=False)
    files: tuple[tuple[str, str], ...] = ()  # `ca`, and `cert` with `key` for servers that ask for one

    @property
    def hosts(self) -> str:
        return ",".join(endpoint.partition("://")[2] for endpoint in self.endpoints)

    def __str__(self) -> str:
        """Without what is secret."""
        return f"{'etcds' if self.endpoints[0].startswith('https') else 'etcd'}://{self.hosts}/{self.prefix}"


def is_etcd(state: str) -> bool:
    return state.startswith(tuple(SCHEMES))


def parse_address(state: str) -> EtcdAddress:
    """Errors do not repeat what was given: it may hold a password."""
    scheme = next(one for one in SCHEMES if state.startswith(one))
    rest, _, query = state.removeprefix(scheme).partition("?")
    authority, _, prefix = rest.partition("/")
    login, _, hosts = authority.rpartition("@")
    user, _, password = login.partition(":")
    prefix = prefix.strip("/")
    names = [name.strip() for name in hosts.split(",")]
    if not prefix or not all(_is_host(name) for name in names):
        raise ConfigError(f"state: expected {FORM}; every gateway of one cluster has the same prefix, others another")
    lease_s, files = _options(query)
    if files and scheme != "etcds://":
        raise ConfigError(f"state: {files[0][0]}= is for etcds://")
    endpoints = tuple(f"{SCHEMES[scheme]}://{name}" for name in names)
    return EtcdAddress(endpoints, prefix, lease_s, unquote(user), unquote(password), files)


def _is_host(name: str) -> bool:
    host, _, port = name.rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 65536


def _options(query: str) -> tuple[int, tuple[tuple[str, str], ...]]:
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(given.keys() - {"lease", *_FILES})
    if unknown:
        raise ConfigError(f"state: unknown option {unknown[0]!r}; there are lease, {', '.join(_FILES)}")
    try:
        lease_s = parse_duration(given.get("lease", LEASE_S))
    except ValueError as error:
        raise ConfigError(f"state: lease: {error}") from error
    if lease_s < 2 or lease_s % 1:
        raise ConfigError("state: lease: whole seconds, two at least")
    if ("cert" in given) != ("key" in given):
        raise ConfigError("state: cert= and key= go together")
    return int(lease_s), tuple((name, given[name]) for name in _FILES if name in given)


Part = dict[str, Any]  # of a transaction: what is compared, read or written


class KeyValue(NamedTuple):
    key: str
    value: str
    created: int  # revision of the store
    changed: int
    lease: int


class TransactionOutcome(NamedTuple):
    """Of a transaction."""

    held: bool  # what it compared was so, and it was carried out
    revision: int  # of the store afterwards
    found: tuple[KeyValue, ...]  # by its reads


class EtcdClient:
    """Blocking; for one thread at a time."""

    def __init__(self, address: EtcdAddress, timeout_s: float) -> None:
        self._address = address
        self._endpoints = list(address.endpoints)  # the one that answered last comes first
        self._token = ""
        self._http = httpx.Client(verify=_tls(address), timeout=timeout_s, trust_env=False)

    def close(self) -> None:
        self._http.close()

    # Keys

    def range(self, prefix: str, limit: int = 0) -> tuple[KeyValue, ...]:
        """All that begin so, the oldest change first."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        body = {"key": _coded(prefix), "range_end": _coded(end), "limit": limit}
        reply = self.call("kv/range", body | {"sort_target": "MOD", "sort_order": "ASCEND"})
        return tuple(_entry(item) for item in reply.get("kvs", ()))

    def transact(
        self, compare: Sequence[Part], then: Sequence[Part], otherwise: Sequence[Part] = ()
    ) -> TransactionOutcome:
        reply = self.call("kv/txn", {"compare": [*compare], "success": [*then], "failure": [*otherwise]})
        reads = [one["response_range"] for one in reply.get("responses", ()) if "response_range" in one]
        found = tuple(_entry(item) for read in reads for item in read.get("kvs", ()))
        return TransactionOutcome(bool(reply.get("succeeded")), int(reply["header"]["revision"]), found)

    # Leases

    def grant(self, seconds: int) -> int:
        return int(self.call("lease/grant", {"TTL": seconds})["ID"])

    def keep_alive(self, lease: int) -> bool:
        """For another term; False: it has ended."""
        reply = self.call("lease/keepalive", {"ID": lease})
        return int(reply.get("result", {}).get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        """With all keys that are bound to it; one that has ended is well."""
        try:
            self.call("lease/revoke", {"ID": lease})
        except EtcdError as error:
            if "lease not found" not in str(error):
                raise

    # Calls

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """By whichever endpoint answers. What was asked of one that did not may have been carried out nevertheless."""
        reasons = []
        for endpoint in list(self._endpoints):
            try:
                reply = self._ask(endpoint, path, body)
            except (httpx.TransportError, EtcdUnreachable) as error:
                reasons.append(f"{endpoint.partition('://')[2]}: {_reason(error)}")
                continue
            self._endpoints.remove(endpoint)
            self._endpoints.insert(0, endpoint)
            return reply
        raise EtcdUnreachable(f"etcd does not answer ({'; '.join(reasons)})")

    def _ask(self, endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._post(endpoint, path, body)
        except _Unauthenticated as error:
            if not self._address.user:
                raise EtcdError(f"etcd at {self._address.hosts} asks for a user: {FORM}") from error
        login = {"name": self._address.user, "password": self._address.password}
        try:
            self._token = str(self._post(endpoint, "auth/authenticate", login)["token"])
            return self._post(endpoint, path, body)
        except _Unauthenticated as error:
            raise EtcdError(f"etcd at {self._address.hosts} does not know this user and password") from error

    def _post(self, endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"authorization": self._token} if self._token else {}
        response = self._http.post(f"{endpoint}/v3/{path}", content=json.dumps(body), headers=headers)
        try:
            reply = json.loads(response.text.partition("\n")[0])  # a stream has a line for each of its answers
        except ValueError as error:
            raise EtcdUnreachable(f"HTTP {response.status_code}, and not in etcd's words") from error
        if response.status_code == 200 and isinstance(reply, dict) and "error" not in reply:
            return reply
        raise _error(self._address, response.status_code, reply)


class _Unauthenticated(EtcdError):
    pass


def _error(address: EtcdAddress, status: int, reply: Any) -> EtcdError:
    fault = reply if isinstance(reply, dict) else {}
    fault = fault["error"] if isinstance(fault.get("error"), dict) else fault
    text = str(fault.get("message") or fault.get("error") or f"HTTP {status}")
    code = fault.get("code", fault.get("grpc_code"))
    if code == _UNAUTHENTICATED or "user name is empty" in text or "auth" in text.split(":")[-1]:
        return _Unauthenticated(text)
    if code in _UNAVAILABLE or (code is None and status >= 500):
        return EtcdUnreachable(text)
    if "permission denied" in text:
        return EtcdError(f"etcd at {address.hosts}: the user may not read and write {address.prefix}/")
    return EtcdError(f"etcd at {address.hosts} (v3 is needed): {text}")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__  # a timeout has no words


def _tls(address: EtcdAddress) -> ssl.SSLContext:
    files = dict(address.files)
    if not address.endpoints[0].startswith("https"):
        return ssl.SSLContext(
            ssl.PROTOCOL_TLS_CLIENT
        )  # trusts nobody, and is not asked; reading whom to trust takes long
    try:
        context = ssl.create_default_context(cafile=files.get("ca"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files["key"])
    except (OSError, ssl.SSLError) as error:
        names = ", ".join(f"{name}={file}" for name, file in address.files)
        raise ConfigError(f"state: {names}: {error.strerror or error}") from error
    return context


# The JSON of its gateway: keys and values in base64, numbers as text


def _coded(text: str) -> str:
    return b64encode(text.encode()).decode()


def _entry(item: dict[str, Any]) -> KeyValue:
    key, value = (b64decode(item.get(name, "")).decode() for name in ("key", "value"))
    created, changed, lease = (int(item.get(name, 0)) for name in ("create_revision", "mod_revision", "lease"))
    return KeyValue(key, value, created, changed, lease)


def is_created_at(key: str, revision: int) -> Part:
    """0 = there is none."""
    return {"key": _coded(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def is_changed_at(key: str, revision: int) -> Part:
    return {"key": _coded(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def put(key: str, value: str, lease: int = 0) -> Part:
    return {"request_put": {"key": _coded(key), "value": _coded(value), "lease": str(lease)}}


def drop(key: str) -> Part:
    return {"request_delete_range": {"key": _coded(key)}}


def read(key: str) -> Part:
    return {"request_range": {"key": _coded(key)}}
