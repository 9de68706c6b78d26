"""Live migration (L4, L5): requests that go on while another node recomputes what they have said, and then go on there.

    choosing ──Accepted──▶ computing ──CaughtUp, little is left──▶ releasing ──TookBack──▶ handed over
                             ▲    │
                             └────┘ CaughtUp, much is left: one more round of tokens

A destination that has caught up waits for a moment, so that the source falls silent when the other can go on. Only
tokens travel. Until the source has let go it owns the request: whatever happens to the copy at the destination, the
request goes on. From then on the destination owns it. A migration that comes to nothing takes its copy back, which
its number tells apart from later ones. Nothing here knows whether time is real.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

import msgspec

from dovetail.cluster.asking import Ask, Asking
from dovetail.cluster.decisions import Migrated, Moving
from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.request import TokenCounts
from dovetail.cluster.seeker import Seeker
from dovetail.node import protocol
from dovetail.policy.headroom import INFINITY
from dovetail.policy.work import Phase, RequestRecord

MAX_ASKED = 8  # nodes and instances that are asked to hold one request
SMALL_GAP = 4  # tokens: the destination computes so few within its next iteration
LARGE_GAP = 16  # tokens: a round that leaves so few and does not shrink the gap is the last
MAX_ROUNDS = 12
# A destination that has not caught up by then is given up: so long for a round, and so many times what it said that
# the model takes to load.
ROUND_S = 30.0
LOADS = 4.0


class Step(StrEnum):
    CHOOSING = "choosing"  # somebody is asked to hold it
    COMPUTING = "computing"  # the destination loads the model, or computes the tokens of a round
    RELEASING = "releasing"  # the source was asked to let go


@dataclass(eq=False, slots=True)
class Migration:
    number: int
    id: int  # of the request
    source: NodeHandle
    reason: str
    wanted: NodeHandle | None = None  # is asked first
    step: Step = Step.CHOOSING
    destination: NodeHandle | None = None  # holds a copy, or is about to
    instance: int = -1
    known: int = 0  # tokens that the destination was told of
    gap: int = 0  # tokens that it was behind after the last round
    rounds: int = 0
    until_s: float = INFINITY  # the destination has caught up by then, or is given up
    is_over: bool = False  # whoever waits for an answer takes back what comes of it
    is_gated: bool = False  # the source keeps it until `open`: others have to be accepted elsewhere first
    has_caught_up: bool = False  # and waits for that
    is_best_effort: bool = False


class Migrations:
    def __init__(self, seeker: Seeker, tokens: TokenCounts) -> None:
        self._seeker = seeker
        self._tokens = tokens
        self._by_request: dict[int, Migration] = {}
        self._numbers = count(1)
        self.completed = 0
        self.abandoned = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request: int) -> bool:
        return request in self._by_request

    def of_source(self, node: NodeHandle) -> list[Migration]:
        return [one for one in self._by_request.values() if one.source is node]

    def of_destination(self, node: NodeHandle) -> list[Migration]:
        return [one for one in self._by_request.values() if one.destination is node]

    # Beginning

    def begin(self, request: int, reason: str, wanted: NodeHandle | None = None, *, is_gated: bool = False) -> bool:
        """Somebody else shall go on with a request that has a place; a gated one not before `open`. False: it moves
        already, or has ended."""
        work = self._seeker.works[request]
        if request in self._by_request or work.place is None or self._tokens.num_tokens(work) is None:
            return False
        source = work.place.node
        number, is_best_effort = next(self._numbers), work.is_best_effort
        migration = Migration(number, request, source, reason, wanted, is_gated=is_gated, is_best_effort=is_best_effort)
        self._by_request[request] = migration
        self._seeker.decisions.begin(self._choose(migration))
        return True

    def is_accepted(self, request: int) -> bool:
        """A destination has a place for it."""
        migration = self._by_request.get(request)
        return migration is not None and migration.step is not Step.CHOOSING

    def is_gated(self, request: int) -> bool:
        migration = self._by_request.get(request)
        return migration is not None and migration.is_gated

    def open(self, request: int) -> None:
        """Its source may let go."""
        migration = self._by_request.get(request)
        if migration is None:
            return
        migration.is_gated = False
        if migration.has_caught_up:
            self._after_round(migration, migration.known)

    def _choose(self, migration: Migration) -> Asking[None]:
        """Ask one after another to hold a copy."""
        known = self._seeker.works[migration.id].record()
        for node, instance in self._seeker.placer.places_for(known, migration.source, migration.wanted)[:MAX_ASKED]:
            record = self._record(migration)
            if record is None:
                break
            migration.destination, migration.known = node, record.produced
            answer = yield Ask(node, protocol.Propose(record, instance, migration.number))
            if migration.is_over:
                if isinstance(answer, protocol.Accepted):
                    node.order(protocol.Withdraw(migration.id, migration.number), self._seeker.decisions.now_s)
                return
            if isinstance(answer, protocol.Accepted):
                migration.instance, migration.step = answer.instance, Step.COMPUTING
                offer = node.offer_of(record.model)
                self._begin_round(migration, LOADS * offer.load_s if offer is not None else 0.0)
                self._seeker.placer.joined(node, answer.instance, record)
                return
        migration.destination = None
        self._end(migration)

    def _record(self, migration: Migration) -> RequestRecord | None:
        """As far as it has come, None if it has ended; the source has the exact one, and gives it away in the end."""
        work = self._seeker.works[migration.id]
        produced = self._tokens.num_tokens(work)
        if produced is None:
            return None
        record = work.record()
        return msgspec.structs.replace(record, produced=produced, has_kv=False, phase=Phase.ANY)

    # Rounds

    def _begin_round(self, migration: Migration, load_s: float = 0.0) -> None:
        migration.until_s = self._seeker.decisions.now_s + ROUND_S + load_s

    def next_expiry_s(self) -> float | None:
        """When `expire` has something to do."""
        computing = [one.until_s for one in self._by_request.values() if one.step is Step.COMPUTING]
        return min((until_s for until_s in computing if until_s < INFINITY), default=None)

    def expire(self, now: float) -> None:
        """Copies that are not there in time are taken back, of which the source has noticed nothing."""
        for migration in list(self._by_request.values()):
            if migration.step is Step.COMPUTING and not migration.is_over and migration.until_s <= now:
                assert migration.destination is not None
                migration.destination.fell_silent(now)
                self._end(migration)

    def caught_up(self, node: NodeHandle, notice: protocol.CaughtUp) -> None:
        migration = self._by_request.get(notice.request)
        if migration is None or migration.number != notice.hold or migration.step is not Step.COMPUTING:
            return  # of one that is over
        if migration.destination is not node:
            return  # it was silent for so long that somebody else was asked; it hears of that next
        migration.has_caught_up, migration.until_s = True, INFINITY
        if not migration.is_gated:
            self._after_round(migration, notice.produced)

    def _after_round(self, migration: Migration, produced: int) -> None:
        """So many tokens are computed at the destination: one more round, or the source lets go."""
        migration.has_caught_up = False
        record = self._record(migration)
        if record is None:
            self._end(migration)
            return
        gap = record.produced - produced
        is_shrinking = not migration.rounds or gap < migration.gap or gap > LARGE_GAP
        migration.rounds, migration.gap = migration.rounds + 1, gap
        if gap <= SMALL_GAP or not is_shrinking or migration.rounds == MAX_ROUNDS:
            migration.step = Step.RELEASING
            self._seeker.decisions.begin(self._release(migration))
        else:
            self._begin_round(migration)
            self._send_tokens(migration, record)

    def _send_tokens(self, migration: Migration, record: RequestRecord, *, is_last: bool = False) -> None:
        assert migration.destination is not None
        assert record.produced >= migration.known, "tokens do not disappear"
        order = protocol.CatchUp(record, migration.number, migration.known, is_last)
        migration.destination.order(order, self._seeker.decisions.now_s)
        migration.known = record.produced

    # The end

    def _release(self, migration: Migration) -> Asking[None]:
        answer = yield Ask(migration.source, protocol.Release(migration.id))
        if migration.is_over:  # it was cancelled, has ended, or was handed over because the source had let go by itself
            return
        if isinstance(answer, protocol.TookBack) and answer.request is not None:
            self.let_go(migration.source, answer.instance, answer.request)
        else:
            self._end(migration)  # the source says why

    def let_go(self, source: NodeHandle, instance: int, record: RequestRecord) -> bool:
        """The source has let go of it, as asked or by itself. False: nobody holds a copy, it needs another place."""
        migration = self._by_request.get(record.id)
        if migration is None:
            return False
        seeker = self._seeker
        work = seeker.works[record.id]
        was_asked = migration.step is Step.RELEASING
        if migration.step is Step.CHOOSING or migration.destination is None:
            self._end(migration)
            if not was_asked:
                return False
            seeker.left(source, instance, is_best_effort=record.is_best_effort)
            work.take(record)
            seeker.outbox.append(Moving(work, seeker.decisions.now_s, migration.reason))
            seeker.seek(work)
            return True
        seeker.left(source, instance, is_best_effort=record.is_best_effort)
        gap = record.produced - migration.known
        work.take(record)
        self._send_tokens(migration, record, is_last=True)
        del self._by_request[migration.id]
        work.brought_by = migration.number
        migration.is_over = True
        self.completed += 1
        seeker.outbox.append(
            Migrated(
                work,
                migration.destination,
                migration.instance,
                source.name,
                migration.rounds,
                gap,
                record.produced,
                migration.reason,
            )
        )
        return True

    def was_handed_over(self, request: int, hold: int) -> bool:
        """The copy was given up when the request was on its way to it: what is said of the one is said of the other."""
        work = self._seeker.works.get(request)
        return work is not None and work.brought_by == hold

    def over(self, request: int) -> None:
        """The request has ended, or nobody wants it any more, or its source is gone: there is nothing to move."""
        if (work := self._seeker.works.get(request)) is not None:
            work.brought_by = 0
        migration = self._by_request.get(request)
        if migration is not None:
            self._end(migration)

    def given_up(self, node: NodeHandle, request: int, hold: int) -> None:
        """The destination has let go of the copy."""
        migration = self._by_request.get(request)
        if migration is not None and migration.number == hold and migration.destination is node:
            self._copy_lost(migration)

    def lost(self, node: NodeHandle) -> None:
        """The node is gone, and the copies on it."""
        for migration in self.of_destination(node):
            if migration.step is not Step.CHOOSING:  # else whoever asked hears it as an answer
                self._copy_lost(migration)
        for migration in self.of_source(node):
            self._end(migration)

    def _copy_lost(self, migration: Migration) -> None:
        """The source goes on; one that was asked to let go may have done so."""
        assert migration.destination is not None
        self._left(migration.destination, migration)
        migration.destination = None
        if migration.step is not Step.RELEASING:
            self._end(migration)

    def _end(self, migration: Migration) -> None:
        """It comes to nothing: take the copy back."""
        del self._by_request[migration.id]
        migration.is_over = True
        self.abandoned += 1
        node = migration.destination
        if node is not None and migration.step is not Step.CHOOSING:
            node.order(protocol.Withdraw(migration.id, migration.number), self._seeker.decisions.now_s)
            self._left(node, migration)

    def _left(self, node: NodeHandle, migration: Migration) -> None:
        """The copy."""
        self._seeker.placer.left(node, migration.instance, is_best_effort=migration.is_best_effort)

    def cancel(self, requests: Iterable[int]) -> None:
        for request in requests:
            self.over(request)
