"""Once a virtual second: which nodes are in use, how full they are, and who held the device."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.policy.placement import DeviceKind
from dovetail.sim.device import Device
from dovetail.sim.metrics import Sample, mean


class Sampler:
    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._busy_before: dict[int, float] = {}
        self.gpu_instances = 0  # at the last sample

    def take(self, now: float, queued: int) -> Sample:
        used = {DeviceKind.CPU: 0, DeviceKind.GPU: 0}
        memory: list[float] = []
        kv: list[float] = []
        batches: list[int] = []
        holders: list[dict[str, float]] = []
        self.gpu_instances = 0
        before, self._busy_before = self._busy_before, {}
        for device in self._devices:
            node = device.node
            held: dict[str, float] = {}
            holders.append(held)
            if not node.instances:
                continue
            used[node.kind] += 1
            on_gpu = node.kind is DeviceKind.GPU
            if on_gpu:
                self.gpu_instances += len(node.instances)
                memory.append(node.device.ledger.planned / node.device.ledger.capacity)
            for instance in node.instances.values():
                batches.append(instance.batch)
                if on_gpu and instance.kv_tokens:
                    kv.append(min(instance.tokens / instance.kv_tokens, 1.0))
                self._busy_before[instance.id] = instance.busy_s
                busy_s = instance.busy_s - before.get(instance.id, 0.0)
                held[instance.model] = held.get(instance.model, 0.0) + busy_s
        return Sample(now, used[DeviceKind.CPU], used[DeviceKind.GPU], queued, mean(memory), mean(kv), batches, holders)
