"""One choice of one request on its way through the node: its tokens, and its work as the policies see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.node.work import Work
from dovetail.policy.headroom import SloRule
from dovetail.policy.latency import Latency
from dovetail.sched.sequence import Sequence, sequences_of
from dovetail.types import Request, ServiceClass

# Best effort: far enough to let everyone with targets go first, near enough that nobody waits forever.
BEST_EFFORT_TTFT_S = 300.0
BEST_EFFORT_TPOT_S = 60.0
SLACK = 1.5  # over what an otherwise empty device needs
RULE = SloRule()


@dataclass(eq=False)
class Piece:
    request: Request
    sequence: Sequence
    work: Work
    is_strict: bool  # its targets were asked for: it is refused rather than late
    instance: int | None = None  # where it has a place
    followers: list[Piece] = field(default_factory=list)  # choices that wait until the prompt is computed once
    refusals: dict[str, int] = field(default_factory=dict)  # why it got no place when it last tried
    error: str = ""  # what it was ended with

    @property
    def id(self) -> int:
        return self.work.id


def pieces_of(request: Request, first_id: int, arrival_s: float, slo_scale: float) -> list[Piece]:
    """A piece per open choice, the others following the first."""
    pieces = []
    for sequence in sequences_of(request, first_id):
        ttft_s = request.slo.ttft_s if request.slo.ttft_s is not None else RULE.ttft_s(len(request.prompt))
        tpot_s = request.slo.tpot_s if request.slo.tpot_s is not None else RULE.tpot_s
        work = Work(
            sequence.id,
            request.model,
            sequence.num_prompt,
            arrival_s,
            ttft_s * slo_scale,
            tpot_s * slo_scale,
            slo_scale,
        )
        work.produced = sequence.num_generated
        piece = Piece(request, sequence, work, is_strict=_has_targets(request))
        if request.service_class is ServiceClass.BEST_EFFORT:
            piece.is_strict = False
            work.ttft_s, work.tpot_s = BEST_EFFORT_TTFT_S, BEST_EFFORT_TPOT_S
            work.first_due_s = arrival_s + work.ttft_s
        pieces.append(piece)
    pieces[0].followers = pieces[1:]
    return pieces


def relax(piece: Piece, now: float, latency: Latency) -> None:
    """Its targets cannot be kept: twice the time, counted from now, and no less than the device needs. It stays behind
    those who are still in time and ahead of those who came later; one that is relaxed again and again gets everywhere.
    """
    work = piece.work
    piece.is_strict = False
    known = work.known_tokens
    work.ttft_s = max(2 * work.ttft_s, SLACK * latency.prefill_s(known))
    work.tpot_s = max(2 * work.tpot_s, SLACK * latency.decode_s(1, known))
    work.first_due_s = now + work.ttft_s - work.tpot_s * work.produced


def _has_targets(request: Request) -> bool:
    return request.slo.ttft_s is not None or request.slo.tpot_s is not None
