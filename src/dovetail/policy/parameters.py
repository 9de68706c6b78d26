"""Parameters of two strategies: whose iteration is next, and whether every request would still be in time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Shadow(StrEnum):
    PLAY = "play"  # S4 by playing the node's own turns
    CLOSED = "closed"  # S4 summed up in closed form, loading instances left out


class TurnOrder(StrEnum):
    DEADLINE = "deadline"  # S2: the shortest headroom runs
    DRAIN = "drain"  # while everyone has slack, the instance that will free its memory soonest runs


@dataclass(frozen=True, slots=True)
class TurnParameters:
    turn_order: TurnOrder = TurnOrder.DEADLINE
    slack_s: float = 4.0  # DRAIN: headroom below which deadline order rules
    guard_decodes: bool = False  # a prompt waits while it would make running requests of its model late
    # Prompts are computed in parts: a turn spent on them ends after about so long, and before running requests of any
    # model would be late. inf: a prompt is one turn.
    part_s: float = float("inf")
    pack_prompts: bool = False  # with part_s: several prompts of a model in one iteration where that saves time
    # With part_s: models that answer take turns, and between two parts of prompts each has one, whatever is due later.
    smooth_answers: bool = False
    # With smooth_answers, where late requests are served: a batch that would hold others' answers for long decodes some
    # rows at a time. Whoever did not ask for a pace goes slower for that.
    split_decodes: bool = False
    # With split_decodes, on CPUs: a long iteration stops between two layers and lets others' answers go on, which wait
    # for so many of their token times. inf: it does not stop.
    max_stall: float = float("inf")
    # With part_s, on GPUs: running requests of the model have a token in the same iteration; with smooth_answers, of
    # prompts that have time.
    mix_decodes: bool = False
    best_effort_s: float = 0.05  # about so long is a turn of best effort, for which whoever comes waits
    ride: float = 0.15  # an iteration may take so much longer by best effort that rides along
    reserve: float = 0.05  # of the time is best effort's in any case; 0 = it is strictly last
    max_silence_s: float = float("inf")  # within an answer: longer ones are no more admitted than late tokens


@dataclass(frozen=True, slots=True)
class AdmissionParameters:
    shadow: Shadow = Shadow.PLAY
    paced_from_first_token: bool = True  # a first token before its time gives later ones no more of it (mean TPOT)
    counts_growth: bool = True  # played: case 3 also for when contexts will have grown; who outgrows its node is moved
    slo_scale: float = 0.95  # the scheduler holds SLOs at this share of their value
    cpu_overestimate: float = 1.10  # S4: factor on predicted iterations
    gpu_overestimate: float = 1.05
