"""What rounds of measurements mean: medians, spreads, and how often faster one engine is than the best of its peers.

Arithmetic only. In every round each engine was measured once on each cell, within seconds of the others; so engines are
compared round by round, and the median of those ratios is what counts. A neighbour that slows a round slows all of it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from dovetail.errors import ConfigError

OURS = "dovetail"
ALL = "all"
ContenderT = TypeVar("ContenderT")
_METRIC = re.compile(r"(ttft|tpot)-?(\d+)")


class Metric(msgspec.Struct, frozen=True):
    kind: str  # ttft: the first token of a prompt; tpot: one more token for every sequence of a batch
    size: int  # tokens of the prompt, or sequences

    def __str__(self) -> str:
        return f"{self.kind}{self.size}"

    @property
    def name(self) -> str:
        """Without the batch, which has a field of its own."""
        return str(self) if self.kind == "ttft" else self.kind

    @property
    def batch(self) -> int:
        return 1 if self.kind == "ttft" else self.size


def parse_metrics(text: str) -> tuple[Metric, ...]:
    metrics = []
    for word in text.split(","):
        found = _METRIC.fullmatch(word.strip())
        if found is None or int(found[2]) == 0:
            raise ConfigError(f"--metrics: {word!r} is not as in ttft128 (tokens of a prompt) or tpot8 (sequences)")
        metrics.append(Metric(found[1], int(found[2])))
    return tuple(metrics)


class Cell(msgspec.Struct, frozen=True):
    """What is comparable."""

    model: str
    precision: str  # class: 16/32-bit (bf16 where the processor has instructions for it), 8-bit, 4-bit
    metric: Metric


class Row(msgspec.Struct, frozen=True):
    """One engine on one cell, as it is printed and written."""

    engine: str
    model: str
    precision: str
    metric: str  # ttft128, ttft1024, tpot
    batch: int
    median_ms: float
    spread_ms: float  # slowest minus fastest round
    ratio_to_best_peer: float | None  # times as fast as the best peer, median over rounds; None = no peer was measured
    ratio_low: float | None  # quartiles of the same
    ratio_high: float | None
    roofline: float | None  # the shortest possible time as a share of the median
    weights: str  # the type that the engine holds most of them in
    rounds: int
    best_peer: str | None
    native_share: float | None = None  # of the time inside native code, median over rounds; None = it cannot tell


Rounds = Mapping[str, Sequence[float]]  # engine -> a number of each round (ms, mostly), in the same order for all


def fold(
    cell: Cell,
    rounds: Rounds,
    weights: Mapping[str, str],
    least_ms: Mapping[str, float],
    native: Rounds | None = None,
) -> list[Row]:
    """Of one cell, the fastest engine first. `native`: shares of the rounds of who told them."""
    assert len({len(each) for each in rounds.values()}) <= 1, "every engine took part in every round"
    medians = {engine: statistics.median(each) for engine, each in rounds.items()}
    peers = [engine for engine in medians if engine != OURS]
    best = min(peers, key=lambda engine: medians[engine]) if peers else None
    rows = []
    for engine in sorted(medians, key=lambda engine: medians[engine]):
        mine = rounds[engine]
        ratio, low, high = paired(rounds[best], mine) if best is not None else (None, None, None)
        least, shares = least_ms.get(engine), (native or {}).get(engine)
        rows.append(
            Row(
                engine,
                cell.model,
                cell.precision,
                cell.metric.name,
                cell.metric.batch,
                medians[engine],
                max(mine) - min(mine),
                ratio,
                low,
                high,
                least / medians[engine] if least is not None else None,
                weights[engine],
                len(mine),
                best,
                statistics.median(shares) if shares else None,
            )
        )
    return rows


def paired(reference: Sequence[float], mine: Sequence[float]) -> tuple[float, float, float]:
    """Times as fast as the reference, round by round: the median and the quartiles."""
    ratios = sorted(theirs / ours for theirs, ours in zip(reference, mine, strict=True))
    if len(ratios) == 1:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def shifted(contenders: Sequence[ContenderT], turn: int) -> list[ContenderT]:
    """The order of one round: each contender is as often first, and as often behind each other one."""
    shift = turn % max(len(contenders), 1)
    return [*contenders[shift:], *contenders[:shift]]


class Mean(msgspec.Struct, frozen=True):
    """Of one engine's ratios to the best peer, over all cells of a class of precision, or of all."""

    engine: str
    precision: str  # "all" = every class
    ratio: float  # geometric mean
    cells: int


def means(rows: Sequence[Row], engine: str = OURS) -> list[Mean]:
    """By class, then in all. Cells without a peer do not count."""
    ratios = [(row.precision, row.ratio_to_best_peer) for row in rows if row.engine == engine]
    classes = dict.fromkeys(precision for precision, ratio in ratios if ratio is not None)
    found = []
    for name in (*classes, ALL):
        those = [ratio for precision, ratio in ratios if ratio is not None and name in (precision, ALL)]
        if those:
            found.append(Mean(engine, name, statistics.geometric_mean(those), len(those)))
    return found


def agreement(tokens: Mapping[int, int], others: Mapping[int, int]) -> float | None:
    """The share of prompts that both answered with the same first token: engines that are given the same model and the
    same prompts differ only by rounding."""
    both = tokens.keys() & others.keys()
    return sum(tokens[prompt] == others[prompt] for prompt in both) / len(both) if both else None
