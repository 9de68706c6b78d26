"""The log of a real node: what it was, what it was asked, and what became of that.

A real log has the records of a simulated one. Its header holds the node's memory and policy, `hosting` lines its models
with their latency tables, `pace` lines what turns took beside those; the requests are in it with their true lengths.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.policy.headroom import INFINITY
from dovetail.policy.placement import Hosting
from dovetail.profiles.files import latency_from
from dovetail.profiles.live import LiveLatency
from dovetail.profiles.timings import TurnTimings
from dovetail.sim.metrics import Fate, Record, Result
from dovetail.sim.trace import Arrival

FATES = {"finished": Fate.FINISHED, "failed": Fate.FAILED, "refused": Fate.DROPPED, "aborted": Fate.FINISHED}


@dataclass
class RealLog:
    path: Path
    header: dict[str, Any]
    events: list[dict[str, Any]]


def is_real(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and bool(first.get("real"))


def read_real(path: Path) -> RealLog:
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}: line {number}: not JSON: {error}") from error
    if not lines or not lines[0].get("real"):
        raise ConfigError(f"{path}: line 1: not the header of a real node's log")
    return RealLog(path, lines[0], lines[1:])


def real_result(log: RealLog) -> Result:
    """What really happened, as a simulation would report it. Requests are numbered by arrival; one whose end is not in
    the log is left out, and so is one whose client left before its first token."""
    models = _model_numbers(log)
    arrived = {e["request"]: e for e in log.events if e["event"] == "arrive"}
    first = {e["request"]: e["t"] for e in log.events if e["event"] == "first_token"}
    ended = {e["request"]: e for e in log.events if e["event"] in FATES}
    start = min((event["at"] for event in arrived.values()), default=0.0)
    usual = _share_of_asked(arrived, ended)
    records: list[Record] = []
    numbers = []
    for request, event in sorted(arrived.items(), key=lambda item: (item[1]["at"], item[0])):
        end = ended.get(request)
        if end is None or (end["event"] == "aborted" and request not in first):
            continue
        numbers.append(request)
        is_unserved = end["event"] in ("failed", "refused")
        records.append(
            Record(
                id=len(records),
                model=models[event["model"]],
                arrival_s=event["at"] - start,
                input_tokens=event["input"],
                output_tokens=max(round(event.get("asked", 1) * usual if is_unserved else end["output"]), 1),
                fate=FATES[end["event"]],
                reason=end["reason"],
                first_token_s=first[request] - start if request in first else None,
                end_s=end["t"] - start,
                grace_s=end["grace"],
                late_tokens=end["late"],
            )
        )
    if not records:
        raise ConfigError(f"{log.path}: no request has ended in it")
    result = Result(log.header["composition"]["name"], records, [], [log.header["node"]], records[-1].arrival_s)
    result.numbers = numbers
    result.cold_starts = sum(event["event"] == "load" for event in log.events)
    return result


def arrivals(log: RealLog, real: Result) -> list[Arrival]:
    """The requests of the records as they came in, with the targets that they asked for."""
    asked = {event["request"]: event for event in log.events if event["event"] == "arrive"}
    found = []
    for record in real.records:
        event = asked[real.numbers[record.id]]
        arrival = Arrival(record.arrival_s, record.model, record.input_tokens, record.output_tokens)
        arrival = arrival._replace(ttft_s=event.get("ttft_s"), tpot_s=event.get("tpot_s"))
        best_effort, first = event.get("best_effort", False), event.get("goes_first", False)
        found.append(arrival._replace(is_best_effort=best_effort, goes_first=first))
    return found


def hostings(log: RealLog) -> dict[str, Hosting]:
    """The models by their numbers, each as its last line has it. Those of one shape share what they learn about it, and
    begin with what was known before the node had learnt anything."""
    numbers = _model_numbers(log)
    known = {field.name for field in fields(Hosting)}
    live: dict[tuple[int, int], LiveLatency] = {}
    found: dict[str, Hosting] = {}
    for event in log.events:
        if event["event"] == "hosting":
            values = {key: value for key, value in event.items() if key in known}
            shape = event["weight_bytes"], event["kv_bytes_per_token"]
            if shape not in live:
                table = event["latency"]
                live[shape] = LiveLatency(latency_from(table["prefill_ms"], table["decode_ms"]))
            values["latency"] = live[shape]
            if values["keep_alive_s"] is not None and values["keep_alive_s"] < 0:
                values["keep_alive_s"] = INFINITY
            found[str(numbers[event["model"]])] = Hosting(**values)
    return found


def timings(log: RealLog) -> TurnTimings:
    known = {field.name for field in fields(TurnTimings)}
    last: dict[str, Any] = next((event for event in reversed(log.events) if event["event"] == "pace"), {})
    return TurnTimings(**{key: value for key, value in last.items() if key in known})


def load_times_s(log: RealLog) -> dict[bool, list[float]]:
    """What each load took by itself, by whether the node had something to compute when it began. A node makes one after
    another, and the simulator makes them wait as well."""
    times: dict[bool, list[float]] = {False: [], True: []}
    began: dict[int, tuple[float, bool]] = {}
    ready: set[int] = set()
    place: dict[int, int] = {}  # of requests that have not ended: their instance
    free_at = 0.0
    for event in log.events:
        match event["event"]:
            case "placed":
                place[event["request"]] = event["instance"]
            case "finished" | "failed" | "refused" | "aborted":
                place.pop(event["request"], None)
            case "load":
                began[event["instance"]] = event["t"], not ready.isdisjoint(place.values())
            case "instanceready" if event["instance"] in began:
                asked_s, is_busy = began.pop(event["instance"])
                times[is_busy].append(event["t"] - max(asked_s, free_at))
                free_at = event["t"]
                ready.add(event["instance"])
    return times


def _model_numbers(log: RealLog) -> dict[str, int]:
    names: dict[str, int] = {}
    for event in log.events:
        if event["event"] in ("hosting", "arrive"):
            names.setdefault(event["model"], len(names))
    return names


def _share_of_asked(arrived: dict[int, dict[str, Any]], ended: dict[int, dict[str, Any]]) -> float:
    """How much of the length that they asked for finished requests came to: refused ones would have, too."""
    finished = [request for request in arrived if request in ended and ended[request]["event"] == "finished"]
    asked = sum(arrived[request].get("asked", 0) for request in finished)  # older logs do not say
    return sum(ended[request]["output"] for request in finished) / asked if asked else 1.0
