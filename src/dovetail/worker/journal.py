"""What a real node writes down: the simulator's records, so that its tools read them. Without a file: nothing."""

from __future__ import annotations

from dovetail.cluster.decisions import Decision
from dovetail.node import events
from dovetail.policy.placement import Hosting
from dovetail.sim.log import EventLog
from dovetail.worker.piece import Piece


class Journal:
    def __init__(self, log: EventLog | None, node: str) -> None:
        self._log = log
        self._node = node

    def hosting(self, now: float, model: str, hosting: Hosting) -> None:
        if self._log is not None:
            self._log.hosting(now, model, hosting)

    def arrive(self, now: float, piece: Piece) -> None:
        if self._log is not None:
            work = piece.work
            at = round(work.arrival_s, 6)
            self._log.write(now, "arrive", request=work.id, model=work.model, input=work.input_tokens, at=at)

    def decision(self, now: float, decision: Decision) -> None:
        if self._log is not None:
            self._log.decision(now, decision)

    def said(self, now: float, event: str, said: events.Command | events.Notice) -> None:
        if self._log is not None:
            self._log.said(now, self._node, event, said)

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
