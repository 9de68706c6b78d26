"""The arithmetic of `bench engines`: ratios that are paired by round, shares of the roofline, what counts as AMX."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import pytest

from dovetail.errors import ConfigError
from dovetail_bench.engine_figures import (
    OURS,
    Cell,
    Metric,
    Row,
    agreement,
    fold,
    means,
    paired,
    parse_metrics,
    shifted,
)
from dovetail_bench.engine_peers import amx_evidence
from dovetail_bench.engine_plot import draw
from dovetail_bench.engines import Failure, Report, merged
from dovetail_bench.roofline_figures import Roofline, least_seconds
from dovetail_bench.shapes import SHAPES

CELL = Cell("0.5B", "8-bit", Metric("tpot", 8))
WEIGHTS = {OURS: "int8", "fast": "q8_0", "slow": "q8_0"}


def make_row(**changes: object) -> Row:
    row = fold(CELL, {OURS: [10.0, 12.0]}, WEIGHTS, {})[0]
    return msgspec.structs.replace(row, **changes)


def test_metrics_are_read_and_wrong_ones_named() -> None:
    assert parse_metrics("ttft128, tpot-8") == (Metric("ttft", 128), Metric("tpot", 8))
    assert [(each.name, each.batch) for each in parse_metrics("ttft128,tpot8")] == [("ttft128", 1), ("tpot", 8)]
    for wrong in ("ttft", "tpot0", "latency8", ""):
        with pytest.raises(ConfigError, match="--metrics"):
            parse_metrics(wrong)


def test_ratios_are_taken_round_by_round() -> None:
    """A host that is twice as slow in one round changes no ratio; medians of each alone would."""
    calm, disturbed = [10.0, 10.0, 10.0], [10.0, 20.0, 40.0]
    assert paired(calm, [5.0, 5.0, 5.0]) == (2.0, 2.0, 2.0)
    assert paired(disturbed, [5.0, 10.0, 20.0]) == (2.0, 2.0, 2.0)
    middle, low, high = paired([10.0, 10.0, 10.0, 10.0, 10.0], [10.0, 5.0, 2.5, 20.0, 40.0])
    assert (low, middle, high) == (0.5, 1.0, 2.0)
    assert paired([3.0], [6.0]) == (0.5, 0.5, 0.5)


def test_a_cell_is_folded_against_its_best_peer() -> None:
    rounds = {OURS: [10.0, 12.0, 11.0], "slow": [40.0, 48.0, 44.0], "fast": [20.0, 24.0, 22.0]}
    rows = fold(CELL, rounds, WEIGHTS, {OURS: 5.5})
    assert [row.engine for row in rows] == [OURS, "fast", "slow"]
    ours, fast, slow = rows
    assert (ours.median_ms, ours.spread_ms, ours.ratio_to_best_peer, ours.roofline) == (11.0, 2.0, 2.0, 0.5)
    assert (ours.metric, ours.batch, ours.weights, ours.rounds, ours.best_peer) == ("tpot", 8, "int8", 3, "fast")
    assert (fast.ratio_to_best_peer, slow.ratio_to_best_peer, fast.roofline) == (1.0, 0.5, None)


def test_without_a_peer_there_is_no_ratio() -> None:
    assert make_row().ratio_to_best_peer is None
    assert make_row().best_peer is None


def test_agreement_counts_prompts_that_both_answered() -> None:
    assert agreement({1: 7, 2: 8, 3: 9}, {1: 7, 2: 5, 4: 1}) == 0.5
    assert agreement({}, {1: 7}) is None


def test_every_engine_is_first_equally_often() -> None:
    orders = [shifted(["a", "b", "c"], turn) for turn in range(6)]
    assert sorted(order[0] for order in orders) == ["a", "a", "b", "b", "c", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_the_shortest_time_is_bound_by_reading_or_by_products() -> None:
    spec, best = SHAPES["0.5B"], Roofline(read_bytes_per_s=1e10, flops_per_s=1e11)
    size = spec.weight_bytes("bf16")
    assert least_seconds(spec, size, 1, 1, best) == size / 1e10
    head = spec.vocab_size * spec.hidden_size
    body = spec.num_parameters() - head  # tied: once in the model
    assert least_seconds(spec, size, 1024, 1, best) == pytest.approx(2 * (1024 * body + head) / 1e11)


def test_8_bit_products_have_a_bound_only_where_one_was_measured() -> None:
    spec, known = SHAPES["0.5B"], Roofline(1e10, 1e11, int8_ops_per_s=4e11)
    unknown, size = Roofline(1e10, 1e11, int8_ops_per_s=1e9), spec.num_parameters()
    assert least_seconds(spec, size, 1, 1, unknown, bits=8) == size / 1e10
    assert least_seconds(spec, size, 1024, 1, unknown, bits=8) is None
    bound = least_seconds(spec, size, 1024, 1, known, bits=4)
    wide = least_seconds(spec, size, 1024, 1, known, bits=16)
    assert bound is not None
    assert wide == pytest.approx(4 * bound)


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx10_1_512_amx,undef,src:bf16", True),
        ("load_tensors:          AMX model buffer size =    42.00 MiB", True),
        ("level amx", True),
        ("onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with AVX512BW, AMX-BF16 and AMX-INT8 support", False),
        ("onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_bf16,undef", False),
        ("CPU : AVX512 = 1 | AMX_INT8 = 1 | LLAMAFILE = 1", False),
        ("level avx512", False),
    ],
)
def test_only_amx_at_work_is_evidence(line: str, counts: bool) -> None:
    assert amx_evidence(["something else\n", f"before\n{line}\nafter"]) == (line if counts else None)


def test_results_of_an_earlier_run_stay_unless_measured_again() -> None:
    old = Report("cpu", 2, 2, rows=[make_row(), make_row(batch=1)], failures=[Failure(OURS, "0.5B, 8-bit", "broken")])
    new = Report("cpu", 2, 2, rows=[make_row(median_ms=5.0)])
    both = merged(old, new)
    assert sorted((row.batch, row.median_ms) for row in both.rows) == [(1, 11.0), (8, 5.0)]
    assert both.failures == []  # it works now
    assert merged(old, Report("other cpu", 2, 2, rows=[])).rows == []


def test_the_plot_has_a_bar_for_every_row_and_is_xml() -> None:
    pytest.importorskip("matplotlib")
    rows = fold(CELL, {OURS: [1.0, 2.0], "a<b": [3.0, 3.0]}, {OURS: "int8", "a<b": "q8_0"}, {})
    text = draw(rows, "this & that")
    root = ElementTree.fromstring(text)
    said = {"".join(each.itertext()).strip() for each in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a<b q8_0", "this & that", "0.5", "1.0"} <= said
    assert len([each for each in root.iter() if (each.get("id") or "").startswith("bar-")]) == 2
    assert draw(rows, "this & that") == text  # nothing of the clock or of chance in it
    assert ElementTree.fromstring(draw([], "nothing")) is not None


def test_means_are_geometric_by_class_and_in_all() -> None:
    rows = []
    for precision, peer_ms in (("8-bit", 40.0), ("8-bit", 10.0), ("4-bit", 5.0)):
        rows += fold(
            Cell("m", precision, Metric("tpot", 1)), {OURS: [10.0], "peer": [peer_ms]}, WEIGHTS | {"peer": ""}, {}
        )
    rows += fold(Cell("m", "16", Metric("tpot", 1)), {OURS: [10.0]}, WEIGHTS, {})  # nobody to compare with
    found = {mean.precision: (round(mean.ratio, 6), mean.cells) for mean in means(rows)}
    assert found == {"8-bit": (2.0, 2), "4-bit": (0.5, 1), "all": (round(2 ** (1 / 3), 6), 3)}
