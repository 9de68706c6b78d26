"""Servers that several test modules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_fixture import Server, running_server

from dovetail.types import ModelCard


@pytest.fixture(scope="session")
def tiny_server(tiny_folder: Callable[[str], Path]) -> Iterator[Server]:
    """Two tiny random models, for tests in which the text does not matter, and two encoders."""
    folders = [tiny_folder(name) for name in ("llama", "qwen3", "bert", "bert_scores")]
    with running_server(*folders, "--kv-cache", "4MiB", "--threads", "1") as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_server(smollm2: ModelCard) -> Iterator[Server]:
    with running_server(smollm2.name, "--kv-cache", "1GiB") as server:
        yield server
