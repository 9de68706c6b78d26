"""The event log against its written schema: every line of many runs has the fields that `logschema` names, in order."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from driver_builders import Rig
from sim_builders import make_node
from test_runtime_parity import Worker, crowd

from dovetail.cluster.intake import Submission
from dovetail.cluster.local import LocalCluster
from dovetail.cluster.retry import RetryRule
from dovetail.errors import WorkerLost
from dovetail.eventlog import EventLog
from dovetail.logschema import EVENTS, PLACED, RESIZE, Event, Form
from dovetail.sim.compositions import SLINFER
from dovetail.sim.storm import run_one

Line = dict[str, Any]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_moves(value: object) -> bool:
    return isinstance(value, list) and all(
        len(move) == 3
        and _is_int(move[0])
        and isinstance(move[1], list)
        and all(_is_int(request) for request in move[1])
        and (move[2] is None or isinstance(move[2], str))
        for move in value
    )


FITS: dict[Form, Callable[[Any], bool]] = {
    Form.INT: _is_int,
    Form.TEXT: lambda value: isinstance(value, str),
    Form.FLAG: lambda value: isinstance(value, bool),
    Form.SECONDS: lambda value: _is_number(value) and value == round(value, 6),
    Form.NUMBER: _is_number,
    Form.INTS: lambda value: isinstance(value, list) and all(_is_int(one) for one in value),
    Form.COUNTS: lambda value: isinstance(value, dict) and all(_is_int(one) for one in value.values()),
    Form.SUMS: lambda value: isinstance(value, dict) and all(_is_number(one) for one in value.values()),
    Form.MOVES: _is_moves,
    Form.TABLE: lambda value: isinstance(value, dict) and value.keys() == {"prefill_ms", "decode_ms"},
}


def event_of(line: Line) -> Event:
    """The event whose name and fields the line has, in this order."""
    names = [name for name in line if name not in ("t", "event")]
    assert list(line)[:2] == ["t", "event"], line
    for event in EVENTS:
        wanted = [one.name for one in event.fields if one.name in line or not one.may_miss]
        if event.name == line["event"] and names == wanted:
            return event
    raise AssertionError(f"no event of the schema is {line['event']!r} with {names}")


def check(line: Line) -> Event:
    event = event_of(line)
    assert line["t"] == round(line["t"], 6)
    for one in event.fields:
        value = line.get(one.name)
        if one.name in line:
            fits = one.may_be_null if value is None else FITS[one.form](value)
            assert fits, f"{event.name}.{one.name}: {value!r} is no {one.form}"
    return event


def lines_of(text: str) -> list[Line]:
    return [json.loads(line) for line in text.splitlines()]


def storm(seed: int, *, of_server: bool = False, is_detailed: bool = True) -> list[Line]:
    file = io.StringIO()
    run_one(seed, of_server=of_server, log=EventLog(file, is_detailed=is_detailed))
    return lines_of(file.getvalue())


# Storms that are short, and have every event of the controller and the nodes between them.
NAMED = (2, 5, 7)
SERVER = (1, 3, 11)


def rest() -> list[Line]:
    """What these storms may lack: a node that is told a model, a client that goes away, and a worker whose death ends a
    request."""
    file = io.StringIO()
    cluster = LocalCluster([make_node()], SLINFER, log=EventLog(file))
    cluster.nodes[0].offer("a", 0.0)
    cluster.cancel(cluster.submit(Submission("a", 100, 0.0), 0.0), 1.0)
    rig = Rig("a", log=EventLog(file))
    rig.submit("r")
    rig.controller.retries.rule = RetryRule(max_attempts=0)
    rig.link.cluster.lost("node", rig.clock.now, WorkerLost("it died"))
    assert rig.link.listener.failed
    assert not rig.link.listener.num_resumed
    return [line for line in lines_of(file.getvalue()) if "event" in line]


def test_every_line_of_detailed_logs_is_an_event_of_the_schema_and_every_event_occurs() -> None:
    seen: Counter[Event] = Counter()
    for seed in NAMED:
        seen.update(check(line) for line in storm(seed))
    for seed in SERVER:
        seen.update(check(line) for line in storm(seed, of_server=True))
    seen.update(check(line) for line in lines_of(Worker(crowd()).run()))
    seen.update(check(line) for line in rest())
    assert not [event.name for event in EVENTS if not seen[event]]


def test_a_plain_log_has_no_event_of_a_detailed_one() -> None:
    detailed, plain = storm(5), storm(5, is_detailed=False)
    assert plain == [line for line in detailed if not event_of(line).is_detailed]
    assert len(plain) < len(detailed)


def test_a_field_that_is_missing_or_unknown_to_the_schema_is_an_error() -> None:
    log = EventLog(io.StringIO())
    with pytest.raises(AssertionError, match="placed: no how"):
        log.write(0.0, PLACED, request=1, node="n", instance=1)
    with pytest.raises(AssertionError, match=r"resize: .*why"):
        log.write(0.0, RESIZE, node="n", instance=1, model="m", old_bytes=0, new_bytes=1, why="")


def test_a_line_is_in_the_order_of_the_schema_whatever_the_order_of_the_call() -> None:
    file = io.StringIO()
    EventLog(file).write(1.0000004, PLACED, how="join", instance=3, node="n", request=7)
    assert file.getvalue() == '{"t": 1.0, "event": "placed", "request": 7, "node": "n", "instance": 3, "how": "join"}\n'


def test_every_name_stands_for_one_event_or_differs_by_its_fields() -> None:
    forms = [(event.name, *(one.name for one in event.fields)) for event in EVENTS]
    assert len(set(forms)) == len(forms)
    assert all(one.meaning for event in EVENTS for one in (event, *event.fields))
