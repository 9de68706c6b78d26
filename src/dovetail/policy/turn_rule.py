"""The parameters by which the turns of a device are chosen, in execution and in admission (S2, S4)."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.policy.headroom import INFINITY


@dataclass(frozen=True, slots=True)
class TurnRule:
    """How the node chooses turns, as far as it is a matter of policy."""

    slack_s: float | None = None  # `choose_turn`
    max_silence_s: float = INFINITY  # within an answer: longer ones count as late
    turn_silence_s: float = INFINITY  # after which a running batch should have its turn
    guards_decodes: bool = False  # a prompt may let running requests of its model go first
    part_s: float = INFINITY  # prompts are computed in parts of about so long; INFINITY: whole
    packs_prompts: bool = False  # several of them in one iteration where that saves time
    # Running requests have a token in the iteration of a chunk that has time: played one after the other, which takes
    # longer.
    mixes_decodes: bool = False
    smooths_answers: bool = False  # models that answer take turns, see `policy.rounds`
    splits_decodes: bool = False  # and long iterations are of some rows: played whole, which nobody's turn is later for
    max_stall: float = INFINITY  # turns stop for others' answers: played without, and left out where that would be late
    best_effort_s: float = 0.05  # about so long is a turn of best effort, for which whoever comes waits
    ride: float = 0.15  # an iteration may take so much longer by best effort that rides along
    reserve: float = 0.05  # of the time is best effort's in any case; 0 = it is strictly last

    @property
    def in_rounds(self) -> bool:
        """Where several models have work. One alone has a rule of its own, which is not played."""
        return self.smooths_answers and self.part_s != INFINITY
