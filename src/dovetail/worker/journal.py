"""What a real node writes down: the simulator's records, so that its tools read them. Without a file: nothing."""

from __future__ import annotations

from dataclasses import asdict

from dovetail.cluster.decisions import Decision
from dovetail.eventlog import EventLog
from dovetail.node import events
from dovetail.node.node import Node
from dovetail.policy.placement import Hosting
from dovetail.profiles.files import hosting_values
from dovetail.profiles.timings import TurnKind, TurnTimings
from dovetail.worker.piece import Piece

PACE_TURNS = 100  # that many from one line on the node's pace to the next


class Journal:
    def __init__(self, log: EventLog | None, node: str) -> None:
        self._log = log
        self._node = node
        self._pace = TurnTimings()

    def start(self, node: Node, device: str) -> None:
        """First line: what a simulation of the same node needs. Its models follow as they come."""
        if self._log is not None:
            ledger, knobs = node.residency.ledger, asdict(node.knobs)
            self._log.header(real=True, node=node.name, device=device, memory_bytes=ledger.capacity, knobs=knobs)

    def hosting(self, now: float, model: str, hosting: Hosting) -> None:
        if self._log is not None:
            self._log.write(now, "hosting", model=model, **hosting_values(hosting))

    def arrive(self, now: float, piece: Piece) -> None:
        if self._log is not None:
            work = piece.work
            self._log.write(
                now,
                "arrive",
                request=work.id,
                model=work.model,
                input=work.input_tokens,
                asked=piece.request.sampling.max_tokens,
                at=round(work.arrival_s, 6),
            )

    def decision(self, now: float, decision: Decision) -> None:
        if self._log is not None:
            self._log.decision(now, decision)

    def said(self, now: float, event: str, said: events.Command | events.Notice) -> None:
        if self._log is not None:
            self._log.said(now, self._node, event, said)

    def turn(self, now: float, kind: TurnKind, took_s: float, expected_s: float, gap_s: float) -> None:
        if self._log is not None:
            self._pace.add(kind, took_s, expected_s, gap_s)
            if self._pace.turns % PACE_TURNS == 0:
                self._log.write(now, "pace", **asdict(self._pace))

    def first_token(self, now: float, request: int) -> None:
        if self._log is not None:
            self._log.write(now, "first_token", request=request, node=self._node)

    def end(self, now: float, fate: str, piece: Piece) -> None:
        if self._log is not None:
            self._log.write(
                now,
                fate,
                request=piece.id,
                reason=piece.error,
                output=piece.sequence.num_generated,
                grace=round(piece.work.grace_s, 6),
                late=piece.work.late_tokens,
            )
