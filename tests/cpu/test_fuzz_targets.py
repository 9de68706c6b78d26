"""The fuzzers themselves: a few inputs of each target, and everything that one of them has ever found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

FUZZ = Path(__file__).parent.parent / "fuzz"
sys.path.insert(0, str(FUZZ))

from fuzz import make_input  # noqa: E402
from targets import TARGETS  # noqa: E402

FOUND = sorted((FUZZ / "seeds").glob("*/*"))  # <target>/<what it was>


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.usefixtures("threads")
def test_whatever_is_read_is_accepted_or_refused_by_an_error_of_ours(name: str, tmp_path: Path) -> None:
    target = TARGETS[name](tmp_path)
    target.prepare()
    target.load()
    outcomes = [target.run(make_input(target, index)) for index in range(60)]
    assert not all(outcomes)
    for path in FOUND:
        if path.parent.name == name:
            target.run(path.read_bytes())


def test_what_was_found_is_kept() -> None:
    assert FOUND
    assert {path.parent.name for path in FOUND} <= set(TARGETS)
