"""What is wrong with a running server, told from what it shows: one function a symptom, each with its section of
docs/guide/runbook.md. Reads records that were fetched before; fetches nothing, prints nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

RUNBOOK = "docs/guide/runbook.md"
SLOW_S = 10.0  # a first token after this is slow whatever the target; a bound of the histogram
SLOW_SHARE = 0.05  # of a model's requests, from which on it is worth a word
MANY_COLD = 0.2  # of a model's requests had to load it first
FULL = 0.95  # of a node's memory, or of a model's KV blocks
MIN_FREE_BYTES = 2 * 2**30
_REFUSED = ("503", "429")
_DAMAGE = ("is damaged", "checksum", "cannot be fetched again", "could not be replaced")
_DISK = ("no space left", "waiting for the disk", "too little room", "not enough room", "a log cannot be written")
_ENDED = (" ended with code ", " was killed", " is gone with its machine", "it is not started again")

Symptom = Literal["slow-first-token", "refusals", "memory", "nodes", "disk-full", "damage", "upgrade", "shutdown"]


class Sample(msgspec.Struct, frozen=True):
    """One line of /metrics."""

    name: str  # without the prefix
    labels: dict[str, str]
    value: float


class Look(msgspec.Struct, frozen=True):
    """What a server showed. Parts that it did not show are empty."""

    version: str  # this command's
    health: dict[str, Any]
    health_code: int
    server_version: str = ""
    ps: dict[str, Any] = {}
    nodes: tuple[dict[str, Any], ...] = ()
    models: tuple[dict[str, Any], ...] = ()
    pulls: tuple[dict[str, Any], ...] = ()
    config: dict[str, Any] = {}
    logs: tuple[dict[str, Any], ...] = ()
    samples: tuple[Sample, ...] = ()
    store_free_bytes: int | None = None  # None: of another machine

    def total(self, name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(one.value for one in self.samples if one.name == name and wanted <= one.labels.items())

    def by(self, name: str, label: str) -> dict[str, float]:
        found: Counter[str] = Counter()
        for one in self.samples:
            if one.name == name:
                found[one.labels.get(label, "")] += one.value  # type: ignore[assignment]
        return dict(found)

    def lines(self, words: tuple[str, ...], least: str = "warning") -> list[str]:
        """Of the log, newest last."""
        levels = ("info", "warning", "error", "critical")
        loud = levels[levels.index(least) :]
        said = [line for line in self.logs if line["level"] in loud]
        return [line["message"] for line in said if any(word in line["message"].lower() for word in words)]


class Finding(msgspec.Struct, frozen=True):
    symptom: Symptom
    is_urgent: bool  # requests fail because of it now
    seen: str
    do: str

    @property
    def section(self) -> str:
        return f"{RUNBOOK}#{self.symptom}"


def slow_first_token(look: Look) -> Iterator[Finding]:
    for model, count in look.by("time_to_first_token_seconds_count", "model_name").items():
        within = look.total("time_to_first_token_seconds_bucket", model_name=model, le=f"{SLOW_S}")
        slow = count - within
        if not count or slow / count < SLOW_SHARE:
            continue
        seen = f"{model}: {slow:.0f} of {count:.0f} first tokens came after more than {SLOW_S:g} s"
        loads, waiting = look.total("cold_starts_total", model_name=model), _waiting(look, model)
        if loads / count >= MANY_COLD:
            do = f"{loads:.0f} of them waited for the model to load: raise its keep_alive, or set preload: true"
        elif waiting:
            do = f"{waiting} requests wait for their first turn now: add a node, or lower server.max_queue"
        else:
            do = f"measure it while nothing else runs (`dovetail profile {model}`); if that is as slow, add a node"
        yield Finding("slow-first-token", False, seen, do)
    for state in look.models:
        share = state.get("attainment")
        if share is not None and share < 0.9 and state.get("requests", 0) >= 10:
            seen = f"{state['name']}: {share:.0%} of {state['requests']} requests met their targets"
            do = "set later targets (slo), add a node, or send fewer at once"
            yield Finding("slow-first-token", False, seen, do)


def _waiting(look: Look, model: str) -> int:
    return round(look.total("num_requests_waiting", model_name=model))


def refusals(look: Look) -> Iterator[Finding]:
    counted = (one for one in look.samples if one.name == "http_requests_total")
    answers = [one for one in counted if one.labels["path"].startswith("/v1/")]
    refused = sum(one.value for one in answers if one.labels["status"] in _REFUSED)
    total = sum(one.value for one in answers)
    if look.health_code == 503 and not look.ps.get("draining"):
        seen = f"/health is 503: {look.health.get('status', '')}"
        yield Finding("refusals", True, seen, "`dovetail nodes` says which node and why")
    if refused:
        codes = Counter(code for line in look.logs if (code := _code_of(line["message"])) is not None)
        told = ", ".join(f"{code} {count}" for code, count in codes.most_common(3))
        seen = f"{refused:.0f} of {total:.0f} requests under /v1 were refused (503 or 429){f': {told}' if told else ''}"
        yield Finding("refusals", False, seen, "error.code says why; each has its remedy in docs/reference/serving.md")


def _code_of(message: str) -> str | None:
    """Of a refused request's line in the log."""
    head = message.partition(",")[0].split()
    return head[2] if len(head) == 3 and head[1] in _REFUSED else None


def memory(look: Look) -> Iterator[Finding]:
    for node in look.ps.get("nodes", ()):
        budget, planned = node.get("memory_budget_bytes", 0), node.get("memory_planned_bytes", 0)
        if budget and planned / budget >= FULL:
            seen = f"{node['name']}: {planned / 2**30:.1f} of {budget / 2**30:.1f} GiB are taken"
            yield Finding("memory", False, seen, "raise the node's memory, shorten keep_alive, or add a node")
    for model, preempted in look.by("num_preemptions_total", "model_name").items():
        if preempted:
            seen = f"{model}: {preempted:.0f} answers lost their KV blocks and were computed again"
            do = "raise kv_cache or memory of the node, or set kv: int8"
            yield Finding("memory", False, seen, do)
    killed = look.lines(("was killed by signal 9",))
    if killed:
        do = "`dmesg | grep -i oom`: if it was the kernel, lower the nodes' memory and store.host_pool"
        yield Finding("memory", False, f"the log: {killed[-1]}", do)


def nodes(look: Look) -> Iterator[Finding]:
    starts = {node["name"]: node.get("starts", 1) for node in look.ps.get("nodes", ())}
    others = [node for node in look.nodes if node["state"] == "up"]
    for node in look.nodes:
        name, state = node["name"], node["state"]
        if state == "failed":
            do = "mend the setting or the driver that the reason names, then start the server again"
            yield Finding("nodes", not others, f"{name} failed: {node.get('problem') or 'see the log'}", do)
        elif state in ("down", "starting"):
            seen = f"{name} is {state}, started {starts.get(name, 1)} times"
            yield Finding("nodes", not others, seen, "wait for it; `dovetail logs --level warning` says why it ended")
        elif state in ("drained", "draining"):
            do = f"`dovetail leave {name} --undo` has it serve again"
            yield Finding("nodes", not others, f"{name} is {state}", do)
    failed = {node["name"] for node in look.nodes if node["state"] == "failed"}
    for name, exits in look.by("worker_exits_total", "node").items():
        if exits and name not in failed:
            ended = look.lines(_ENDED)
            seen = f"the worker of {name} ended {exits:.0f} times{f'; the log: {ended[-1]}' if ended else ''}"
            do = "signal 9 is mostly memory; for another code see the traceback on the server's standard error"
            yield Finding("nodes", False, seen, do)


def disk_full(look: Look) -> Iterator[Finding]:
    stuck = [pull for pull in look.pulls if any(word in _told(pull) for word in _DISK)]
    do = "`dovetail store gc --max-size SIZE`, or a larger disk for store.path; then pull again"
    for pull in stuck:
        yield Finding("disk-full", True, f"{pull['name']}: {pull.get('error') or pull['stage']}", do)
    lines = look.lines(_DISK)
    if lines and not stuck:
        yield Finding("disk-full", False, f"the log: {lines[-1]}", do)
    if look.store_free_bytes is not None and look.store_free_bytes < MIN_FREE_BYTES:
        seen = f"{look.store_free_bytes / 2**30:.1f} GiB are free where models are kept"
        yield Finding("disk-full", False, seen, do)


def _told(pull: dict[str, Any]) -> str:
    return f"{pull.get('stage')} {pull.get('error')}".lower()


def damage(look: Look) -> Iterator[Finding]:
    lines = look.lines(_DAMAGE)
    failed = [pull for pull in look.pulls if pull["state"] == "failed" and "checksum" in _told(pull)]
    if lines or failed:
        seen = f"the log: {lines[-1]}" if lines else f"{failed[-1]['name']}: {failed[-1]['error']}"
        do = "`dovetail store verify` on that machine names every damaged model and the pull that fetches it anew"
        yield Finding("damage", bool(failed), seen, do)


def upgrade(look: Look) -> Iterator[Finding]:
    if look.server_version and look.server_version != look.version:
        seen = f"the server is version {look.server_version}, this command {look.version}"
        yield Finding("upgrade", False, seen, "start the server anew with the version that is installed")
    problem = look.config.get("problem") or look.health.get("config_problem")
    if problem:
        do = "mend the file and send SIGHUP; until then the configuration of before is in force"
        yield Finding("upgrade", False, f"the file was refused: {problem}", do)
    if look.config.get("needs_restart"):
        keys = ", ".join(look.config["needs_restart"])
        yield Finding("upgrade", False, f"changed in the file and not in force: {keys}", "start the server again")


def shutdown(look: Look) -> Iterator[Finding]:
    if look.ps.get("draining") or look.health.get("status") == "draining":
        left = look.ps.get("unfinished")
        seen = "the server is shutting down" + (f", {left} answers are left" if left is not None else "")
        yield Finding("shutdown", True, seen, "send requests to another server; server.drain_timeout bounds the wait")


SYMPTOMS: tuple[Callable[[Look], Iterator[Finding]], ...] = (
    *(shutdown, refusals, nodes, slow_first_token),
    *(memory, disk_full, damage, upgrade),
)


def findings(look: Look) -> list[Finding]:
    """The urgent ones first."""
    found = [finding for symptom in SYMPTOMS for finding in symptom(look)]
    return sorted(found, key=lambda finding: not finding.is_urgent)
