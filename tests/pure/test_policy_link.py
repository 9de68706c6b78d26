"""Whether models that read their weights over one link with every token get them in time (C4)."""

from __future__ import annotations

import random

import pytest

from dovetail.policy.link import LinkClaim, have_room, longest_other_s


def test_a_link_carries_what_takes_less_than_all_of_it() -> None:
    assert have_room([])
    assert have_room([LinkClaim(0.25, 0.25)])
    assert not have_room([LinkClaim(0.26, 0.25)])
    assert have_room([LinkClaim(0.1, 0.3), LinkClaim(0.1, 0.2)])
    assert not have_room([LinkClaim(0.1, 0.2), LinkClaim(0.1, 0.2), LinkClaim(0.01, 10.0)]), "there is no more of it"
    assert not have_room([LinkClaim(0.1, 0.15), LinkClaim(0.1, 10.0)]), "it would wait for an iteration of the other"


def test_what_one_waits_for_is_the_longest_of_the_others() -> None:
    claims = [LinkClaim(3.0, 9.0), LinkClaim(5.0, 9.0), LinkClaim(1.0, 9.0)]
    assert [longest_other_s(claims, at) for at in range(3)] == [5.0, 3.0, 5.0]
    assert longest_other_s(claims[:1], 0) == 0.0


@pytest.mark.parametrize("seed", range(200))
def test_what_has_room_is_served_in_time_earliest_deadline_first(seed: int) -> None:
    """By playing it: iterations are never broken off, each model's next token is due one pace after the last was."""
    rng = random.Random(seed)
    claims = [LinkClaim(rng.uniform(0.1, 1.0), rng.uniform(0.5, 6.0)) for _ in range(rng.randint(1, 4))]
    if not have_room(claims):
        return
    now, dues = 0.0, [claim.pace_s for claim in claims]
    released = [0.0] * len(claims)
    for _ in range(400):
        ready = [at for at in range(len(claims)) if released[at] <= now]
        if not ready:
            now = min(released)
            continue
        at = min(ready, key=dues.__getitem__)
        now += claims[at].seconds
        assert now <= dues[at] + 1e-9
        released[at], dues[at] = dues[at], dues[at] + claims[at].pace_s
