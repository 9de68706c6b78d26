"""Which instances may be on one device together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Sharing(Protocol):
    def is_taken(self, in_use: bool) -> bool:
        """Nothing starts on a device that is, or is not, in use: it need not be asked."""

    def may_add(self, twins: int) -> bool:
        """Another instance of a model of which so many are on the device."""

    def has_slot(self, slots: int, residents: Sequence[int]) -> bool:
        """For an instance of which `slots` fill the device, beside residents of which so many would."""


@dataclass(frozen=True, slots=True)
class OneOfEach:
    """As many models as memory holds, one instance of each: a second one would split the batch."""

    def is_taken(self, in_use: bool) -> bool:
        return False

    def may_add(self, twins: int) -> bool:
        return not twins

    def has_slot(self, slots: int, residents: Sequence[int]) -> bool:
        return True
