"""What a node gets of a GPU that it asks for memory of."""

from __future__ import annotations

import logging

import pytest

from dovetail.engine.devices.card_memory import WORK_BYTES, granted_bytes
from dovetail.errors import ConfigError

GIB = 1 << 30


def test_what_the_card_has_beside_its_work_is_granted() -> None:
    assert granted_bytes("h200", 100 * GIB, 139 * GIB, 140 * GIB) == 100 * GIB
    assert granted_bytes("h200", 135 * GIB, 140 * GIB, 140 * GIB) == 135 * GIB


def test_more_than_activations_graphs_and_sampling_leave_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"149.0 GB .* of h200, which has 150.3 GB; .* 3.2 GB .* write 140288MiB"):
        granted_bytes("h200", int(149e9), 140 * GIB, 140 * GIB)
    with pytest.raises(ConfigError, match="or less"):
        granted_bytes("small", 8 * GIB, 8 * GIB, 8 * GIB)
    assert granted_bytes("small", 7 * GIB, 8 * GIB, 8 * GIB) == 7 * GIB


def test_of_a_card_that_others_fill_a_node_has_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert granted_bytes("h200", 100 * GIB, 50 * GIB, 140 * GIB) == 50 * GIB - WORK_BYTES
    assert "were asked for" in caplog.text
    assert granted_bytes("h200", 100 * GIB, 4 * GIB, 140 * GIB) == 2 * GIB
