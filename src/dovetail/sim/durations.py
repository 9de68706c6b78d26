"""How long things take on a simulated device: predicted by profiles with seeded noise. The physics alone."""

from __future__ import annotations

from random import Random
from typing import Protocol

from dovetail.node.events import StartLoad, StartResize, Turn
from dovetail.node.node import Node
from dovetail.policy.latency import TransferModel
from dovetail.policy.placement import DeviceKind

NOISE_TABLE = 4096


class Noise:
    """Factors around 1, drawn once and walked through by every device from a place of its own."""

    def __init__(self, rng: Random, deviation: float) -> None:
        low, high = 1 - 3 * deviation, 1 + 3 * deviation
        self.factors = [min(max(rng.gauss(1.0, deviation), low), high) for _ in range(NOISE_TABLE)]
        self._rng = rng

    def start(self) -> int:
        return self._rng.randrange(NOISE_TABLE)


class Durations(Protocol):
    gap_s: float  # between the end of a turn and the choice of the next

    def turn_s(self, node: Node, turn: Turn) -> float: ...

    def load_s(self, node: Node, command: StartLoad) -> float: ...

    def resize_s(self, node: Node, command: StartResize) -> float: ...

    def unload_s(self, node: Node) -> float: ...


class PredictedDurations:
    """As the node's own profiles predict, with noise."""

    def __init__(self, transfer: TransferModel, noise: Noise) -> None:
        self.gap_s = 0.0
        self._transfer = transfer
        self._noise = noise.factors
        self._draw = noise.start()

    def turn_s(self, node: Node, turn: Turn) -> float:
        self._draw = draw = (self._draw + 1) % NOISE_TABLE
        return turn.seconds(turn.instance.hosting.latency) * self._noise[draw]

    def load_s(self, node: Node, command: StartLoad) -> float:
        return self._transfer.load_s(command.num_bytes)

    def resize_s(self, node: Node, command: StartResize) -> float:
        """CPU pools grow in place."""
        return self._transfer.resize_s(command.old_bytes, command.new_bytes) if node.kind is DeviceKind.GPU else 0.0

    def unload_s(self, node: Node) -> float:
        return self._transfer.unload_s
