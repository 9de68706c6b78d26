"""How long a real node's turns took beside what was expected, by kind of turn: the physics of its simulated twin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class TurnKind(NamedTuple):
    """What the duration of a turn depends on."""

    is_prefill: bool
    is_beside_load: bool  # weights were read meanwhile, by the same cores and memory
    size: int  # tokens of the prompt, or sequences that decode: the power of two above

    @property
    def name(self) -> str:
        return f"{self.family}/{self.size}"

    @property
    def family(self) -> str:
        return ("prefill" if self.is_prefill else "decode") + ("_beside_load" if self.is_beside_load else "")


def kind_of(is_prefill: bool, is_beside_load: bool, amount: int) -> TurnKind:
    return TurnKind(is_prefill, is_beside_load, 1 << amount.bit_length())


@dataclass
class TurnTimings:
    """Sums over the turns of a node; expected is what was expected before anything was learnt."""

    turns: int = 0
    gap_s: float = 0.0  # between turns while there was work
    took_s: dict[str, float] = field(default_factory=dict)  # by the name of the kind
    expected_s: dict[str, float] = field(default_factory=dict)

    def add(self, kind: TurnKind, took_s: float, expected_s: float, gap_s: float) -> None:
        self.turns += 1
        self.gap_s += gap_s
        for name in (kind.name, kind.family):
            self.took_s[name] = self.took_s.get(name, 0.0) + took_s
            self.expected_s[name] = self.expected_s.get(name, 0.0) + expected_s

    @property
    def mean_gap_s(self) -> float:
        return self.gap_s / self.turns if self.turns else 0.0

    def factor(self, kind: TurnKind) -> float:
        """As the same kind of that size came out, else the kind as a whole."""
        for name in (kind.name, kind.family):
            if self.expected_s.get(name, 0.0) > 0.0:
                return self.took_s[name] / self.expected_s[name]
        return 1.0
