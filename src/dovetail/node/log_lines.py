"""A node's lines in the event log: what each of its events is written as."""

from __future__ import annotations

from typing import Any

from dovetail import logschema
from dovetail.eventlog import EventLog
from dovetail.node import events, protocol

# Events of a request on an instance, and of an instance, which are written alike.
_OF_REQUEST = {
    events.Enter: logschema.ENTER,
    events.Leave: logschema.LEAVE,
    events.Resumed: logschema.RESUMED,
}
_OF_INSTANCE = {
    events.StartUnload: logschema.UNLOAD,
    protocol.InstanceReady: logschema.INSTANCE_READY,
    protocol.InstanceClosed: logschema.INSTANCE_CLOSED,
    protocol.InstanceGone: logschema.INSTANCE_GONE,
}


def note_event(log: EventLog, node: str, said: Any, now: float) -> None:
    """Of `Finished` and `SetTimer` there is no line: the controller writes ends."""
    if isinstance(said, events.Enter | events.Leave | events.Resumed):
        log.write(now, _OF_REQUEST[type(said)], node=node, request=said.work.id, instance=said.instance)
    elif isinstance(
        said, events.StartUnload | protocol.InstanceReady | protocol.InstanceClosed | protocol.InstanceGone
    ):
        log.write(now, _OF_INSTANCE[type(said)], node=node, instance=said.instance, model=said.model)
    elif isinstance(said, events.StartLoad):
        facts: dict[str, Any] = {"num_bytes": said.num_bytes, "due_s": said.due_s}
        log.write(now, logschema.LOAD, node=node, instance=said.instance, model=said.model, **facts)
    elif isinstance(said, events.StartResize):
        facts = {"old_bytes": said.old_bytes, "new_bytes": said.new_bytes}
        log.write(now, logschema.RESIZE, node=node, instance=said.instance, model=said.model, **facts)
    else:
        _note_notice(log, node, said, now)


def _note_notice(log: EventLog, node: str, said: Any, now: float) -> None:
    if isinstance(said, events.FirstToken):
        log.write(now, logschema.FIRST_TOKEN, request=said.work.id, node=node)
    elif isinstance(said, protocol.CaughtUp):
        log.write(now, logschema.CAUGHT_UP, node=node, request=said.request, instance=said.instance)
    elif isinstance(said, protocol.Evicted):
        place = {"request": said.request.id, "instance": said.instance}
        log.write(now, logschema.EVICTED, node=node, **place, reason=said.reason)
    elif isinstance(said, protocol.HandedOver):
        place = {"request": said.request.id, "instance": said.instance}
        log.write(now, logschema.HANDED_OVER, node=node, **place, kv_bytes=said.kv_bytes)
    elif isinstance(said, protocol.Overcommitted):
        place = {"request": said.request.id, "instance": said.instance}
        log.write(now, logschema.OVERCOMMITTED, node=node, **place, produced=said.request.produced)


def note_turn(log: EventLog, node: str, turn: events.Turn, now: float) -> None:
    told: dict[str, Any] = {"requests": [*(share.work.id for share in turn.prompts), *turn.decoding]}
    if any(share.start or not share.is_last for share in turn.prompts):
        told["tokens"] = [share.tokens for share in turn.prompts]
    event = logschema.PREFILL if turn.prompts else logschema.DECODE
    log.write(now, event, node=node, instance=turn.instance.id, **told)
