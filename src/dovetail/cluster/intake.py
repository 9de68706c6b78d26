"""A request as it comes in, and the work that it makes: one for each open choice, with the deadlines of its class (S1).

The one place that says what targets mean: given ones, those of the rule, and those of best effort.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.cluster.open_requests import OpenChoice
from dovetail.cluster.request import RequestState
from dovetail.policy.headroom import SloRule

# Best effort: far enough to let everyone with targets go first, near enough that nobody waits forever.
BEST_EFFORT_TTFT_S = 300.0
BEST_EFFORT_TPOT_S = 60.0


@dataclass(frozen=True, slots=True)
class Submission:
    model: str
    input_tokens: int
    arrival_s: float  # at the socket: what happened since then counts
    produced: tuple[int, ...] = (0,)  # by open choice: the tokens that it has already, where it goes on after a loss
    ttft_s: float | None = None  # targets that were asked for; None = the rule's
    tpot_s: float | None = None
    is_best_effort: bool = False
    goes_first: bool = False  # before others that are waited for
    asked_tokens: int = 0  # longest answer of a choice; for the log
    adapter: str = ""  # name of the adapter on top of the model; empty = none
    choices: tuple[OpenChoice, ...] = ()  # their tokens, and their client; empty in a simulation

    @property
    def is_strict(self) -> bool:
        """Its targets were asked for: it is refused rather than late."""
        return not self.is_best_effort and (self.ttft_s is not None or self.tpot_s is not None)


def works_of(submission: Submission, first_id: int, now: float, rule: SloRule, slo_scale: float) -> list[RequestState]:
    """One for each open choice, in order."""
    works = [
        _work_of(submission, first_id + index, first_id, produced, now, rule, slo_scale)
        for index, produced in enumerate(submission.produced)
    ]
    for work, choice in zip(works, submission.choices, strict=False):  # in a simulation there are none
        work.choice = choice
    return works


def _work_of(
    submission: Submission, id: int, group: int, produced: int, now: float, rule: SloRule, slo_scale: float
) -> RequestState:
    ttft_s, tpot_s = submission.ttft_s, submission.tpot_s
    if submission.is_best_effort:
        ttft_s, tpot_s = BEST_EFFORT_TTFT_S, BEST_EFFORT_TPOT_S
    else:
        ttft_s = slo_scale * (rule.ttft_s(submission.input_tokens + produced) if ttft_s is None else ttft_s)
        tpot_s = slo_scale * (rule.tpot_s if tpot_s is None else tpot_s)
    work = RequestState(id, submission.model, submission.input_tokens, submission.arrival_s, ttft_s, tpot_s, slo_scale)
    work.group = group
    work.adapter = submission.adapter
    work.is_strict = submission.is_strict
    work.is_best_effort = submission.is_best_effort
    work.goes_first = submission.goes_first
    work.produced = produced
    if produced:  # its client waits in the middle of a text: the next token is as urgent as a first one
        work.first_due_s = now + ttft_s - tpot_s * produced
    return work
