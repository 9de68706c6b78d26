"""Why a request was placed, queued, moved or dropped: its own events of a run, in words."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, TextIO

from dovetail.errors import ConfigError
from dovetail.eventlog import EventLog
from dovetail.policy.reasons import REASONS
from dovetail.sim.metrics import Fate, Result

HOW = {
    "join": "joined a running instance",
    "preempt": "joined a running instance after a smaller neighbour gave way",
    "start": "started a new instance",
}


class Explainer(EventLog):
    """An event log that keeps the events of one request, beside writing all of them where there is a file."""

    def __init__(self, request: int, file: TextIO | None = None) -> None:
        super().__init__(file or io.StringIO())
        self.request = request
        self.events: list[dict[str, Any]] = []
        self._is_written = file is not None

    def put(self, line: dict[str, Any]) -> None:
        if line.get("request") == self.request:
            self.events.append(line)
        if self._is_written:
            super().put(line)


def explain(explainer: Explainer, result: Result) -> str:
    """Raises ConfigError for a request that the run does not have."""
    if not 0 <= explainer.request < len(result.records):
        raise ConfigError(f"no request {explainer.request}: the run has 0 to {len(result.records) - 1}")
    record = result.records[explainer.request]
    start = record.arrival_s
    lines = [
        f"request {record.id}: model {record.model}, {record.input_tokens} tokens in, {record.output_tokens} out, "
        f"TTFT SLO {result.rule.ttft_s(record.input_tokens):.2f} s"
    ]
    lines += [f"  {event['t'] - start:+9.3f} s  {_sentence(event, start)}" for event in explainer.events]
    lines.append(f"  {_verdict(result, explainer.request)}")
    return "\n".join(lines)


def explain_log(path: Path, request: int) -> str:
    """The same from a stored log, of a simulation or of a real node. Raises ConfigError, OSError."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    events = [event for event in lines if event.get("request") == request]
    if not events:
        last = max((event["request"] for event in lines if isinstance(event.get("request"), int)), default=None)
        raise ConfigError(
            f"{path}: no request {request}; " + ("none at all" if last is None else f"the last is {last}")
        )
    start = events[0].get("at", events[0]["t"])
    return "\n".join(f"{event['t'] - start:+9.3f} s  {_sentence(event, start)}" for event in events)


def _sentence(event: dict[str, Any], start: float) -> str:
    kind = event["event"]
    if kind == "placed":
        return f"{HOW[event['how']]} on {event['node']} (instance {event['instance']})"
    if kind == "queued":
        reasons = [
            f"{REASONS[name].words if name in REASONS else name} ({count}×)"
            for name, count in sorted(event["refusals"].items())
        ]
        return "no place: " + ("; ".join(reasons) or "no candidate")
    if kind == "extended":
        return f"cannot be in time and is served late: its next token is due at {event['due_s'] - start:+.3f} s"
    if kind == "evicted":
        return f"lost its place on {event['node']}: {event['reason']}"
    if kind == "moving":
        return f"waits elsewhere ({event['reason']})"
    if kind == "first_token":
        return f"first token on {event['node']}"
    return f"{kind}" + (f": {event['reason']}" if event.get("reason") else "")


def _verdict(result: Result, request: int) -> str:
    record = result.records[request]
    if record.fate is not Fate.FINISHED:
        return f"SLO missed: {record.fate}"
    met = "met" if record.meets(result.rule) else "missed"
    grace = f" (grace {record.grace_s:.3f} s)" if record.grace_s else ""
    return f"SLO {met}: TTFT {record.ttft_s:.3f} s{grace}, TPOT {record.tpot_s:.3f} s, {record.late_tokens} late tokens"
