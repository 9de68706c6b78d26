"""Why a request has no place, in words: for the client who is refused and for whoever reads a log."""

from __future__ import annotations

from collections.abc import Iterable

REASONS = {
    "first_token_late": "its first token would be late",
    "neighbour_late": "a neighbour's next token would be late",
    "decode_overcommitted": "one iteration of everybody would exceed the token pace",
    "memory": "not enough memory",
    "link": "other loads on the node's link would delay its own too long",
    "slots": "no free slot",
    "concurrency": "the instance is at its concurrency limit",
    "hardware": "this device can never meet the SLO of this request",
    "closed": "the instance was closing",
    "silent": "the node did not answer in time",
}


def in_words(refusals: Iterable[str]) -> str:
    return "; ".join(REASONS.get(name, name) for name in refusals)
