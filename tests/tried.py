"""Which levels of kernels a test tries: by `make test` the lowest and the highest that this machine runs, and torch's;
by `make check-all` those between, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def tried(levels: Sequence[str]) -> list[Any]:
    """Parameters of a test or fixture. `levels` are in order; torch's, where it is among them, is the first."""
    native = [level for level in levels if level != "torch"]
    between = native[1:-1]
    return [pytest.param(level, marks=pytest.mark.slow) if level in between else level for level in levels]
