"""The weights on a simulated machine: in host memory, on disk or afar, least recently used first to go (L2, L3).

One path from disk and network for the whole machine, where loads wait for each other; one link for each device.
Replaces the physics only: what a start should take, nodes offer by the tier that their machine last had.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.policy.placement import Hosting
from dovetail.profiles.storage import Storage, Tier


class Cache:
    """Weights that fit, the least recently used first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._bytes: dict[str, int] = {}

    def __contains__(self, model: str) -> bool:
        return model in self._bytes

    def use(self, model: str, num_bytes: int) -> list[str]:
        """It is there from now on, unless it is larger than everything; returns those that went for it."""
        self._bytes.pop(model, None)
        if num_bytes > self._capacity:
            return []
        gone = []
        while sum(self._bytes.values()) + num_bytes > self._capacity:
            oldest = next(iter(self._bytes))
            del self._bytes[oldest]
            gone.append(oldest)
        self._bytes[model] = num_bytes
        assert sum(self._bytes.values()) <= self._capacity
        return gone


class Machine:
    def __init__(
        self, name: str, storage: Storage, by_tier: Mapping[str, Mapping[Tier, Hosting]], *, is_stocked: bool = True
    ) -> None:
        """`by_tier`: what its devices offer of each model, by where its weights are. `is_stocked`: its disk has as many
        of the models as fit."""
        self.name = name
        self.storage = storage
        self.loads: dict[Tier, int] = dict.fromkeys(Tier, 0)  # that were begun, by where they came from
        self._by_tier = by_tier
        self._memory = Cache(storage.memory_bytes)
        self._disk = Cache(storage.disk_bytes)
        self._path_free_s = 0.0
        self._arriving: dict[str, float] = {}  # on the path: when it will be in memory
        for model in by_tier if is_stocked else ():
            self._disk.use(model, self._size(model))
        self.hostings = {model: tiers[self.tier(model)] for model, tiers in by_tier.items()}  # as its devices go by

    def _size(self, model: str) -> int:
        return self._by_tier[model][Tier.DISK].weight_bytes

    def tier(self, model: str) -> Tier:
        if model in self._memory:
            return Tier.MEMORY
        return Tier.DISK if model in self._disk else Tier.REMOTE

    def begin_load(self, model: str, link_free_s: float, now: float, slowdown: float = 1.0) -> float:
        """When it will be on the device. What arrives for another device already is not read twice."""
        size, tier = self._size(model), self.tier(model)
        link_s = self.storage.load_s(Tier.MEMORY, size) * slowdown
        if tier is not Tier.MEMORY and self.storage.memory_bytes and self._arriving.get(model, now) > now:
            self.loads[Tier.MEMORY] += 1
            return max(self._arriving[model], link_free_s) + link_s
        self.loads[tier] += 1
        if tier is Tier.MEMORY:
            self._memory.use(model, size)
            return max(link_free_s, now) + link_s
        began_s = max(self._path_free_s if self.storage.is_queued else now, link_free_s, now)
        self._path_free_s = end_s = began_s + self.storage.load_s(tier, size) * slowdown
        self._arriving[model] = end_s
        return end_s

    def loaded(self, model: str) -> list[str]:
        """It came through, and stays where there is room; returns of which models devices offer something else now."""
        size = self._size(model)
        self._arriving.pop(model, None)
        moved = [model, *self._disk.use(model, size), *self._memory.use(model, size)]
        changed = []
        for one in dict.fromkeys(moved):
            hosting = self._by_tier[one][self.tier(one)]
            if self.hostings[one] is not hosting:
                self.hostings[one] = hosting
                changed.append(one)
        return changed
