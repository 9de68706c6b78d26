"""The turn that a device computes, and one of somebody else's that it lets in between two layers of it."""

from __future__ import annotations

from dovetail.node.events import Turn
from dovetail.policy.headroom import INFINITY


class Underway:
    """Times are the turn's own: what others were let in for is none of it."""

    __slots__ = ("_own_s", "beneath", "sliced_s", "started_s", "turn")

    def __init__(self, turn: Turn, now: float, beneath: Underway | None = None) -> None:
        self.turn = turn
        self.started_s = now  # later by what others were let in for
        self.sliced_s = now  # since when it was computed without a break
        self.beneath = beneath  # what it was let into
        self._own_s: float | None = None  # what it should take, once somebody has asked

    @property
    def own_s(self) -> float:
        if self._own_s is None:  # asked for many times in a turn
            self._own_s = self.turn.expected_s
        return self._own_s

    def left_s(self, now: float) -> float:
        """What it should take still."""
        return max(self.own_s - (now - self.started_s), 0.0)

    def free_at_s(self, now: float) -> float:
        """When the device should be done with it, and with all that is let in meanwhile."""
        layer_s = self.turn.instance.hosting.layer_s
        if layer_s is not None:  # others go before each layer that is read from the disk
            return now + layer_s
        ends_s = max(now, self.started_s + self.own_s)
        if self.beneath is None:
            return ends_s + self._breaks_s(now)
        layer_s = self.beneath.turn.instance.hosting.layer_s
        if layer_s is not None:
            return ends_s + layer_s
        return ends_s + self.beneath.left_s(self.started_s) + self.beneath._breaks_s(self.started_s)

    def _breaks_s(self, now: float) -> float:
        """How long others compute while it stops for them."""
        return 0.0 if self.turn.slice_s == INFINITY else self.left_s(now) // self.turn.slice_s * self.turn.round_s

    def end(self, now: float) -> Underway | None:
        """Returns what goes on."""
        if self.beneath is not None:
            self.beneath.started_s += now - self.started_s
        return self.beneath
