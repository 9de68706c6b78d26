"""What models take of a link that they share: a disk from which layers of each come with every iteration (C4).

A model that should have a token every `pace_s` needs its bytes that often: it claims the share bytes / bandwidth / pace
of the link. Knows seconds, neither bytes nor devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class LinkClaim(NamedTuple):
    seconds: float  # of the link, for each token
    pace_s: float  # the strictest of its requests

    @property
    def share(self) -> float:
        return self.seconds / self.pace_s


def have_room(claims: Sequence[LinkClaim]) -> bool:
    """Whether a link carries all of them: together they claim no more than all of it, and nobody waits too long for an
    iteration of another, which is not broken off."""
    if sum(claim.share for claim in claims) > 1.0:
        return False
    return all(claim.seconds + longest_other_s(claims, at) <= claim.pace_s for at, claim in enumerate(claims))


def longest_other_s(claims: Sequence[LinkClaim], at: int) -> float:
    """An iteration that one of them may have to wait for."""
    return max((claim.seconds for place, claim in enumerate(claims) if place != at), default=0.0)
