"""Why a request has no place, in words: for the client who is refused and for whoever reads a log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Reason(NamedTuple):
    words: str
    remedy: str  # what changes it, for an operator


# The reference has the same table.
REASONS = {
    "first_token_late": Reason("its first token would be late", "a later `ttft`, another node, or a shorter prompt"),
    "neighbour_late": Reason("a neighbour's next token would be late", "a later `tpot` of the model, or another node"),
    "decode_overcommitted": Reason(
        "one iteration of everybody would exceed the token pace",
        "a later `tpot`, fewer answers at once, or another node",
    ),
    "memory": Reason(
        "not enough memory", "more `memory` of the node, a shorter context, or smaller weights (`layout: int8`)"
    ),
    "link": Reason(
        "other loads on the node's link would delay its own too long",
        "a later `ttft`, or `keep_alive` so that models stay loaded",
    ),
    "slots": Reason("no free slot", "nothing in a server: its nodes have no slots; the papers' baselines do"),
    "concurrency": Reason("the instance is at its concurrency limit", "nothing in a server: as for slots"),
    "hardware": Reason("this device can never meet the SLO of this request", "a faster device, or a later target"),
    "closed": Reason("the instance was closing", "nothing: it is asked again at once"),
    "silent": Reason(
        "the node did not answer in time", "`dovetail ps` shows `unanswered`; a node that hangs is restarted"
    ),
}


def in_words(refusals: Iterable[str]) -> str:
    return "; ".join(REASONS[name].words if name in REASONS else name for name in refusals)
