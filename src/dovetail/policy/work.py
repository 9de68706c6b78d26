"""A request as schedulers see it: lengths, deadlines and counters, no tokens and no text (S1, S2).

`RequestRecord` is what travels between controller and nodes, immutable. Whoever has the request keeps a `Work` of its
own, made of the record, and makes a new record of it when the request goes on: no object has two owners.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import msgspec

SLACK = 1.5  # of an extended deadline over what an otherwise empty device needs
FEW_TOKENS = 32  # of an answer: its reader waits for the one that comes after they are computed


class Phase(StrEnum):
    """What a piece of work is waiting for. PREFILL and DECODE are the roles of disaggregated instances."""

    ANY = "any"
    PREFILL = "prefill"
    DECODE = "decode"


class Phases(Protocol):
    def first(self, phase: Phase) -> Phase:
        """Of a request that comes with this one."""


@dataclass(frozen=True, slots=True)
class Together:
    """Prefill and decode on one instance."""

    def first(self, phase: Phase) -> Phase:
        return phase


class RequestRecord(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A request at the moment at which it changes hands."""

    id: int
    group: int  # of the choices of one request: the number of the first
    model: str
    input_tokens: int
    produced: int  # tokens that it has
    arrival_s: float  # at the socket
    ttft_s: float  # as the scheduler holds it, safety included
    tpot_s: float
    slo_scale: float  # the share of the true SLOs at which the two above are held
    first_due_s: float  # when its first token is or was due, as extended; later ones follow at `tpot_s`
    grace_s: float  # cold start that its first token had to wait for
    is_strict: bool  # its targets were asked for: refused rather than late, while it has no token
    has_kv: bool  # its KV blocks travel with it: no prefill needed
    phase: Phase
    late_tokens: int  # tokens after their own true deadline
    last_token_s: float | None  # None before its first token
    silence_s: float  # the longest time between two of its tokens
    moves: int
    mean_tokens: float  # what answers of its model are long, as far as the controller knows; 0 = not at all
    adapter: str = ""  # name of the adapter on top of the model; empty = none
    is_best_effort: bool = False  # nobody waits for it: it takes what the others leave
    goes_first: bool = False  # its prompt, where nobody's promise is broken by that


class Work:
    """`produced` is exact while the work is not in a running batch; inside one the instance's clock adds to it."""

    __slots__ = (
        "adapter",
        "arrival_s",
        "cached",
        "computed",
        "first_due_s",
        "goes_first",
        "grace_s",
        "group",
        "hold",
        "id",
        "input_tokens",
        "is_best_effort",
        "is_strict",
        "joined_clock",
        "last_token_s",
        "late_tokens",
        "mean_tokens",
        "model",
        "moves",
        "phase",
        "prepares",
        "produced",
        "reused",
        "silence_s",
        "slo_scale",
        "tpot_s",
        "ttft_s",
    )

    def __init__(
        self,
        id: int,
        model: str,
        input_tokens: int,
        arrival_s: float,
        ttft_s: float,
        tpot_s: float,
        slo_scale: float = 1.0,
    ) -> None:
        self.id = id
        self.group = id  # of the choices of one request: the number of the first
        self.model = model
        self.input_tokens = input_tokens
        self.arrival_s = arrival_s
        self.ttft_s = ttft_s  # as the scheduler holds it, safety included
        self.tpot_s = tpot_s
        self.slo_scale = slo_scale  # the share of the true SLOs at which the two above are held
        self.grace_s = 0.0  # cold start that its first token had to wait for
        self.first_due_s = arrival_s + ttft_s
        self.produced = 0
        self.joined_clock = 0  # the instance's clock when it joined the running batch
        self.cached = False  # its KV blocks travel with it: no prefill needed
        self.phase = Phase.ANY
        self.is_strict = True  # its targets were asked for: refused rather than late, while it has no token
        self.late_tokens = 0  # tokens after their own true deadline
        self.last_token_s: float | None = None  # None before its first token
        self.silence_s = 0.0  # the longest time between two of its tokens
        self.moves = 0
        self.hold = 0  # the migration for which it is held: it runs elsewhere still, no token is made here; 0 = none
        self.prepares = False  # its grammar or adapter is on its way: it has no turn before that is there
        self.computed = 0  # tokens whose KV blocks are here while it does not run: it is held, or its prompt is begun
        self.reused = 0  # tokens that the instance's prefix cache has, as of the proposal; not held yet
        self.adapter = ""  # on top of the model; empty = none
        self.is_best_effort = False  # nobody waits for it: it takes what the others leave
        self.goes_first = False  # its prompt, where nobody's promise is broken by that
        self.mean_tokens = 0.0  # what answers of its model are long, as far as the controller knows; 0 = not at all

    @classmethod
    def of(cls, record: RequestRecord) -> Work:
        work = cls.__new__(cls)  # for each node that is asked: what is set here and in `take` is all that there is
        work.id = record.id
        work.group = record.group
        work.model = record.model
        work.input_tokens = record.input_tokens
        work.arrival_s = record.arrival_s
        work.slo_scale = record.slo_scale
        work.adapter = record.adapter
        work.is_best_effort = record.is_best_effort
        work.goes_first = record.goes_first
        work.joined_clock = work.hold = work.computed = work.reused = 0
        work.prepares = False
        work.take(record)
        return work

    def take(self, record: RequestRecord) -> None:
        """The request as whoever had it leaves it."""
        assert record.id == self.id
        self.ttft_s = record.ttft_s
        self.tpot_s = record.tpot_s
        self.grace_s = record.grace_s
        self.first_due_s = record.first_due_s
        self.produced = record.produced
        self.cached = record.has_kv
        self.phase = record.phase
        self.is_strict = record.is_strict
        self.late_tokens = record.late_tokens
        self.last_token_s = record.last_token_s
        self.silence_s = record.silence_s
        self.moves = record.moves
        self.mean_tokens = record.mean_tokens

    def record(self) -> RequestRecord:
        """While it is in no running batch."""
        return RequestRecord(
            self.id,
            self.group,
            self.model,
            self.input_tokens,
            self.produced,
            self.arrival_s,
            self.ttft_s,
            self.tpot_s,
            self.slo_scale,
            self.first_due_s,
            self.grace_s,
            self.is_strict,
            self.cached,
            self.phase,
            self.late_tokens,
            self.last_token_s,
            self.silence_s,
            self.moves,
            self.mean_tokens,
            self.adapter,
            self.is_best_effort,
            self.goes_first,
        )

    @property
    def due_s(self) -> float:
        """When its next token is due, while it is in no running batch."""
        return self.first_due_s + self.tpot_s * self.produced

    @property
    def known_tokens(self) -> int:
        return self.input_tokens + self.produced

    @property
    def pending_tokens(self) -> int:
        """What has no KV blocks yet that are its own."""
        return self.input_tokens + self.produced - self.computed

    @property
    def start(self) -> int:
        """Where a prefill of it begins: after what is computed, or after what the prefix cache has."""
        return self.computed or self.reused

    @property
    def uncomputed_tokens(self) -> int:
        """What a prefill of it has to compute."""
        return self.input_tokens + self.produced - self.start

    @property
    def is_resuming(self) -> bool:
        """An answer that goes on as soon as a few tokens are computed: it was handed over (L4), or will be, or nearly
        has its KV again. While it is in no running batch."""
        if not self.produced or not self.computed:
            return False
        few = max(FEW_TOKENS, self.known_tokens // 4) if self.hold else FEW_TOKENS  # a copy must catch up with its own
        return self.pending_tokens <= few

    def hold_for(self, migration: int, ready_s: float) -> None:
        """It runs elsewhere still, so that its recomputation is as urgent as a first token when the weights are there,
        and no more."""
        self.hold = migration
        self.first_due_s = max(self.first_due_s, ready_s + self.ttft_s - self.tpot_s * self.produced)

    def got_token(self, now: float) -> None:
        """Note the time; how many tokens it has is counted elsewhere."""
        if self.last_token_s is not None and now - self.last_token_s > self.silence_s:
            self.silence_s = now - self.last_token_s
        self.last_token_s = now

    def pace_from(self, first_token_s: float, tokens: float) -> None:
        """Its pace is measured from its first token. One that came before its time leaves later tokens no more time
        than the scheduler's safety adds up to over so many tokens."""
        self.first_due_s = min(self.first_due_s, first_token_s + self.safety_s(tokens))

    def safety_s(self, tokens: float) -> float:
        """What the scheduler's safety adds up to."""
        return tokens * self.tpot_s * (1.0 / self.slo_scale - 1.0)

    def as_of(self, produced: int) -> Work:
        """A copy with so many tokens: of one that runs, for somebody who is asked whether to take it."""
        now = Work.of(self.record())
        now.produced = produced
        now.cached = False
        return now

    def give_grace(self, seconds: float) -> None:
        self.grace_s += seconds
        self.first_due_s += seconds

    @property
    def is_lenient(self) -> bool:
        """Better late than never: it did not ask for its targets, or its client has read a part of it."""
        return not self.is_strict or self.produced > 0

    def extend_deadline(self, now: float, prefill_s: float, decode_s: float | None) -> None:
        """Its targets cannot be kept: twice the time, counted from now, and no less than a device needs that takes so
        long for its prefill and its decode (None: its pace can be kept). It stays after those who are still in time and
        before those who came later; one that is extended again and again gets everywhere."""
        self.is_strict = False
        self.late_tokens += 1  # the next one, by what was promised
        self.ttft_s = max(2 * self.ttft_s, SLACK * prefill_s)
        if decode_s is not None:
            self.tpot_s = max(2 * self.tpot_s, SLACK * decode_s)
        self.first_due_s = now + self.ttft_s - self.tpot_s * self.produced

    def slow_down(self, now: float, tpot_s: float, produced: int) -> None:
        """It has so many tokens and gets the next ones at this pace from now on; a first one has its time once more."""
        self.tpot_s = tpot_s
        if produced:
            self.first_due_s = now + tpot_s - tpot_s * produced
        elif self.first_due_s < now:
            self.first_due_s = now + self.ttft_s

    def true_due_s(self, due_s: float) -> float:
        """The deadline without the scheduler's safety."""
        base = self.arrival_s + self.grace_s
        return base + (due_s - base) / self.slo_scale
