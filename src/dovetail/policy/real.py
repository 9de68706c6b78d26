"""The policies of `policy.presets` as a real node runs them: what costs nothing here is set to cost nothing."""

from __future__ import annotations

from dataclasses import replace

from dovetail.policy.knobs import Knobs, MakeWay
from dovetail.policy.presets import policy

# A pool grows and shrinks in place, so that a small floor costs nothing. Keep-alives are long and memory is what the
# host has: idle models give way, and starts mind the loads before them. Whoever comes while a prompt is computed is
# looked at soon.
REAL: dict[str, object] = {
    "floor_tokens": 256,
    "free_resize": True,
    "slots_limited": False,
    "weights_share": 1.0,
    "short_requests": 0,
    "one_instance": True,
    "reclaim_idle": True,
    "count_loads": True,
    "extend_deadlines": True,
    "retry_on_change": True,
    "live_moves": True,
    "part_s": 0.1,
    "pack_prompts": True,
    "smooth_answers": True,
    "split_decodes": True,
    "max_stall": 2.0,
    "start_soonest": True,
    "make_way": MakeWay.MIGRATE,
}


def real_knobs(name: str, **changes: float) -> Knobs:
    return replace(policy(name), **REAL | changes)  # type: ignore[arg-type]
