"""A request between its arrival and its end as the controller has it: one record for each choice, which says where it
is and what is known of it; and the search for its place. The ids of its tokens are kept by whoever reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, Protocol

from dovetail.cluster.handle import KnownInstance, NodeHandle
from dovetail.cluster.open_requests import OpenChoice
from dovetail.node.protocol import Refused
from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.work import RequestRecord, Work


class Location(NamedTuple):
    node: NodeHandle
    instance: int


class RequestState(Work):
    __slots__ = (
        "attempts",
        "brought_by",
        "choice",
        "early_due_s",
        "expires_s",
        "followers",
        "has_arrived",
        "is_complete",
        "is_isolated",
        "is_moving",
        "is_prompting",
        "isolated_until",
        "last_search",
        "lost_why",
        "owed_by",
        "place",
        "place_by_s",
        "place_number",
        "placed_s",
        "search",
        "short_at",
        "waits_for_room_s",
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
        super().__init__(id, model, input_tokens, arrival_s, ttft_s, tpot_s, slo_scale)
        self.choice: OpenChoice | None = None  # its tokens, and its client; None in a simulation
        self.place: Location | None = None  # where it runs
        self.place_number = 0  # places are numbered as they are given
        self.placed_s: float | None = None  # when it first had a place
        self.is_complete = False  # all its tokens have come; its node has not said yet that it has left
        self.search: Search | None = None  # a node was asked to take it and has not answered yet
        self.last_search: Search | None = None  # how it got no place when it last asked, while it is queued
        self.expires_s: float | None = None  # when it has waited too long for that
        self.followers: tuple[RequestState, ...] = ()  # choices that wait until this one has computed the prompt
        self.is_prompting = False  # it has a place, and its prompt has not been computed since it got that
        self.is_moving = False  # it is between places until a time of its own
        self.has_arrived = False  # its KV blocks were handed over; it has not asked for a decode place yet
        self.brought_by = 0  # the migration that it has its place by
        self.waits_for_room_s = 0.0  # others make way for it (L7) until then
        self.early_due_s: float | None = None  # when it was due before it got later deadlines in advance
        self.owed_by = ""  # the node that evicted it for want of memory, until it has a place
        self.short_at: int | None = None  # tokens that it had when it was evicted for want of memory
        self.attempts = 0  # to go on, after losses of nodes that it may be to blame for
        self.lost_why = ""  # how its node was lost, last
        self.is_isolated = False  # a node died in an iteration of it: its next iterations are its own
        self.isolated_until = 0  # tokens: with so many it is beyond the place where that happened
        self.place_by_s = INFINITY  # it has a place again by then, or ends

    def is_on(self, node: NodeHandle) -> bool:
        return self.place is not None and self.place.node is node


def placed_on(works: Iterable[RequestState], node: NodeHandle) -> list[RequestState]:
    """Requests that run there, in the order in which they came."""
    return sorted((work for work in works if work.is_on(node)), key=attrgetter("place_number"))


class TokenCounts(Protocol):
    """Port to whoever has the tokens of requests: the gateway keeps their ids, the simulator counts them."""

    def num_tokens(self, work: RequestState) -> int | None:
        """Of one that has a place; None = all that it will ever have."""

    def last_record(self, work: RequestState) -> RequestRecord:
        """As far as it has come, of one that its node is lost to, or that nobody wants any more."""


@dataclass(slots=True, eq=False)
class Search:
    """One request that looks for a place, and what it has heard so far."""

    work: RequestState
    avoided: Collection[str] = ()  # nodes that owe what they have to others
    refusals: Counter[str] = field(default_factory=Counter)  # how often each reason was given
    crowded: list[KnownInstance] = field(default_factory=list)  # that would take it if neighbours went, perhaps
    prefill_s: float = INFINITY  # what the fastest of those who refused would need, otherwise empty
    decode_s: float = INFINITY
    could_serve: bool = False  # one of them would keep the targets, undisturbed
    is_over: bool = False  # nobody wants the request any more
    num_checked: int = 0  # nodes asked whether they would take what gives way
    last_refusal: Refusal | None = None
    are_alike: bool = False  # models answer at like length
    reclaims: bool = False  # idle instances may go for it
    is_full: bool = False  # no device is free, where models have devices to themselves
    _record: RequestRecord | None = None

    @property
    def record(self) -> RequestRecord:
        if self._record is None:
            self._record = self.work.record()
        return self._record

    @property
    def until_s(self) -> float:
        """A request that asked for targets is refused within them, answers or not."""
        return self.work.due_s if self.work.is_strict and not self.work.produced else INFINITY

    def changed(self) -> None:
        """The request has got other deadlines."""
        self._record = None

    def note(self, refused: Refused) -> None:
        self.refusals[refused.reason] += 1
        self.last_refusal = refused.reason
        if refused.prefill_s is not None:
            self.prefill_s = min(self.prefill_s, refused.prefill_s)
            self.decode_s = min(self.decode_s, refused.decode_s)
            self.could_serve |= refused.could_serve
