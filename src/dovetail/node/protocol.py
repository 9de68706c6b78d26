"""What a controller and a node say to each other, in one process or in two: typed, immutable, every field plain.

The controller proposes, the node disposes. A question has exactly one answer, told apart by a number where answers
come late; an order has none. What a node says of itself keeps its order, and an answer comes no later than what follows
from it. The file is the node's, because a node knows nothing of who asks.
"""

from __future__ import annotations

import msgspec

from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.placement import DeviceKind
from dovetail.policy.work import Phase, RequestRecord

GIVES_WAY = "gives_way"  # why best effort was evicted: somebody who is waited for needs its memory

# Questions


class Propose(msgspec.Struct, frozen=True, gc=False, tag="propose"):
    """Take this request. Asked again for one that is there already, the answer is the same."""

    request: RequestRecord
    instance: int | None = None  # to join; None = start an instance for it
    hold: int = 0  # L4: it runs elsewhere still: compute its tokens, say CaughtUp, wait for CatchUp of this number
    reclaims: bool = False  # idle instances give way to its start before their keep-alive is over
    are_alike: bool = False  # models answer at like length, as far as the controller has seen


class Check(msgspec.Struct, frozen=True, gc=False, tag="check"):
    """Would you take it? Nothing changes."""

    request: RequestRecord
    instance: int | None = None


class FindVictims(msgspec.Struct, frozen=True, gc=False, tag="find_victims"):
    """S9: whose going would let the instance take the request?"""

    request: RequestRecord
    instance: int


class FindGuests(msgspec.Struct, frozen=True, gc=False, tag="find_guests"):
    """L7: who would have to go so that an instance for the request could start?"""

    request: RequestRecord


class Ease(msgspec.Struct, frozen=True, gc=False, tag="ease"):
    """Let everybody who did not ask for targets go at a pace at which there is time for this request too."""

    request: RequestRecord


class Release(msgspec.Struct, frozen=True, gc=False, tag="release"):
    """Let go of this request, if it is here still; it goes on elsewhere."""

    request: int


class TakeBack(msgspec.Struct, frozen=True, gc=False, tag="take_back"):
    """Let go of a long answer, if there is one that may have to wait for a newcomer."""


class Warm(msgspec.Struct, frozen=True, gc=False, tag="warm"):
    """Have an instance of the model before anybody asks for it. One that is there already will do."""

    model: str


Question = Propose | Warm | Release | Check | FindVictims | FindGuests | Ease | TakeBack

# Answers


class Accepted(msgspec.Struct, frozen=True, gc=False, tag="accepted"):
    """To Propose: it is here from now on. To Check: it would be."""

    instance: int = -1


class Refused(msgspec.Struct, frozen=True, gc=False, tag="refused"):
    reason: Refusal
    prefill_s: float | None = None  # what the request needs here on an otherwise empty device; None = not offered here
    decode_s: float = 0.0
    could_serve: bool = False  # undisturbed, the device would keep the targets


class Victim(msgspec.Struct, frozen=True, gc=False):
    """An instance that could give way, and the requests that would need another place."""

    instance: int
    requests: tuple[RequestRecord, ...]


class Victims(msgspec.Struct, frozen=True, gc=False, tag="victims"):
    found: tuple[Victim, ...] = ()  # the smallest batch first


class Guest(msgspec.Struct, frozen=True, gc=False):
    """An instance that could go: nobody on it waits for a first token."""

    instance: int
    model: str
    frees_bytes: int
    requests: tuple[RequestRecord, ...]  # as they would go elsewhere; none = it is idle


class Guests(msgspec.Struct, frozen=True, gc=False, tag="guests"):
    missing_bytes: int = 0  # that a start needs beyond what is free; 0 = nobody has to go
    found: tuple[Guest, ...] = ()


class Eased(msgspec.Struct, frozen=True, gc=False, tag="eased"):
    pace_s: float = 0.0  # of a token, from now on


class TookBack(msgspec.Struct, frozen=True, gc=False, tag="took_back"):
    """The request that has left, or none."""

    request: RequestRecord | None = None
    instance: int = -1
    prefill_s: float = 0.0  # what it would need on an otherwise empty device
    decode_s: float = 0.0


Answer = Accepted | Refused | Victims | Guests | Eased | TookBack

# Orders


class Preempt(msgspec.Struct, frozen=True, gc=False, tag="preempt"):
    """Close the instance; its requests come back as Evicted. One that is gone already is no mistake."""

    instance: int
    reason: str


class Withdraw(msgspec.Struct, frozen=True, gc=False, tag="withdraw"):
    """Nobody wants the request here any more. Nothing more is said of it."""

    request: int
    hold: int | None = None  # only if it is held under this number


class CatchUp(msgspec.Struct, frozen=True, gc=False, tag="catch_up"):
    """L4: a request that is held has got more tokens where it runs. One that is gone already is no mistake."""

    request: RequestRecord  # with so many tokens
    hold: int  # under which it is held; what comes late, of another number, is passed over
    known: int  # tokens that it had before; the others come with the order
    is_last: bool = False  # it runs nowhere else any more: go on with it


Order = Preempt | Withdraw | CatchUp

# What a node says of itself


class Prefilled(msgspec.Struct, frozen=True, gc=False, tag="prefilled"):
    """The prompt of the request is computed."""

    request: int
    grace_s: float  # for the cold start that it waited for


class Finished(msgspec.Struct, frozen=True, gc=False, tag="finished"):
    """The request has all its tokens and has left."""

    request: RequestRecord
    instance: int


class Evicted(msgspec.Struct, frozen=True, gc=False, tag="evicted"):
    """The request has left unfinished and needs another place."""

    request: RequestRecord
    instance: int
    reason: str
    hold: int = 0  # it was held under this number and runs elsewhere still


class HandedOver(msgspec.Struct, frozen=True, gc=False, tag="handed_over"):
    """A prefill instance has made the first token; the rest belongs on a decode instance."""

    request: RequestRecord
    instance: int
    kv_bytes: int


class Overcommitted(msgspec.Struct, frozen=True, gc=False, tag="overcommitted"):
    """Contexts have grown: an iteration of every instance takes longer than the strictest pace. This request is the one
    furthest ahead; somebody else had better go on with it. It is here still."""

    request: RequestRecord  # as it would go elsewhere
    instance: int


class CaughtUp(msgspec.Struct, frozen=True, gc=False, tag="caught_up"):
    """L4: the KV of a request that is held is there for its first so many tokens."""

    request: int
    hold: int
    produced: int
    instance: int = -1


class InstanceOpened(msgspec.Struct, frozen=True, gc=False, tag="instance_opened"):
    """It was started without a request."""

    instance: int
    model: str


class InstanceReady(msgspec.Struct, frozen=True, gc=False, tag="instance_ready"):
    instance: int
    model: str


class InstanceClosed(msgspec.Struct, frozen=True, gc=False, tag="instance_closed"):
    """It takes no more work; its memory will come back."""

    instance: int
    model: str


class InstanceGone(msgspec.Struct, frozen=True, gc=False, tag="instance_gone"):
    """Its memory and its slot are free."""

    instance: int
    model: str


class Idle(msgspec.Struct, frozen=True, gc=False, tag="idle"):
    """Nothing can run, or something can again."""

    is_idle: bool


class InstanceView(msgspec.Struct, frozen=True, gc=False, array_like=True):
    id: int
    model: str
    phase: Phase
    batch: int
    is_ready: bool
    best_effort: int = 0  # of the batch


class StartRoom(msgspec.Struct, frozen=True, gc=False):
    """What is left for one more instance, as far as that can be said without knowing the request."""

    weight_bytes: int  # its weights may take
    pace_s: float = 0.0  # one iteration of every instance that is there, now or when contexts will have grown
    strictest_s: float = INFINITY  # the strictest pace of all requests there


EMPTY = StartRoom(1 << 62)


class NodeView(msgspec.Struct, frozen=True, gc=False, tag="view"):
    """The node as it is after everything that it has said before. The highest version is the newest."""

    version: int
    kind: DeviceKind
    in_use: bool
    fullness: float  # CPUs are short of time, GPUs of memory: packing goes by that
    memory_bytes: int
    free_bytes: int
    instances: tuple[InstanceView, ...] = ()  # that take work
    room: StartRoom = EMPTY
    link_free_s: float = 0.0  # when the loads that were ordered should be done


class Offer(msgspec.Struct, frozen=True, gc=False):
    """What the node would do for a model."""

    room_tokens: int  # that one request of the model may have, had it the node to itself
    weight_bytes: int = 0  # that a start takes; 0 = they are in place
    decode_s: float = 0.0  # one token of a usual context on an otherwise empty device, overestimated
    load_s: float = 0.0  # what a start takes until the weights are there, were nothing else loaded; 0 = not known
    disk_s: float = 0.0  # for so much of it the disk or network of the machine is busy, which its devices share
    token_s: float = 0.0  # L6: recomputing n tokens of an answer that moves here takes token_s · n + resume_s
    resume_s: float = 0.0
    token_bytes: int = 0  # of KV; 0 = not known


class Offered(msgspec.Struct, frozen=True, gc=False, tag="offered"):
    """The node offers the model, or offers it in another way than before."""

    model: str
    offer: Offer


class NoLonger(msgspec.Struct, frozen=True, gc=False, tag="no_longer"):
    """The node does not offer the model any more."""

    model: str


Notice = (
    Prefilled
    | Finished
    | Evicted
    | HandedOver
    | Overcommitted
    | CaughtUp
    | InstanceOpened
    | InstanceReady
    | InstanceClosed
    | InstanceGone
    | Idle
    | NodeView
    | Offered
    | NoLonger
)
