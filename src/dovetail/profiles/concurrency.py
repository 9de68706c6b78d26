"""How many requests an instance may serve at once under a plain limit (S12): as many as keep the token pace."""

from __future__ import annotations

from dovetail.policy.latency import Latency

MEAN_TOKENS = 1024  # of a running request
MAX_BATCH = 256


def concurrency_of(latency: Latency, tpot_s: float, share: int = 1) -> int:
    """On a node that this many instances share. At least 1: a model too slow for its pace still serves."""
    low, high = 1, MAX_BATCH
    while low < high:
        middle = (low + high + 1) // 2
        if latency.decode_s(middle, middle * MEAN_TOKENS) * share <= tpot_s:
            low = middle
        else:
            high = middle - 1
    return low
