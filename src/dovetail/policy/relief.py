"""What is done for a node whose requests outgrow its time or its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.policy.work import RequestRecord


class Reliever(Protocol):
    """Of one cluster."""

    def overcommitted(self, node: Any, request: RequestRecord, now: float) -> None:
        """The request, which runs on the node, had better be elsewhere."""

    def ready(self, node: Any, model: str, now: float) -> None:
        """The model's weights have arrived on the node."""


class Relief(Protocol):
    @property
    def ahead_s(self) -> float:
        """So long before a pool is full the node says so."""

    def reliever(self, cluster: Any) -> Reliever:
        """`cluster`: what it may do there (`ReliefPort`)."""


class ReliefPort(Protocol):
    """What a reliever may do."""

    def migrate(self, id: int, reason: str, now: float) -> bool:
        """Live (L4)."""

    def is_source(self, node: Any) -> bool:
        """A request is migrating away from it already."""


@dataclass(frozen=True, slots=True)
class LiveRelief:
    """L4: the request goes on here while another node recomputes it, one at a time."""

    ahead_s: float = 0.0

    def reliever(self, cluster: ReliefPort) -> Reliever:
        return _LiveReliever(cluster)


class _LiveReliever:
    def __init__(self, cluster: ReliefPort) -> None:
        self._cluster = cluster

    def overcommitted(self, node: Any, request: RequestRecord, now: float) -> None:
        if not self._cluster.is_source(node):
            self._cluster.migrate(request.id, "overcommitted", now)

    def ready(self, node: Any, model: str, now: float) -> None:
        """Nothing was begun there for it."""
