"""Whether nodes live. A shell reports what it saw and carries out what follows; time is an argument.

connection lost ── DOUBT_S without a new Hello ──▶ GiveUp: its requests go on elsewhere
stands still for too long ──────────────────────▶ Kill: its process is ended, and started again
process ended ───────────────────────────────────▶ `Controller.lost`, at once
"""

from __future__ import annotations

from collections import deque

from dovetail.cluster.decisions import GiveUp, Kill, Said
from dovetail.cluster.handle import NodeHandle

DOUBT_S = 1.0  # a node that cannot be reached may have ended: so long its shell has to say so, with the reason
HANG_FACTOR = 4.0  # of what an iteration is expected to take: estimates are wrong, and cores are shared


def is_hung(stood_s: float, expected_s: float, limit_s: float) -> bool:
    """Its heartbeat stands still for so long, while what it computes should take `expected_s`. Limit 0 = never."""
    return limit_s > 0.0 and stood_s > limit_s + HANG_FACTOR * expected_s


class Liveness:
    def __init__(self, outbox: deque[Said]) -> None:
        self._outbox = outbox  # the controller's
        self._doubted: dict[str, tuple[float, NodeHandle]] = {}  # by node: given up then

    def unreachable(self, node: NodeHandle, now: float) -> None:
        """The connection is lost."""
        if node.up:
            self._doubted.setdefault(node.name, (now + DOUBT_S, node))

    def stands_still(self, node: NodeHandle, stood_s: float, expected_s: float, limit_s: float) -> None:
        """Its heartbeat does."""
        if is_hung(stood_s, expected_s, limit_s):
            self._outbox.append(Kill(node, stood_s))

    def settled(self, node: NodeHandle) -> None:
        """It is lost for certain, or there again."""
        self._doubted.pop(node.name, None)

    def next_s(self) -> float | None:
        """When `wake` has something to do."""
        return min((at_s for at_s, _ in self._doubted.values()), default=None)

    def wake(self, now: float) -> None:
        for name, (at_s, node) in list(self._doubted.items()):
            if at_s <= now:
                del self._doubted[name]
                self._outbox.append(GiveUp(node))
