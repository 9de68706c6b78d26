"""Price sheets: what is billed, what is for sale, and what a mistake in a file says."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_builders import make_sheet

from dovetail.errors import ConfigError
from dovetail.plan.prices import read_sheet, sheet_names


def test_time_is_billed_in_whole_quanta() -> None:
    sheet = make_sheet(quantum=0.1)
    assert sheet.billed_s(0.1) == pytest.approx(0.1)  # not rounded up by a float's last digit
    assert sheet.billed_s(0.30000000000000004) == pytest.approx(0.3)
    assert sheet.billed_s(0.301) == pytest.approx(0.4)
    assert make_sheet(quantum=0).billed_s(0.123) == 0.123


def test_the_thesis_formula_prices_a_call() -> None:
    """(λ_inv + (λ_c·c + λ_m·m)·L) of section 4.1.4, at 2 vCPUs, 4 GB and 0.95 s, billed as 1 s."""
    sheet = read_sheet("alibaba-fc")
    assert sheet.invocation(sheet.per_second(2, 4), 0.95) == pytest.approx(1.2e-7 + (2 * 1.6e-5 + 4 * 2.4e-6) * 1.0)


def test_memory_and_vcpus_are_sold_together() -> None:
    sizes = make_sheet().cpu
    assert sizes.memory_gb(1, 2.0) == 2.0
    assert sizes.memory_gb(1, 0.1) == 0.5  # no less than comes with the vCPU
    assert sizes.memory_gb(1, 4.5) is None  # more than a vCPU may have


def test_every_shipped_sheet_says_where_its_prices_come_from() -> None:
    assert set(sheet_names()) == {"alibaba-fc", "aws-lambda", "own-machines"}
    for name in sheet_names():
        assert len(read_sheet(name).source) > 20


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name: x\nsource: y\nquantum: 1s\n", "rates: Field required"),
        ("[1, 2]", "expected a mapping at the top"),
        ("{", "not valid YAML"),
    ],
)
def test_a_bad_sheet_names_file_and_key(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint) as error:
        read_sheet(path)
    assert str(path) in str(error.value)


def test_an_unknown_sheet_is_told_which_there_are() -> None:
    with pytest.raises(ConfigError, match="no sheet 'azure'; there are alibaba-fc"):
        read_sheet("azure")
