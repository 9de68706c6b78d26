"""What making a KV pool larger or smaller takes, and what follows from that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dovetail.policy.latency import IN_PLACE_RESIZE, TransferModel
from dovetail.policy.placement import DeviceKind


class Resizing(Protocol):
    def transfer(self, kind: DeviceKind) -> TransferModel: ...

    def may_borrow(self, wanted_tokens: int, limit_tokens: int | None) -> bool:
        """A pool that is to grow takes what neighbours hold for tokens to come; no pool may pass its limit."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """In reserved addresses, without copying."""

    def transfer(self, kind: DeviceKind) -> TransferModel:
        return IN_PLACE_RESIZE

    def may_borrow(self, wanted_tokens: int, limit_tokens: int | None) -> bool:
        return limit_tokens is None or wanted_tokens <= limit_tokens
