"""The simulated twin of a real node: its log says what the node was and what it was asked, the simulator runs the same.

A real log has the records of a simulated one. Its header holds the node's memory and policy, `hosting` lines its models
with their latency tables, and the requests are in it with their true lengths, so that nothing else is needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

from dovetail.errors import ConfigError
from dovetail.node.node import Node
from dovetail.policy.headroom import SloRule
from dovetail.policy.latency import Latency, TransferModel
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.sim.device import Device, Noise
from dovetail.sim.driver import Simulation
from dovetail.sim.metrics import Fate, Record, Result
from dovetail.sim.profile import latency_from
from dovetail.sim.replay import knobs_of
from dovetail.sim.trace import Arrival

FATES = {"finished": Fate.FINISHED, "failed": Fate.FAILED, "aborted": Fate.FINISHED}


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
    records = []
    for request, event in sorted(arrived.items(), key=lambda item: (item[1]["at"], item[0])):
        end = ended.get(request)
        if end is None or (end["event"] == "aborted" and request not in first):
            continue
        records.append(
            Record(
                id=len(records),
                model=models[event["model"]],
                arrival_s=event["at"] - start,
                input_tokens=event["input"],
                output_tokens=max(end["output"], 1),
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
    result = Result(log.header["knobs"]["name"], records, [], [log.header["node"]], records[-1].arrival_s)
    result.cold_starts = sum(event["event"] == "load" for event in log.events)
    return result


def simulate(log: RealLog, real: Result, seed: int = 0, noise: float = 0.05) -> Result:
    """The same requests on the same node in virtual time."""
    arrivals = [Arrival(r.arrival_s, r.model, r.input_tokens, r.output_tokens) for r in real.records]
    knobs = knobs_of(log.header["knobs"])
    node = Node(log.header["node"], DeviceKind.CPU, log.header["memory_bytes"], _hostings(log), knobs)
    outputs = {index: arrival.output_tokens for index, arrival in enumerate(arrivals)}
    transfer = TransferModel(load_bytes_per_s=float("inf"), load_fixed_s=_mean_load_s(log), unload_s=0.0)
    device = Device(node, outputs, transfer, Noise(Random(seed), noise))
    return Simulation([device], knobs, arrivals, rule=SloRule()).timed_run()


def side_by_side(real: Result, simulated: Result) -> list[dict[str, float | int | str]]:
    rows: list[dict[str, float | int | str]] = []
    for name, result in (("real", real), ("simulated", simulated)):
        summary = result.summary()
        rows.append(
            {
                "run": name,
                "requests": summary["requests"],
                "attainment": round(result.met() / len(result.records), 4),
                "ttft_p50_s": summary["ttft_p50_s"],
                "ttft_p95_s": summary["ttft_p95_s"],
                "tpot_p50_s": summary["tpot_p50_s"],
                "cold_starts": summary["cold_starts"],
            }
        )
    return rows


def _model_numbers(log: RealLog) -> dict[str, int]:
    names: dict[str, int] = {}
    for event in log.events:
        if event["event"] in ("hosting", "arrive"):
            names.setdefault(event["model"], len(names))
    return names


def _hostings(log: RealLog) -> dict[str, Hosting]:
    numbers = _model_numbers(log)
    hostings: dict[str, Hosting] = {}
    latest: dict[tuple[int, int], Latency] = {}
    known = {field.name for field in fields(Hosting)}
    for event in log.events:
        if event["event"] == "hosting":
            values = {key: value for key, value in event.items() if key in known}
            values["latency"] = latency_from(event["latency"]["prefill_ms"], event["latency"]["decode_ms"])
            if values["keep_alive_s"] is not None and values["keep_alive_s"] < 0:
                values["keep_alive_s"] = float("inf")
            hosting = hostings[str(numbers[event["model"]])] = Hosting(**values)
            latest[hosting.weight_bytes, hosting.kv_bytes_per_token] = hosting.latency
    # Models of one shape share what is learnt about it; the last line that was written knows most.
    hostings = {
        name: replace(one, latency=latest[one.weight_bytes, one.kv_bytes_per_token]) for name, one in hostings.items()
    }
    return hostings


def _mean_load_s(log: RealLog) -> float:
    """What one load takes by itself: a node makes one after another, and the simulator makes them wait as well."""
    started: dict[int, float] = {}
    times = []
    free_at = 0.0
    for event in log.events:
        if event["event"] == "load":
            started[event["instance"]] = event["t"]
        elif event["event"] == "instanceready" and event["instance"] in started:
            times.append(event["t"] - max(started.pop(event["instance"]), free_at))
            free_at = event["t"]
    return sum(times) / len(times) if times else 0.0
