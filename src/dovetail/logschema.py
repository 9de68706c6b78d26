"""The event log, written out: the name of every event, and its fields in the order in which they stand in a line.

A line is a JSON object: `t` (seconds, to the microsecond), `event` (the name), then the fields. Nothing here follows
from the name of a class or an attribute: renaming code changes no byte of a log. `EventLog` writes by this schema;
`cluster.log_lines` and `node.log_lines` say which decision becomes which line.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple


class Form(StrEnum):
    """How a value is written."""

    INT = "int"
    TEXT = "text"
    FLAG = "flag"
    SECONDS = "seconds"  # rounded to the microsecond; without a limit: null
    NUMBER = "number"  # as it is
    INTS = "ints"  # a list
    COUNTS = "counts"  # an object: how often, by name
    SUMS = "sums"  # an object: seconds by name, as they are
    MOVES = "moves"  # a list of [instance, [request, …], node or null]
    TABLE = "table"  # an object: a latency table as profiles have it


class Field(NamedTuple):
    name: str
    form: Form
    meaning: str
    may_miss: bool = False  # the line leaves it out where it says nothing
    may_be_null: bool = False


class Event(NamedTuple):
    name: str
    meaning: str
    fields: tuple[Field, ...]
    is_detailed: bool = False  # in detailed logs only


# Fields that several events have

REQUEST = Field("request", Form.INT, "its number: one for each choice")
NODE = Field("node", Form.TEXT, "the node's name")
INSTANCE = Field("instance", Form.INT, "its number, unlike that of any other node's")
MODEL = Field("model", Form.TEXT, "the model's name")
REASON = Field("reason", Form.TEXT, "why; may be empty")

# Requests, by the controller

ARRIVE = Event(
    "arrive",
    "a choice of a request has come in",
    (
        REQUEST,
        MODEL,
        Field("input", Form.INT, "tokens of its prompt"),
        Field("at", Form.SECONDS, "when it was received; its targets count from then"),
        Field("asked", Form.INT, "tokens that it asked for at most", may_miss=True),
        Field("adapter", Form.TEXT, "adapter on top of the model", may_miss=True),
        Field("best_effort", Form.FLAG, "it has no targets", may_miss=True),
        Field("goes_first", Form.FLAG, "before others that are waited for", may_miss=True),
        Field(
            "ttft_s",
            Form.NUMBER,
            "target for its first token, where it asked for targets",
            may_miss=True,
            may_be_null=True,
        ),
        Field("tpot_s", Form.NUMBER, "target for each further token", may_miss=True, may_be_null=True),
    ),
)
PLACED = Event(
    "placed",
    "a node has accepted it",
    (REQUEST, NODE, INSTANCE, Field("how", Form.TEXT, "join, preempt or start: the step of placement")),
)
QUEUED = Event(
    "queued", "no node takes it now", (REQUEST, Field("refusals", Form.COUNTS, "how often each reason was given"))
)
EXTENDED = Event(
    "extended",
    "it cannot be in time and is served late",
    (REQUEST, Field("due_s", Form.SECONDS, "when its next token is due now")),
)
REFUSED = Event(
    "refused",
    "the decision to give it up; the line of its end follows, under the same name",
    (
        REQUEST,
        REASON,
        Field("refusals", Form.COUNTS, "how often each reason was given when it last asked"),
        Field("retry_after_s", Form.SECONDS, "when it is worth asking again; null = never", may_be_null=True),
    ),
)
MOVING = Event(
    "moving",
    "it is between places: its KV blocks travel, or it is swapped out",
    (REQUEST, Field("retry_at_s", Form.SECONDS, "until then", may_be_null=True), REASON),
)
MIGRATED = Event(
    "migrated",
    "it goes on at another node, which has recomputed its tokens meanwhile",
    (
        REQUEST,
        NODE,
        INSTANCE,
        Field("source", Form.TEXT, "the node that it has left"),
        Field("rounds", Form.INT, "of tokens that the destination computed before the last few"),
        Field("gap", Form.INT, "tokens that were left for the end"),
        Field("produced", Form.INT, "tokens of its answer so far"),
        REASON,
    ),
)
DISPLACE = Event(
    "displace",
    "it waits for others to leave a node, where it then starts",
    (
        REQUEST,
        NODE,
        Field("start_s", Form.SECONDS, "until its weights should be there, everything included"),
        Field("moves", Form.MOVES, "who leaves: instances with their requests and where those go on; null = evicted"),
    ),
)
_END = (
    REQUEST,
    REASON,
    Field("output", Form.INT, "tokens of its answer"),
    Field("grace", Form.SECONDS, "that a cold start gave it on top of its targets"),
    Field("late", Form.INT, "tokens after their deadlines"),
)
# The last line of a request, by what became of it.
ENDS = {
    "finished": Event("finished", "it has its last token", _END),
    "refused": Event("refused", "it was given up", _END),
    "aborted": Event("aborted", "its client has gone", _END),
    "failed": Event(
        "failed",
        "its node was lost, and it does not go on (`reason` says why)",
        _END,
    ),
}

# Nodes

LOAD = Event(
    "load",
    "weights are to be brought onto the device",
    (
        NODE,
        INSTANCE,
        MODEL,
        Field("num_bytes", Form.INT, "their size"),
        Field("due_s", Form.SECONDS, "when the most urgent request of them is due", may_be_null=True),
    ),
)
RESIZE = Event(
    "resize",
    "a KV pool gets another size",
    (NODE, INSTANCE, MODEL, Field("old_bytes", Form.INT, "before"), Field("new_bytes", Form.INT, "after")),
)
UNLOAD = Event("startunload", "weights are to be freed", (NODE, INSTANCE, MODEL), is_detailed=True)
ENTER = Event("enter", "it takes part in the instance's turns from now on", (NODE, REQUEST, INSTANCE), is_detailed=True)
LEAVE = Event("leave", "it leaves the instance unfinished", (NODE, REQUEST, INSTANCE), is_detailed=True)
FIRST_TOKEN = Event("first_token", "it has its first token", (REQUEST, NODE))
EVICTED = Event("evicted", "it has lost its place", (NODE, REQUEST, INSTANCE, REASON))
HANDED_OVER = Event(
    "handedover",
    "its prompt is computed; another instance goes on with it",
    (NODE, REQUEST, INSTANCE, Field("kv_bytes", Form.INT, "its KV blocks")),
)
OVERCOMMITTED = Event(
    "overcommitted",
    "the node cannot keep its pace any more; this request had better go elsewhere",
    (NODE, REQUEST, INSTANCE, Field("produced", Form.INT, "tokens of its answer so far")),
)
CAUGHT_UP = Event("caughtup", "a migrating request's tokens are computed here", (NODE, REQUEST, INSTANCE))
RESUMED = Event("resumed", "a migrating request runs here from now on", (NODE, REQUEST, INSTANCE))
INSTANCE_READY = Event("instanceready", "its weights are there", (NODE, INSTANCE, MODEL))
INSTANCE_CLOSED = Event("instanceclosed", "it takes no more requests", (NODE, INSTANCE, MODEL))
INSTANCE_GONE = Event("instancegone", "its memory is free", (NODE, INSTANCE, MODEL))

# Turns

_REQUESTS = Field("requests", Form.INTS, "prompts first, then those who decode")
_TOKENS = Field("tokens", Form.INTS, "of each prompt, where one is computed in parts", may_miss=True)
PREFILL = Event("prefill", "a turn with prompts begins", (NODE, INSTANCE, _REQUESTS, _TOKENS), is_detailed=True)
DECODE = Event("decode", "a turn without prompts begins", (NODE, INSTANCE, _REQUESTS), is_detailed=True)

# What a replay of a real node needs

HOSTING = Event(
    "hosting",
    "a model that the node offers, or what is known of it anew",
    (
        MODEL,
        Field("weight_bytes", Form.INT, "size of its weights"),
        Field("kv_bytes_per_token", Form.INT, "size of a token's keys and values"),
        Field("block_tokens", Form.INT, "tokens of a KV block"),
        Field("slots", Form.INT, "instances of such models that a policy of static shares puts on the node"),
        Field("concurrency", Form.INT, "requests at a time, by the baselines' fixed limit"),
        Field("half_concurrency", Form.INT, "the same with half a node"),
        Field("load_s", Form.NUMBER, "bringing its weights onto the device"),
        Field("disk_s", Form.NUMBER, "for so much of it the disk or network is busy"),
        Field("weights_in_place", Form.FLAG, "it is served from host memory, without a load"),
        Field("max_kv_tokens", Form.INT, "its KV pool is never made larger", may_be_null=True),
        Field(
            "keep_alive_s", Form.NUMBER, "how long it stays idle; null = by the policy, -1 = for ever", may_be_null=True
        ),
        Field("layer_s", Form.NUMBER, "computing one of its layers, which are read from the disk", may_miss=True),
        Field("latency", Form.TABLE, "what its iterations take"),
    ),
)
PACE = Event(
    "pace",
    "what the node's turns took so far, beside what was expected",
    (
        Field("turns", Form.INT, "how many"),
        Field("gap_s", Form.NUMBER, "that lay between turns while there was work"),
        Field("took_s", Form.SUMS, "what they took, by kind of turn"),
        Field("expected_s", Form.SUMS, "what was expected of them"),
    ),
)
FAULT = Event("fault", "a fault strikes a simulated node", (NODE, Field("kind", Form.TEXT, "which, see `sim.faults`")))

EVENTS: tuple[Event, ...] = (
    *(ARRIVE, PLACED, QUEUED, EXTENDED, REFUSED, MOVING, MIGRATED, DISPLACE, *ENDS.values()),
    *(LOAD, RESIZE, UNLOAD, ENTER, LEAVE, FIRST_TOKEN, EVICTED, HANDED_OVER, OVERCOMMITTED, CAUGHT_UP, RESUMED),
    *(INSTANCE_READY, INSTANCE_CLOSED, INSTANCE_GONE, PREFILL, DECODE, HOSTING, PACE, FAULT),
)


def line_of(now: float, event: Event, values: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of an event: its fields in their order."""
    line: dict[str, Any] = {"t": round(now, 6), "event": event.name}
    for field in event.fields:
        if field.name in values:
            line[field.name] = _written(field.form, values[field.name])
        else:
            assert field.may_miss, f"{event.name}: no {field.name}"
    assert len(line) == len(values) + 2, (
        f"{event.name}: fields that the schema does not have: {values.keys() - line.keys()}"
    )
    return line


def _written(form: Form, value: Any) -> Any:
    if form is not Form.SECONDS or value is None:
        return value
    return None if value == float("inf") else round(value, 6)
