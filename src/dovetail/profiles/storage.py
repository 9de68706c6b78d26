"""Where a machine keeps weights and how fast they come from there: host memory, disk, an object store (L3).

Presets are the two test beds of ServerlessLLM's evaluation. What the paper does not state is marked as assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

GB = 1e9


class Tier(StrEnum):
    MEMORY = "memory"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True)
class Storage:
    """Of one machine. Devices share everything but their links."""

    name: str
    memory_bytes: int  # host memory that keeps weights; 0 = none are kept there
    disk_bytes: int  # disk that keeps them; 0 = none are kept there
    link_bytes_per_s: float  # host memory to one device
    disk_bytes_per_s: float
    network_bytes_per_s: float  # from the object store
    is_queued: bool = True  # loads from disk and network wait for each other; else each has all of it to itself
    is_pipelined: bool = True  # tiers work at the same time: the slowest counts; else one after another

    def load_s(self, tier: Tier, num_bytes: int) -> float:
        """Onto a device, were nothing else loaded on the machine."""
        if tier is Tier.MEMORY:
            return num_bytes / self.link_bytes_per_s
        if tier is Tier.DISK:
            return num_bytes / min(self.disk_bytes_per_s, self.link_bytes_per_s)
        if self.is_pipelined:
            return num_bytes / min(self.network_bytes_per_s, self.disk_bytes_per_s, self.link_bytes_per_s)
        return num_bytes / self.network_bytes_per_s + num_bytes / self.link_bytes_per_s

    def shared_s(self, tier: Tier, num_bytes: int) -> float:
        """Of that, what keeps the machine's one path to disk and network busy."""
        return self.load_s(tier, num_bytes) if self.is_queued and tier is not Tier.MEMORY else 0.0


# Test bed (ii): 512 GB of memory, one PCIe 4.0 NVMe SSD of 2 TB, 10 Gbit/s. Of the memory 160 GB keep weights: "only
# two models" of 66 GB fit. Assumed: half of the 12 GB/s that two such SSDs gave on test bed (i), and 25 GB/s of a
# PCIe 4.0 x16 link from pinned memory.
SLLM_CLUSTER = Storage("sllm-cluster", int(160 * GB), int(2000 * GB), 25 * GB, 6 * GB, 1.25 * GB)
# Test bed (i): 1 TB of memory, two NVMe SSDs (12 GB/s, measured there), 1 Gbit/s. Assumed: 320 GB keep weights.
SLLM_SERVER = Storage("sllm-server", int(320 * GB), int(8000 * GB), 25 * GB, 12 * GB, 0.125 * GB)
STORAGES = {storage.name: storage for storage in (SLLM_CLUSTER, SLLM_SERVER)}
