"""When an instance without requests goes: after its keep-alive, or sooner for a start (S11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Reclaiming(Protocol):
    @property
    def keep_alive_s(self) -> float:
        """Of an idle instance, on devices that must load weights."""

    def asks(self, *, are_alike: bool) -> bool:
        """A start asks for idle instances to go; `are_alike`: models answer at like length."""

    def may_reclaim(self, *, is_asked: bool) -> bool:
        """Idle instances go for a start that finds no memory."""


@dataclass(frozen=True, slots=True)
class ReclaimIdle:
    """Keep-alives are long, and memory is what the host has: idle instances go whenever a start lacks it."""

    keep_alive_s: float = 1.0

    def asks(self, *, are_alike: bool) -> bool:
        return False

    def may_reclaim(self, *, is_asked: bool) -> bool:
        return True
