"""Who calls: the API keys in force, the token of whoever sits at this machine, and guesses that are slowed down."""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from dovetail.config import KeyConfig
from dovetail.errors import PermissionDenied, QuotaExceeded, Unauthenticated
from dovetail.gateway.http.accounts import KeyAccount, Window
from dovetail.gateway.http.listen import is_loopback

PROBES = frozenset({"/health", "/live", "/version"})  # say nothing of models or configuration
# A browser carries no key before its visitor has given one; the page itself says nothing.
_OPEN_PATHS = PROBES | {"/openapi.json", "/", "/ui", "/docs"}
_PAGE_PREFIX = "/ui/"
_METRICS_PATH = "/metrics"
_ADMIN_PREFIX = "/api/"
_ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # where others expect them
# Ollama's, whose clients ask models there as others do under /v1.
OLLAMA_PATHS = frozenset(
    {"/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/tags", "/api/version"}
)
# Ollama's too, which only say what to do instead.
OLLAMA_ABSENT = frozenset({"/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"})
_OLLAMA_BLOBS = "/api/blobs/"
_LOCAL_SECRETS = frozenset({"/api/config", "/api/logs"})  # sources and paths may hold what is not for everyone
_FAILURES_PER_MINUTE = 20  # of one address; then only keys that it has used before are looked at
_REMEMBERED = 4096  # addresses with failures, and pairs of address and good key


def is_of_ollama(path: str) -> bool:
    return path in OLLAMA_PATHS or path in OLLAMA_ABSENT or path.startswith(_OLLAMA_BLOBS)


def is_of_admin(path: str) -> bool:
    return not is_of_ollama(path) and (path.startswith(_ADMIN_PREFIX) or path in _ADMIN_PATHS)


@dataclass(frozen=True)
class Caller:
    """Who sent a request."""

    account: KeyAccount | None = None  # None = nobody has keys here
    is_admin: bool = False
    has_metrics: bool = False


class ApiKeys:
    """The keys in force. None means that everyone who reaches the server may ask its models, and that whoever can read
    the token file of this machine may change it."""

    def __init__(self, keys: Sequence[KeyConfig], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._keys: list[tuple[bytes, KeyConfig]] = []
        self._accounts: dict[str, KeyAccount] = {}
        self._guesses = Guesses()
        self._local: bytes | None = None
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def knows(self, name: str) -> bool:
        """Whether there is a key of this name; an empty one is everybody's, where there are no keys."""
        return name in self._accounts if name else not self._keys

    def set_local_token(self, token: str) -> None:
        self._local = _digest(token.encode())

    def replace(self, keys: Sequence[KeyConfig]) -> None:
        """A key whose limits did not change keeps what was taken from them."""
        before = {key.name: key for _, key in self._keys}
        self._keys = [(_digest(key.key.get_secret_value().strip().encode()), key) for key in keys]
        kept = {key.name: self._accounts[key.name] for key in keys if _same_limits(key, before.get(key.name))}
        self._accounts = {key.name: kept.get(key.name) or KeyAccount(key) for key in keys}

    def check(self, scope: Scope) -> Caller:
        """Who calls, if they may do what they ask for. Takes a call that asks the models from their quota."""
        path, method = scope["path"], scope["method"]
        is_admin_path = is_of_admin(path)
        is_open = path in _OPEN_PATHS or path.startswith(_PAGE_PREFIX)
        caller = self._identify(scope, must=not is_open)
        if is_admin_path and not caller.is_admin:
            self._check_admin(path, method, caller)
        if path == _METRICS_PATH and not caller.has_metrics:
            raise PermissionDenied("/metrics takes a key with metrics: true or admin: true", code="metrics_required")
        if caller.account is not None and method == "POST" and not is_admin_path:
            caller.account.begin(self._clock())
        return caller

    def _identify(self, scope: Scope, *, must: bool) -> Caller:
        headers = Headers(scope=scope)
        given = _bearer(headers.get("authorization", "")) or _api_key(headers.get("x-api-key", ""))
        address = (scope.get("client") or ("",))[0]
        if not self._keys:
            knows_token = given is not None and self._local is not None and hmac.compare_digest(self._local, given)
            return Caller(is_admin=knows_token and is_loopback(address), has_metrics=True)
        if given is None:
            if not must:
                return Caller()
            raise Unauthenticated(
                "no API key: send 'Authorization: Bearer <key>' or 'x-api-key: <key>'", code="missing_api_key"
            )
        key = self._find(given, address)
        return Caller(self._accounts[key.name], key.admin, key.metrics or key.admin)

    def _check_admin(self, path: str, method: str, caller: Caller) -> None:
        if caller.account is not None:
            what = path if path in _ADMIN_PATHS else _ADMIN_PREFIX
            raise PermissionDenied(
                f"the key '{caller.account.name}' may not use {what}; a key with admin: true may",
                code="admin_required",
            )
        if method not in ("GET", "HEAD") or path in _LOCAL_SECRETS:
            raise PermissionDenied(
                "a server without keys is changed with the token in its file run/PORT.token (`dovetail` reads it by "
                "itself); or configure a key with admin: true",
                code="admin_required",
            )

    def _find(self, given: bytes, address: str) -> KeyConfig:
        now = self._clock()
        self._guesses.check(address, given, now)
        found = None
        for known, key in self._keys:  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(known, given):
                found = key
        self._guesses.note(address, given, is_good=found is not None, now=now)
        if found is None:
            raise Unauthenticated("the API key is not known here", code="invalid_api_key")
        return found


class Guesses:
    """Unknown keys by address. After too many in a minute an address is answered without its keys being looked at,
    except those that it has used before: who shares it with a guesser goes on working."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, Window] = OrderedDict()
        self._good: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def check(self, address: str, key: bytes, now: float) -> None:
        window = self._failures.get(address)
        wait_s = window.wait_s(1, now) if window is not None else 0.0
        if wait_s and (address, key) not in self._good:
            raise QuotaExceeded(
                "too many unknown keys from this address", code="too_many_guesses", retry_after_s=wait_s
            )

    def note(self, address: str, key: bytes, *, is_good: bool, now: float) -> None:
        if is_good:
            self._good[address, key] = None
            self._good.move_to_end((address, key))
        else:
            self._failures.setdefault(address, Window(_FAILURES_PER_MINUTE)).add(1, now)
            self._failures.move_to_end(address)
        for remembered in (self._failures, self._good):
            while len(remembered) > _REMEMBERED:
                remembered.popitem(last=False)


def _bearer(authorization: str) -> bytes | None:
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "bearer" or not given.strip():
        return None
    return _api_key(given)


def _api_key(given: str) -> bytes | None:
    """As Anthropic's clients send it."""
    return _digest(given.strip().encode(errors="surrogateescape")) if given.strip() else None


def _same_limits(key: KeyConfig, before: KeyConfig | None) -> bool:
    fields = ("requests_per_minute", "tokens_per_minute", "max_unfinished")
    return before is not None and all(getattr(key, field) == getattr(before, field) for field in fields)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
