"""How much of a GPU a node has: what is asked for, within what the card and its other users leave."""

from __future__ import annotations

import logging

from dovetail.errors import ConfigError

log = logging.getLogger("dovetail.worker")

# Beside weights, keys and values: activations of 8,192 tokens (0.7 GB of an 8B shape), what graphs compute in, sampling
# (75 MB for 256 rows), scratch memory of attention and products, and the allocator's slack.
WORK_BYTES = 3 << 30
WORK_SHARE = 0.1  # at most, of small cards


def granted_bytes(label: str, asked: int, free: int, whole: int) -> int:
    """Of a card of `whole` bytes of which others leave `free`. Raises ConfigError where no card of this size could give
    what is asked for."""
    work = min(WORK_BYTES, int(whole * WORK_SHARE))
    if asked > whole - work:
        raise ConfigError(
            f"memory: {_gb(asked)} are asked for of {label}, which has {_gb(whole)}; activations, graphs and sampling "
            f"take up to {_gb(work)} of them: write {(whole - work) >> 20}MiB or less"
        )
    usable = max(free - work, free // 2)
    if asked > usable:
        log.warning("of %s only %s are free, %s were asked for", label, _gb(usable), _gb(asked))
    return min(asked, usable)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
