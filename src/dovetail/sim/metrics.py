"""What became of every request, how full the nodes were, and the summary that `dovetail sim run --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dovetail.policy.headroom import SloRule


class Fate(StrEnum):
    """Every request ends in exactly one of these."""

    FINISHED = "finished"
    DROPPED = "dropped"  # no place before its token was due
    REJECTED = "rejected"  # nothing here can ever serve it
    FAILED = "failed"  # it was running and could not be saved
    ABORTED = "aborted"  # its client went away


@dataclass(slots=True)
class Record:
    """One request's story."""

    id: int
    model: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    fate: Fate | None = None
    reason: str = ""
    first_token_s: float | None = None
    end_s: float = 0.0
    grace_s: float = 0.0
    late_tokens: int = 0
    silence_s: float = 0.0  # the longest time between two of its tokens
    moves: int = 0
    on_gpu: bool = False
    started_s: float | None = None  # when its model was there and had a place for it
    paused_s: float = 0.0  # that its answer was interrupted by preemptions and moves, recomputation included
    is_best_effort: bool = False
    goes_first: bool = False

    @property
    def ttft_s(self) -> float:
        assert self.first_token_s is not None
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        assert self.first_token_s is not None
        return (self.end_s - self.first_token_s) / max(self.output_tokens - 1, 1)

    def startup_s(self, timeout_s: float) -> float:
        """As ServerlessLLM counts it: until the model is there, and interruptions on top. Without a start: the time
        after which its client gives up."""
        if self.started_s is None:
            return timeout_s
        return self.started_s - self.arrival_s + self.paused_s

    def meets(self, rule: SloRule) -> bool:
        """TTFT within the SLO plus grace, and mean TPOT within the SLO."""
        if self.fate is not Fate.FINISHED:
            return False
        return self.ttft_s <= rule.ttft_s(self.input_tokens) + self.grace_s and self.tpot_s <= rule.tpot_s

    def meets_without_grace(self, rule: SloRule) -> bool:
        """As its user sees it: a cold start excuses nothing."""
        return self.meets(rule) and self.ttft_s <= rule.ttft_s(self.input_tokens)

    def is_broken_promise(self, rule: SloRule) -> bool:
        """A node accepted it, and it was late or broke off all the same."""
        was_accepted = self.first_token_s is not None or self.moves > 0
        return was_accepted and not self.meets(rule)

    def meets_strictly(self, rule: SloRule) -> bool:
        """Every token by its own deadline."""
        return self.meets(rule) and self.late_tokens == 0


@dataclass(slots=True)
class Sample:
    """The state of the nodes at one second."""

    time_s: float
    cpu_nodes: int  # in use
    gpu_nodes: int
    queued: int
    gpu_memory: float  # share planned, mean over GPU nodes in use
    kv_used: float  # share of committed KV that holds tokens, mean over GPU instances
    batches: list[int]  # of every instance
    holders: list[dict[str, float]]  # per node: resident model → seconds of turns since the last sample


@dataclass
class Result:
    policy: str
    records: list[Record]
    samples: list[Sample]
    node_names: list[str]
    horizon_s: float
    cold_starts: int = 0
    resizes: int = 0
    resize_s: float = 0.0  # GPU instances, the first allocation and the release included
    gpu_instance_s: float = 0.0  # sum of their lives, to the second
    decode_turns: int = 0
    decode_tokens: int = 0
    events: int = 0
    wall_s: float = 0.0
    runs: int = 1  # that are counted as one
    rule: SloRule = field(default_factory=SloRule)
    numbers: list[int] = field(default_factory=list)  # of a real run: by record, the number that the node gave it

    @property
    def waited_for(self) -> list[Record]:
        """All but best effort, which has no targets."""
        return [record for record in self.records if not record.is_best_effort]

    @property
    def best_effort(self) -> list[Record]:
        return [record for record in self.records if record.is_best_effort]

    @property
    def priority(self) -> list[Record]:
        return [record for record in self.records if record.goes_first]

    def best_effort_tokens(self) -> int:
        """Of answers that ended before the last arrivals."""
        ended = [one for one in self.best_effort if one.fate is Fate.FINISHED and one.end_s <= self.horizon_s]
        return sum(record.output_tokens for record in ended)

    def met(self) -> int:
        return sum(record.meets(self.rule) for record in self.waited_for)

    def met_strictly(self) -> int:
        return sum(record.meets_strictly(self.rule) for record in self.waited_for)

    def met_without_grace(self) -> int:
        return sum(record.meets_without_grace(self.rule) for record in self.waited_for)

    def broken_promises(self) -> int:
        return sum(record.is_broken_promise(self.rule) for record in self.waited_for)

    def broken_answers(self) -> int:
        """Answers that began and broke off."""
        return sum(record.fate is not Fate.FINISHED and record.first_token_s is not None for record in self.waited_for)

    def silences(self) -> list[float]:
        """The longest silence within each answer that has at least two tokens, rising."""
        begun = (record for record in self.waited_for if record.first_token_s is not None and record.output_tokens > 1)
        return sorted(record.silence_s for record in begun)

    def resize_share(self) -> float:
        """Share of their lives that GPU instances spend resizing (S6)."""
        return self.resize_s / self.gpu_instance_s if self.gpu_instance_s else 0.0

    def count(self, fate: Fate) -> int:
        return sum(record.fate is fate for record in self.waited_for)

    def summary(self) -> dict[str, float | int | str]:
        ttfts = sorted(record.ttft_s for record in self.waited_for if record.first_token_s is not None)
        tpots = sorted(record.tpot_s for record in self.waited_for if record.fate is Fate.FINISHED)
        silences = self.silences()
        in_run = [sample for sample in self.samples if sample.time_s < self.horizon_s] or self.samples
        return {
            "policy": self.policy,
            "requests": len(self.waited_for),
            "slo_met": self.met(),
            "slo_met_strict": self.met_strictly(),
            "slo_met_without_grace": self.met_without_grace(),
            "broken_promises": self.broken_promises(),
            "broken_answers": self.broken_answers(),
            "silence_p50_s": round(percentile(silences, 0.50), 3),
            "silence_p99_s": round(percentile(silences, 0.99), 3),
            "silence_max_s": round(percentile(silences, 1.0), 3),
            "dropped": self.count(Fate.DROPPED),
            "rejected": self.count(Fate.REJECTED),
            "failed": self.count(Fate.FAILED),
            "cpu_nodes_mean": round(mean([sample.cpu_nodes for sample in in_run]), 3),
            "gpu_nodes_mean": round(mean([sample.gpu_nodes for sample in in_run]), 3),
            "ttft_p50_s": round(percentile(ttfts, 0.50), 4),
            "ttft_p95_s": round(percentile(ttfts, 0.95), 4),
            "tpot_p50_s": round(percentile(tpots, 0.50), 4),
            "cold_starts": self.cold_starts,
            "batch_mean": round(self.decode_tokens / max(self.decode_turns, 1), 3),
            "priority": len(self.priority),
            "priority_met": sum(record.meets(self.rule) for record in self.priority),
            "best_effort": len(self.best_effort),
            "best_effort_unended": sum(record.fate is not Fate.FINISHED for record in self.best_effort),
            "best_effort_tokens_per_s": round(self.best_effort_tokens() / (self.horizon_s * self.runs), 1),
            "moves": sum(record.moves for record in self.waited_for),
            "events": self.events,
            "wall_s": round(self.wall_s, 2),
        }

    def by_popularity(self, groups: int = 4) -> list[float]:
        """SLO attainment by popularity of the model: the hottest quarter of the models first."""
        by_model: dict[int, list[Record]] = {}
        for record in self.waited_for:
            by_model.setdefault(record.model, []).append(record)
        ranked = sorted(by_model.values(), key=lambda records: -len(records))
        size = -(-len(ranked) // groups)
        shares = []
        for start in range(0, len(ranked), size):
            records = [record for group in ranked[start : start + size] for record in group]
            shares.append(sum(record.meets(self.rule) for record in records) / len(records))
        return shares


SUMS = (
    "cold_starts",
    "resizes",
    "resize_s",
    "gpu_instance_s",
    "decode_turns",
    "decode_tokens",
    "events",
    "wall_s",
    "runs",
)


def together(results: Sequence[Result]) -> Result:
    """Several runs of one setting, with other seeds, counted as one."""
    records = [record for result in results for record in result.records]
    samples = [sample for result in results for sample in result.samples]
    sums = {name: sum(getattr(result, name) for result in results) for name in SUMS}
    return replace(results[0], records=records, samples=samples, **sums)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def percentile(ranked: Sequence[float], share: float) -> float:
    """Nearest rank; `ranked` rises."""
    if not ranked:
        return 0.0
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)]
