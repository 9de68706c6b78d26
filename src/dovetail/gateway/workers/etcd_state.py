"""The state of several gateways, in etcd: one of them leads, and only what that one writes is taken (L8).

`PREFIX/leader` is bound to a lease, which its owner renews; `PREFIX/term` stays, says who led last, and changes with
every write. A write holds only while `leader` is still the one that its writer has made, and `term` as its writer knows
it: whoever was deposed and does not know it yet changes nothing, nor does a call that was given up and comes late.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dovetail.cluster.durable import private_folder
from dovetail.errors import ConfigError, Overloaded
from dovetail.gateway.workers import etcd
from dovetail.gateway.workers.etcd import EtcdAddress, EtcdClient, EtcdError, EtcdUnreachable

logger = logging.getLogger("dovetail.gateway")

FORMAT = "dovetail state 1"  # what `PREFIX/format` says
FLUSH_S = 5.0  # that somebody who changes something waits for it to be written
RETRY_S = 0.25
MIN_TIMEOUT_S = 1.0  # of a call
SAFE_SHARE = 0.9  # of a lease: how long its owner counts on it, by another clock than etcd's
_RENEWALS = 4  # in a lease
_ATTEMPTS = 3  # of a write that finds one of its own before it


class Deposed(EtcdError):
    """Somebody else has led since."""


class Leadership:
    """One candidate: blocking calls, no thread, no clock but `now`."""

    def __init__(self, client: EtcdClient, address: EtcdAddress, who: str) -> None:
        self._client = client
        self._who = who
        self._lease_s = address.lease_s
        self._root = address.prefix
        self._leader, self._term = f"{address.prefix}/leader", f"{address.prefix}/term"
        self._lease = 0
        self.revision = 0  # at which its `leader` was made; 0 = it has never led
        self._serial = 0  # at which `term` changed last, as far as it has heard
        self.until = 0.0  # nobody else leads before

    def check(self) -> None:
        """The prefix is ours: it is empty, or was a state of this format before."""
        key = f"{self._root}/format"
        found = self._client.transact([etcd.is_created_at(key, 0)], [], [etcd.read(key)])
        if not found.held:
            if found.found[0].value != FORMAT:
                raise ConfigError(f"state: {key} is {found.found[0].value!r} and not {FORMAT!r}; name another prefix")
            return
        strangers = self._client.range(f"{self._root}/", limit=1)
        if strangers and strangers[0].key != key:
            raise ConfigError(
                f"state: {self._root}/ is somebody else's, who has {strangers[0].key}: name another prefix"
            )
        self._client.transact([etcd.is_created_at(key, 0)], [etcd.put(key, FORMAT)])

    def campaign(self, now: float) -> str | None:
        """Who leads; None: this one does, from now on."""
        leads, outcome = self._take(now, [])
        if leads:
            return None
        leader = _found(outcome, self._leader)
        return leader.value if leader is not None else "nobody"

    def regain(self, now: float) -> None:
        """The lease was lost, or the key: no harm if nobody has led since."""
        for _ in range(_ATTEMPTS):
            leads, outcome = self._take(now, [etcd.is_changed_at(self._term, self._serial)])
            if leads:
                return
            term = _found(outcome, self._term)
            if _found(outcome, self._leader) is not None or term is None or term.value != self._who:
                raise Deposed("another gateway has led since")
            self._serial = term.changed  # by a write of its own that nobody heard the answer to
        raise EtcdUnreachable("etcd carries out old calls")

    def _take(self, now: float, compare: list[etcd.Part]) -> tuple[bool, etcd.TransactionOutcome]:
        """Whether it leads, and else what it found."""
        if not self._lease or not self._client.keep_alive(self._lease):
            self._lease = self._client.grant(self._lease_s)
        outcome = self._client.transact(
            [etcd.is_created_at(self._leader, 0), *compare],
            [etcd.put(self._leader, self._who, self._lease), etcd.put(self._term, self._who)],
            [etcd.read(self._leader), etcd.read(self._term)],
        )
        leader, term = _found(outcome, self._leader), _found(outcome, self._term)
        if outcome.held:
            self.revision = self._serial = outcome.revision
        elif leader is not None and leader.lease == self._lease:  # made by a call that nobody heard the answer to
            assert term is not None, "they are made together"
            self.revision, self._serial = leader.created, term.changed
        else:
            return False, outcome
        self._extend(now)
        return True, outcome

    def renew(self, now: float) -> None:
        """`now` was before the call: etcd counts from later on."""
        # A server that has lost the others may renew a lease alone for a moment; a transaction that reads needs them.
        read = [etcd.read(self._leader)]
        if self._client.keep_alive(self._lease) and self._client.transact([self._fence], read).held:
            self._extend(now)
        else:
            self.regain(now)

    def _extend(self, now: float) -> None:
        self.until = now + SAFE_SHARE * self._lease_s

    @property
    def _fence(self) -> etcd.Part:
        return etcd.is_created_at(self._leader, self.revision)

    def facts(self) -> dict[str, str]:
        """By key, the oldest change first."""
        root = f"{self._root}/facts/"
        return {one.key.removeprefix(root): one.value for one in self._client.range(root)}

    def write(self, key: str, value: str | None) -> None:
        """None = it goes. `Deposed`: another one leads, and nothing was written. A write that was given up for want of
        an answer, and is carried out late, changes nothing either: `term` is another by then."""
        key = f"{self._root}/facts/{key}"
        change = etcd.drop(key) if value is None else etcd.put(key, value)
        for _ in range(_ATTEMPTS):
            outcome = self._client.transact(
                [self._fence, etcd.is_changed_at(self._term, self._serial)],
                [change, etcd.put(self._term, self._who)],
                [etcd.read(self._leader), etcd.read(self._term)],
            )
            if outcome.held:
                self._serial = outcome.revision
                return
            leader, term = _found(outcome, self._leader), _found(outcome, self._term)
            if leader is None or term is None or leader.created != self.revision:
                raise Deposed("what it writes is refused")
            self._serial = term.changed
        raise EtcdUnreachable("etcd carries out old calls")

    def resign(self) -> None:
        if self._lease:
            self._client.revoke(self._lease)
            self._lease = 0


def _found(outcome: etcd.TransactionOutcome, key: str) -> etcd.KeyValue | None:
    return next((one for one in outcome.found if one.key == key), None)


class EtcdDurable:
    """A `cluster.durable.Durable`. What is put is known here at once and written by a thread, in order, the last value
    of each fact; while etcd does not answer it is tried again. Before `start` it is a candidate."""

    def __init__(self, address: EtcdAddress, folder: Path, who: str) -> None:
        self.folder = private_folder(folder)
        self.machine = f"@{machine_id()}"
        self.address = address
        self._client = EtcdClient(address, timeout_s=max(address.lease_s / (_RENEWALS + 1), MIN_TIMEOUT_S))
        self.leadership = Leadership(self._client, address, who)
        self._renew_s = address.lease_s / _RENEWALS
        self._renew_at = 0.0
        self._facts: dict[str, str] = {}  # by KIND/NAME
        self._unwritten: dict[str, str | None] = {}
        self._changed = threading.Condition()
        self._problem: str | None = None  # of the last call
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._on_deposed: Callable[[str], None] = lambda why: None

    # Candidates

    def check(self) -> None:
        """At start: what is wrong now, and still is in a moment, is somebody's mistake."""
        try:
            for _ in range(_ATTEMPTS - 1):  # it may be starting, too
                with suppress(EtcdUnreachable):
                    return self.leadership.check()
                time.sleep(RETRY_S)
            self.leadership.check()
        except EtcdUnreachable as error:
            raise ConfigError(f"state: {error}; start it, or correct {self.address}") from error
        except EtcdError as error:
            raise ConfigError(f"state: {error}") from error

    def campaign(self) -> str | None:
        """Who leads, or why nobody is known to; None: this one does."""
        try:
            return self.leadership.campaign(_now())
        except EtcdError as error:
            return str(error)

    def start(self, on_deposed: Callable[[str], None]) -> None:
        """It leads: what others have written is read, and the thread started, which may call `on_deposed`."""
        try:
            self._facts = self.leadership.facts()
        except EtcdError as error:
            raise ConfigError(f"state: {error}") from error
        self._on_deposed = on_deposed
        self._thread = threading.Thread(target=self._run, name="state", daemon=True)
        self._thread.start()

    @property
    def is_leading(self) -> bool:
        return self._thread is not None

    # Facts

    def put(self, kind: str, name: str, value: Any) -> None:
        self._set(f"{kind}/{name}", json.dumps(value))

    def drop(self, kind: str, name: str) -> None:
        self._set(f"{kind}/{name}", None)

    def _set(self, key: str, value: str | None) -> None:
        with self._changed:
            before = self._facts.pop(key, None)
            if value is None and before is None:
                return
            if value is not None:
                self._facts[key] = value
            self._unwritten.pop(key, None)  # in the order of the last change
            self._unwritten[key] = value
            self._changed.notify_all()

    def get(self, kind: str, name: str) -> Any | None:
        value = self._facts.get(f"{kind}/{name}")
        return None if value is None else json.loads(value)

    def all(self, kind: str) -> dict[str, Any]:
        root = f"{kind}/"
        return {key.removeprefix(root): json.loads(value) for key, value in self._facts.items() if key.startswith(root)}

    def flush(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._unwritten, FLUSH_S):
                why = self._problem or "etcd is slow"
                raise Overloaded(
                    f"done, but not written yet, which is tried again: {why}", code="state", retry_after_s=5
                )

    def trouble(self) -> str | None:
        if _now() < self.leadership.until:
            return None
        return "this gateway does not know whether it still leads"

    # The thread

    def _run(self) -> None:
        while not self._is_closing or self._unwritten:
            try:
                self._step()
            except Deposed as error:
                self._on_deposed(str(error))
                return
            except EtcdError as error:
                if self._is_closing:
                    return
                self._report(str(error))
                time.sleep(RETRY_S)
            else:
                self._report(None)

    def _step(self) -> None:
        """One call, or a wait for something to do."""
        now = _now()
        if now >= self._renew_at:
            self.leadership.renew(now)
            self._renew_at = now + self._renew_s
            return
        with self._changed:
            if not self._unwritten:
                self._changed.wait(self._renew_at - now)
            item = next(iter(self._unwritten.items()), None)
        if item is not None:
            self._write(*item)

    def _write(self, key: str, value: str | None) -> None:
        try:
            self.leadership.write(key, value)
        except Deposed:
            self.leadership.regain(_now())
            self.leadership.write(key, value)
        with self._changed:
            if self._unwritten.get(key, "") is value:  # else it has changed meanwhile
                del self._unwritten[key]
            self._changed.notify_all()

    def _report(self, problem: str | None) -> None:
        if (problem is None) != (self._problem is None):
            if problem is None:
                logger.warning("state: etcd answers again, and this gateway leads as before")
            else:
                logger.error("state: %s; what is under way goes on, and it is tried again", problem)
        self._problem = problem

    def close(self) -> None:
        """What is left is written if that goes at once, and the next one may lead."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(FLUSH_S)
        if self._thread is None or not self._thread.is_alive():
            try:
                self.leadership.resign()
            except EtcdError as error:
                logger.warning("state: %s; the next gateway leads when the lease has ended", error)
            self._client.close()


def _now() -> float:
    """Goes on while the machine sleeps, as etcd's does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def machine_id() -> str:
    """Where processes have the numbers that were written down. Containers of one image have one `machine-id`."""
    file = Path("/etc/machine-id")
    text = f"{file.read_text() if file.exists() else ''} {platform.node()}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
