"""The controller's lines in the event log: what each of its decisions is written as."""

from __future__ import annotations

from typing import Any

from dovetail import logschema
from dovetail.cluster.decisions import Decision, Displace, Extended, Migrated, Moving, Placed, Queued, RequestRejected
from dovetail.cluster.intake import Submission
from dovetail.eventlog import EventLog
from dovetail.policy.work import Work


def note_arrival(log: EventLog, submission: Submission, work: Work, now: float) -> None:
    facts: dict[str, Any] = {"input": work.input_tokens, "at": work.arrival_s}
    if submission.asked_tokens:
        facts["asked"] = submission.asked_tokens
    if submission.adapter:
        facts["adapter"] = submission.adapter
    if submission.goes_first:
        facts["goes_first"] = True
    if submission.is_best_effort:
        facts["best_effort"] = True
    elif submission.is_strict:
        facts["ttft_s"], facts["tpot_s"] = submission.ttft_s, submission.tpot_s
    log.write(now, logschema.ARRIVE, request=work.id, model=work.model, **facts)


def note_end(log: EventLog, work: Work, fate: str, reason: str, now: float) -> None:
    facts = {"output": work.produced, "grace": work.grace_s, "late": work.late_tokens}
    log.write(now, logschema.ENDS[fate], request=work.id, reason=reason, **facts)


def note_decision(log: EventLog, decision: Decision, now: float) -> None:
    """Of `Warmed`, which nobody asked for, there is no line."""
    if isinstance(decision, Placed):
        place = {"node": decision.node.name, "instance": decision.instance}
        log.write(now, logschema.PLACED, request=decision.work.id, **place, how=decision.how)
    elif isinstance(decision, Queued):
        log.write(now, logschema.QUEUED, request=decision.work.id, refusals=decision.refusals)
    elif isinstance(decision, Extended):
        log.write(now, logschema.EXTENDED, request=decision.work.id, due_s=decision.due_s)
    elif isinstance(decision, RequestRejected):
        why = {"reason": decision.reason, "refusals": decision.refusals, "retry_after_s": decision.retry_after_s}
        log.write(now, logschema.REFUSED, request=decision.work.id, **why)
    elif isinstance(decision, Moving):
        until = {"retry_at_s": decision.retry_at_s, "reason": decision.reason}
        log.write(now, logschema.MOVING, request=decision.work.id, **until)
    elif isinstance(decision, Migrated):
        _note_migrated(log, decision, now)
    elif isinstance(decision, Displace):
        where = {"node": decision.node.name, "start_s": decision.start_s, "moves": decision.moves}
        log.write(now, logschema.DISPLACE, request=decision.work.id, **where)


def _note_migrated(log: EventLog, decision: Migrated, now: float) -> None:
    log.write(
        now,
        logschema.MIGRATED,
        request=decision.work.id,
        node=decision.node.name,
        instance=decision.instance,
        source=decision.source,
        rounds=decision.rounds,
        gap=decision.gap,
        produced=decision.produced,
        reason=decision.reason,
    )
