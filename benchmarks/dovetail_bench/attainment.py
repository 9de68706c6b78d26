"""S1 from the client's side: which answers came in time, and the figures of a whole run.

Token i is due at arrival + TTFT + i · TPOT. A cold start may be given as grace, where the server says how long it took;
both counts are kept, because a client who waits does not care why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from dovetail.policy.headroom import SloRule
from dovetail_bench.load import Answer

RULE = SloRule()
Grace = Callable[[Answer], float]  # seconds that this answer may be later


def no_grace(_: Answer) -> float:
    return 0.0


class Figures(msgspec.Struct, frozen=True):
    """One run. Latencies are of finished requests."""

    requests: int
    finished: int
    refused: int  # 503 and 429
    errors: int
    attained: int  # every token in time, cold or not
    attained_with_grace: int  # the time that a model took to load not counted
    attainment: float
    attainment_with_grace: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float  # mean of each request, after its first token
    tpot_p99_s: float
    first_ttft_p50_s: float  # of the first request of each model, which starts it
    first_ttft_max_s: float
    starts: int  # answered requests whose model nobody had asked for during the keep-alive
    start_ttft_p50_s: float  # of those
    start_ttft_max_s: float
    tokens: int
    seconds: float  # first arrival to last end
    attained_per_core_minute: float


def token_times(answer: Answer) -> list[float]:
    """When each token came. Where there were fewer pieces of text than tokens, they are spread over the pieces."""
    pieces, tokens = len(answer.text_s), max(answer.num_tokens, len(answer.text_s))
    return [answer.text_s[index * pieces // tokens] for index in range(tokens)]


def meets(answer: Answer, rule: SloRule = RULE, grace_s: float = 0.0) -> bool:
    if not answer.is_finished:
        return False
    first_due = answer.arrival_s + rule.ttft_s(answer.input_tokens) + grace_s
    return all(at <= first_due + index * rule.tpot_s for index, at in enumerate(token_times(answer)))


def ttft_s(answer: Answer) -> float:
    return answer.text_s[0] - answer.arrival_s


def tpot_s(answer: Answer) -> float | None:
    tokens = max(answer.num_tokens, len(answer.text_s))
    return (answer.text_s[-1] - answer.text_s[0]) / (tokens - 1) if tokens > 1 else None


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)] if ranked else 0.0


def first_ttfts(answers: Sequence[Answer]) -> list[float]:
    """Of the first request of each model, if it was answered."""
    first: dict[str, Answer] = {}
    for answer in sorted(answers, key=lambda one: one.arrival_s):
        first.setdefault(answer.model, answer)
    return [ttft_s(answer) for answer in first.values() if answer.is_finished]


def start_ttfts(answers: Sequence[Answer], keep_alive_s: float) -> list[float]:
    """Of requests whose model nobody has asked for during the keep-alive, as far as they were answered: a server that
    scales to zero has to start it. The same requests for every server, whatever it keeps."""
    found: list[float] = []
    asked_s: dict[str, float] = {}
    for answer in sorted(answers, key=lambda one: one.arrival_s):
        is_start = answer.arrival_s - asked_s.get(answer.model, -math.inf) > keep_alive_s
        asked_s[answer.model] = answer.arrival_s
        if is_start and answer.is_finished:
            found.append(ttft_s(answer))
    return found


def summarise(
    answers: Sequence[Answer],
    cores: int,
    grace: Grace = no_grace,
    rule: SloRule = RULE,
    *,
    keep_alive_s: float = math.inf,
) -> Figures:
    finished = [answer for answer in answers if answer.is_finished]
    refused = sum(answer.is_refused for answer in answers)
    attained = sum(meets(answer, rule) for answer in answers)
    graced = sum(meets(answer, rule, grace(answer)) for answer in answers)
    ttfts = [ttft_s(answer) for answer in finished]
    tpots = [pace for answer in finished if (pace := tpot_s(answer)) is not None]
    firsts, starts = first_ttfts(answers), start_ttfts(answers, keep_alive_s)
    first = min((answer.arrival_s for answer in answers), default=0.0)
    seconds = max((answer.end_s for answer in answers), default=0.0) - first
    count = max(len(answers), 1)
    return Figures(
        requests=len(answers),
        finished=len(finished),
        refused=refused,
        errors=len(answers) - len(finished) - refused,
        attained=attained,
        attained_with_grace=graced,
        attainment=attained / count,
        attainment_with_grace=graced / count,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p99_s=percentile(ttfts, 0.99),
        tpot_p50_s=percentile(tpots, 0.5),
        tpot_p99_s=percentile(tpots, 0.99),
        first_ttft_p50_s=percentile(firsts, 0.5),
        first_ttft_max_s=max(firsts, default=0.0),
        starts=len(starts),
        start_ttft_p50_s=percentile(starts, 0.5),
        start_ttft_max_s=max(starts, default=0.0),
        tokens=sum(answer.num_tokens for answer in answers),
        seconds=seconds,
        attained_per_core_minute=attained / cores / max(seconds / 60, 1e-9),
    )
