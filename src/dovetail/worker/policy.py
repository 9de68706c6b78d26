"""The policies of `policy.presets` as a real node runs them: what costs nothing here is set to cost nothing."""

from __future__ import annotations

from dataclasses import replace

from dovetail.policy.knobs import Knobs
from dovetail.policy.presets import policy

# A pool grows and shrinks in place, so that a small floor costs nothing.
REAL = {
    "floor_tokens": 256,
    "free_resize": True,
    "slots_limited": False,
    "one_instance": True,
    "extend_deadlines": True,
    "retry_on_change": True,
}


def real_knobs(name: str) -> Knobs:
    return replace(policy(name), **REAL)
