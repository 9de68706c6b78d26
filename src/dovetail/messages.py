"""What gateway and worker say to each other, as tagged records over ZeroMQ.

The gateway binds a ROUTER, each worker connects a DEALER whose identity is its node's name; one frame holds one record.
`encode` and the two decoders are the whole wire format.
"""

from __future__ import annotations

import hmac
from typing import Literal

import msgspec

from dovetail.modelspec import KvKind
from dovetail.node.protocol import Answer, Notice, Order, Question
from dovetail.policy.placement import DeviceKind
from dovetail.types import ModelCard, Request, Speculation, TokenEvent

# Environment of a worker on another machine: the gateway's public key, the worker's, and its secret one. Not on the
# command line, which everyone may read.
KEYS_VARIABLE = "DOVETAIL_WORKER_KEYS"
# The same, in bytes: what models may take in the store of a machine that joined. Where that is, DOVETAIL_HOME says.
STORE_LIMIT_VARIABLE = "DOVETAIL_STORE_LIMIT"


def weights_token(keys: str) -> bytes:
    """Under which machines of a cluster ask each other for weights: of the secret that all its workers have."""
    return hmac.digest(keys.rpartition(" ")[2].encode(), b"dovetail weights", "sha256")


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Make this model known: the node says Offered. Whenever an instance of it becomes ready the node says Loaded,
    whenever the last one has gone Reclaimed; LoadFailed takes the model back. Said again it changes the keep-alive."""

    card: ModelCard
    dtype: str = "auto"  # compute type; auto = what this device multiplies fastest
    kv_bytes: int = 0  # upper limit of the KV pool; 0 = the worker's default
    keep_alive_s: float = -1.0  # idle time after which the node unloads it; 0 = at once, negative = never
    kv: KvKind = "auto"
    speculation: Speculation = Speculation("off")
    resident_share: float | None = None  # of its layers, on a GPU; None = all that fit, the others are streamed


class Unload(msgspec.Struct, frozen=True, tag="unload"):
    """Free the model's weights and KV pool; requests that are left come back as Evicted."""

    model: str


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """The adapter is offered no longer: free it when the requests that name it have ended."""

    key: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A question of the node protocol; Reply has the same number. Times in it are on the gateway's monotonic clock."""

    number: int
    question: Question
    request: Request | None = None  # with Propose: what is to be served, with one open choice


class Command(msgspec.Struct, frozen=True, tag="command"):
    """An order of the node protocol."""

    order: Order
    tokens: tuple[int, ...] = ()  # with CatchUp: those that the request has got since


class Neighbours(msgspec.Struct, frozen=True, tag="neighbours"):
    """Where weights can be had that a machine lacks, the first to be asked in front; said anew when it changes."""

    addresses: tuple[str, ...]


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Says nothing: whether it can be sent is what counts."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Free everything and exit."""


class ClockAsked(msgspec.Struct, frozen=True, tag="clock_asked"):
    """First of a worker on another machine: what is the time there?"""

    sent_s: float  # by its own clock


class ClockTold(msgspec.Struct, frozen=True, tag="clock_told"):
    sent_s: float  # of the question
    now_s: float  # the gateway's monotonic clock, on which all times of the node protocol are


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a worker on each connection: it is there, owes nothing, and can take a Load."""

    node: str
    pid: int
    device: str
    import_s: float  # from process start until torch was imported
    kind: DeviceKind = DeviceKind.CPU
    memory_bytes: int = 0  # for weights and KV
    models: tuple[str, ...] = ()  # that it knows from before: it has come back to a gateway, with its models
    weights: str = ""  # host:port where its machine gives weights to others; empty = it does not


class LoadTimes(msgspec.Struct, frozen=True):
    open_s: float  # mapping the checkpoint's files and reading its index; fetching them first where they were not here
    build_s: float  # building the model on its tensors, and its KV pool


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    model: str
    dtype: str
    kv_capacity_tokens: int
    weight_bytes: int
    mapped: bool  # weights are used in place in the checkpoint's pages
    times: LoadTimes
    tier: Literal["host", "disk", "neighbour", "remote"] = "disk"  # where the weights were before
    again: bool = False  # to a gateway that has not heard of it: it was loaded long ago


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """How far a load has come, a few times a second while it runs."""

    model: str
    done_bytes: int  # of its weights in memory, from the front; of what is fetched from a neighbour first, here
    total_bytes: int


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    model: str
    error: str


class Unloaded(msgspec.Struct, frozen=True, tag="unloaded"):
    """The answer to Unload."""

    model: str


class Reclaimed(msgspec.Struct, frozen=True, tag="reclaimed"):
    """The node has taken the model's memory back, of itself; its next request starts it again."""

    model: str


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to the question of this number; sent before anything that follows from it."""

    number: int
    answer: Answer


class Said(msgspec.Struct, frozen=True, tag="said"):
    """What the node says of itself, in order; after the tokens that were made before."""

    notices: tuple[Notice, ...]


class Tokens(msgspec.Struct, frozen=True, gc=False, tag="tokens"):
    """All events of one iteration."""

    model: str
    events: tuple[TokenEvent, ...]


class InstanceStats(msgspec.Struct, frozen=True):
    model: str
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int  # held by unfinished sequences
    blocks_cached: int  # reusable prefixes that no sequence holds
    kv_committed_bytes: int
    preemptions: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # of them found
    turns: int
    turn_tokens: int  # tokens computed in all turns
    turn_seconds: float  # spent in Executor.run
    overhead_seconds: float  # spent between them while there was work
    draft_tokens: int = 0  # proposed and verified
    accepted_tokens: int = 0  # of them


class TurnSpan(msgspec.Struct, frozen=True, array_like=True):
    """One iteration, as it is drawn: who held the device, from when, for how long."""

    model: str
    started_s: float  # monotonic clock of the machine
    seconds: float
    tokens: int
    traced: tuple[str, ...] = ()  # requests in it whose turns are traced
    is_best_effort: bool = False  # nobody waits for any of its requests


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Sent about once a second while there is work, and after the last turn."""

    node: str
    resident_bytes: int
    instances: tuple[InstanceStats, ...]
    memory_budget_bytes: int = 0  # what weights and KV pools may take together
    memory_planned_bytes: int = 0  # what they take or are about to
    resizes: int = 0
    resize_seconds: float = 0.0
    overhead_p50_s: float = 0.0  # between the end of an iteration and the start of the next, while there was work
    overhead_p99_s: float = 0.0
    spans: tuple[TurnSpan, ...] = ()  # iterations since the last message; the latest, if there were very many


ToWorker = Load | Unload | DropAdapter | Ask | Command | ClockTold | Neighbours | Probe | Shutdown
ToGateway = ClockAsked | Hello | Loading | Loaded | LoadFailed | Unloaded | Reclaimed | Reply | Said | Tokens | Stats

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)


def encode(message: ToWorker | ToGateway) -> bytes:
    return _encoder.encode(message)


def decode_for_worker(frame: bytes) -> ToWorker:
    return _to_worker.decode(frame)


def decode_for_gateway(frame: bytes) -> ToGateway:
    return _to_gateway.decode(frame)
