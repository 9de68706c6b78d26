"""Traces, profiles, workloads and presets: what is read, and what is said when it cannot be."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sim_builders import PROFILE, SHARED, needs_shared

from dovetail.errors import ConfigError
from dovetail.policy.placement import DeviceKind
from dovetail.profiles.files import preset_errors, read_profile
from dovetail.profiles.hardware import PRESETS, Shape, hosting_of, latency_of
from dovetail.sim.parallel import parallel_errors
from dovetail.sim.trace import Arrival, keep_models, read_trace, write_trace
from dovetail.sim.workload import Workload, generate, read_lengths

HEADER = "arrival_s,model,input_tokens,output_tokens\n"
ENTRY: dict[str, Any] = {
    "shape": {"weight_gib": 10.0, "kv_kib_per_token": 512},
    "hardware": {
        "fast": {
            "kind": "gpu",
            "prefill_ms": [[1, 10], [1024, 100]],
            "decode_ms": [{"mean_length": 512, "batch_ms": [[1, 10], [8, 20]]}],
        }
    },
}


def write_profile(folder: Path, entry: dict[str, Any]) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps({"models": {"tiny": entry}}, indent=1))
    return path


def test_a_trace_is_read_plain_or_gzipped_in_order_of_arrival(tmp_path: Path) -> None:
    text = HEADER + "2.0,1,10,5\n\n1.0,0,20,6\n"
    plain, packed = tmp_path / "t.csv", tmp_path / "t.csv.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_trace(plain) == read_trace(packed) == [Arrival(1.0, 0, 20, 6), Arrival(2.0, 1, 10, 5)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "line 1: empty file"),
        ("arrival_s,model,input_tokens,colour\n", "line 1: unknown column 'colour'"),
        ("arrival_s,model,input_tokens\n", "line 1: column 'output_tokens' is missing"),
        (HEADER, "line 2: no requests"),
        (HEADER + "1.0,0,10,5\nsoon,0,10,5\n", "line 3: cannot read 'soon,0,10,5'"),
        (HEADER + "1.0,0,10\n", "line 2: 3 values, expected 4"),
        (HEADER + "-1,0,10,5\n", "line 2: arrival_s is -1"),
        (HEADER + "1.0,0,0,5\n", "line 2: model must be"),
    ],
)
def test_a_bad_trace_is_refused_with_file_and_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


def test_a_trace_that_is_not_there_or_not_gzip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "t.csv.gz").write_text(HEADER)
    with pytest.raises(ConfigError, match=r"t\.csv\.gz"):
        read_trace(tmp_path / "t.csv.gz")


def test_a_share_of_the_models_is_taken_from_every_eight() -> None:
    arrivals = [Arrival(float(model), model, 1, 1) for model in range(128)]
    assert {arrival.model % 8 for arrival in keep_models(arrivals, 32)} == {0, 1}
    assert len(keep_models(arrivals, 64)) == 64
    with pytest.raises(ConfigError, match="only 128"):
        keep_models(arrivals, 129)


def test_a_profile_becomes_what_a_node_needs(tmp_path: Path) -> None:
    hosting = read_profile(write_profile(tmp_path, ENTRY)).hosting("tiny", DeviceKind.GPU)
    assert hosting.latency.prefill_s(1024) == pytest.approx(0.1)
    assert hosting.latency.decode_s(8, 8 * 512) == pytest.approx(0.02)
    assert (hosting.slots, hosting.block_tokens, hosting.weights_in_place) == (4, 16, False)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hardware": {}}, "models.tiny has no hardware of kind gpu"),
        ({"shape": {"weight_gib": 10.0}}, "models.tiny.shape.kv_kib_per_token"),
        ({"hardware": {"fast": {"kind": "gpu", "prefill_ms": [], "decode_ms": []}}}, "no prefill_ms point"),
        ({"hardware": {"fast": {"kind": "gpu", "prefill_ms": [[1, 2]], "decode_ms": []}}}, "no decode_ms point"),
        (
            {"hardware": {"fast": {**ENTRY["hardware"]["fast"], "prefill_ms": [[9, 1], [2, 1]]}}},
            "curve arguments must rise",
        ),
    ],
)
def test_a_profile_without_a_needed_point_is_refused_with_file_and_line(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    path = write_profile(tmp_path, {**ENTRY, **change})
    with pytest.raises(ConfigError) as caught:
        read_profile(path).hosting("tiny", DeviceKind.GPU)
    assert str(path) in str(caught.value)
    assert "line " in str(caught.value)
    assert complaint in str(caught.value)


def test_a_profile_that_is_not_json_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"models":\n oops}')
    with pytest.raises(ConfigError, match="line 2: not valid JSON"):
        read_profile(path)
    with pytest.raises(ConfigError, match="no model 'huge'"):
        read_profile(write_profile(tmp_path, ENTRY)).hosting("huge", DeviceKind.GPU)


def test_a_workload_repeats_itself_with_its_seed() -> None:
    workload = Workload(500, 20, 2.0, zipf=1.2, cv=4.0, wave=0.5, wave_period_s=60, burst_every_s=30)
    assert generate(workload, 1) == generate(workload, 1) != generate(workload, 2)


def test_popularity_falls_with_rank_and_the_rate_is_met() -> None:
    arrivals = generate(Workload(20_000, 50, 10.0, zipf=1.0), 0)
    counts = Counter(arrival.model for arrival in arrivals)
    assert counts[0] > 1.5 * counts[1] > 3 * counts[9]
    assert 20_000 / arrivals[-1].arrival_s == pytest.approx(10.0, rel=0.05)


def test_a_larger_cv_gives_burstier_gaps() -> None:
    def variation(cv: float) -> float:
        arrivals = generate(Workload(20_000, 1, 10.0, cv=cv), 0)
        gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(arrivals)]
        mean = sum(gaps) / len(gaps)
        return float((sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean)

    assert variation(1.0) == pytest.approx(1.0, rel=0.1)
    assert variation(4.0) == pytest.approx(4.0, rel=0.2)


def test_a_table_of_lengths_is_read_and_a_bad_line_named(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("input,output\n100,20\n300,40\n")
    assert read_lengths(path) == [(100, 20), (300, 40)]
    path.write_text("input,output\n100,20\nmany,few\n")
    with pytest.raises(ConfigError, match="line 3"):
        read_lengths(path)


@needs_shared
def test_the_length_tables_at_hand_can_be_read() -> None:
    for path in sorted((SHARED / "traces" / "lengths").iterdir()):
        assert len(read_lengths(path)) > 50, path


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_serves_any_shape_and_larger_work_takes_longer(name: str) -> None:
    hardware = PRESETS[name]
    small, large = latency_of(hardware, Shape(6.0, 112, 28)), latency_of(hardware, Shape(24.0, 800, 40))
    assert 0 < small.decode_s(1, 512) < large.decode_s(1, 512) < large.decode_s(32, 32 * 2048)
    assert small.prefill_s(128) <= small.prefill_s(1024) < large.prefill_s(1024)
    assert hosting_of(hardware, Shape(6.0, 112, 28)).slots >= 1


@needs_shared
@pytest.mark.parametrize("preset", ["a100-80g", "xeon-16c-amx", "xeon-32c-amx"])
def test_the_roofline_is_within_a_fifth_of_the_measured_profiles(preset: str) -> None:
    errors = preset_errors(read_profile(PROFILE), preset)
    assert len(errors) >= 3
    for model, error in errors.items():
        assert error.prefill_mean < 0.2, model
        assert error.decode_mean < 0.2, model


def test_a_generated_trace_can_be_read_back(tmp_path: Path) -> None:
    arrivals = generate(Workload(50, 4, 1.0), 0)
    write_trace(tmp_path / "t.csv", arrivals)
    assert [row[1:] for row in read_trace(tmp_path / "t.csv")] == [row[1:] for row in arrivals]


PARALLEL_COLUMNS = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"


def test_a_table_of_split_runs_is_compared_and_a_bad_line_named(tmp_path: Path) -> None:
    path = tmp_path / "split.csv"
    path.write_text(PARALLEL_COLUMNS + "llama2-70b,h100-80gb,512,1,128,100,40,2\nllama2-70b,other,512,1,128,1,1,2\n")
    errors = parallel_errors(path)
    assert list(errors) == [("h100-80g", 2)]
    assert 0 < errors["h100-80g", 2].decode_mean < 0.5
    path.write_text(PARALLEL_COLUMNS + "llama2-70b,h100-80gb,many,1,128,100,40,2\n")
    with pytest.raises(ConfigError, match=r"split\.csv: line 2: .*many"):
        parallel_errors(path)


@needs_shared
def test_the_rooflines_of_two_gpus_are_near_a_large_model_measured_on_two() -> None:
    errors = parallel_errors(SHARED / "profiles" / "splitwise_llama70b.csv.gz")
    for preset in ("a100-80g", "h100-80g"):
        assert errors[preset, 2].prefill_mean < 0.25
        assert errors[preset, 2].decode_mean < 0.15
