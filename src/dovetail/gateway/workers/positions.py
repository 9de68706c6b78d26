"""In which order those without a place are, as it is told to clients that wait."""

from __future__ import annotations

import time

from dovetail.cluster.remote_cluster import RemoteCluster

POSITIONS_S = 0.25  # how old the order of those who wait may be when it is told


class Positions:
    """Of those without a place: 1 = the next. Counted once for all who ask within a moment."""

    def __init__(self, cluster: RemoteCluster) -> None:
        self._cluster = cluster
        self._looked_s, self._known = float("-inf"), dict[str, int]()

    def of(self, request_id: str) -> int:
        now = time.monotonic()
        if now - self._looked_s > POSITIONS_S:
            self._looked_s, self._known = now, self._cluster.positions()
        return self._known.get(request_id, len(self._known) + 1)
