"""Nodes of the ServerlessLLM baselines (S12): an instance has a fixed share of the node's memory, and takes as many
requests as a plain limit says.
"""

from __future__ import annotations

from typing import Any

from dovetail.node.admission import KEEP, Admitter, Grant
from dovetail.node.device import Device
from dovetail.node.instance import Instance
from dovetail.node.node import Node
from dovetail.node.protocol import EMPTY, StartRoom
from dovetail.node.residency import Residency
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import Refusal
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.policy.work import Work
from dovetail.sim.baselines import StaticShares


class StaticAdmitter(Admitter):
    def __init__(self, device: Device, residency: Residency) -> None:
        super().__init__(device, residency)
        assert isinstance(device.composition.sharing, StaticShares)
        self._num_shares = device.composition.sharing.num_shares

    def _join(self, instance: Instance, work: Work, free_at_s: float, *, ignore_memory: bool) -> Grant | Refusal:
        hosting = instance.hosting
        if instance.batch >= (hosting.half_concurrency if self._num_shares > 1 else hosting.concurrency):
            return Refusal.CONCURRENCY
        # Blocks that are brought along need their place at once; a prompt waits for it.
        return Refusal.MEMORY if work.cached and instance.is_short(work.known_tokens + 1) else KEEP

    def _start(self, hosting: Hosting, work: Work, free_at_s: float) -> Grant | Refusal:
        """Weights, and KV for all the rest of its share."""
        ledger = self._device.ledger
        weights = 0 if hosting.weights_in_place else hosting.weight_bytes
        tokens = self.most_tokens(hosting)
        if tokens <= 0 or weights + tokens * hosting.kv_bytes_per_token > ledger.available:
            return Refusal.MEMORY
        return Grant(tokens)

    def room_for_start(self) -> StartRoom:
        return EMPTY  # not known

    def _capacity_bytes(self, hosting: Hosting) -> int:
        """Too large for a share: the whole node."""
        return self._device.ledger.capacity // min(self._num_shares, hosting.slots)

    def is_fixed(self, instance: Instance) -> bool:
        return True

    def missing_bytes(self, hosting: Hosting, work: Work) -> int:
        return max(self._capacity_bytes(hosting) - self._device.ledger.available, 0)


class StaticNode(Node):
    """On a GPU each of several instances rests after its turns, so that it has its share of the time, too."""

    admitter_type = StaticAdmitter

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert isinstance(self.composition.sharing, StaticShares)
        if self.kind is DeviceKind.GPU and self.composition.sharing.num_shares > 1:
            self.turns.throttle = self.composition.sharing.num_shares


def node_type(composition: Composition) -> type[Node]:
    """What runs a device under this composition."""
    return StaticNode if isinstance(composition.sharing, StaticShares) else Node
