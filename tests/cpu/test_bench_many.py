"""`bench many` with tiny models through the real server: that its figures are there and add up, not what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from server_fixture import run_command
from tiny_gguf import save_tiny_gguf

from dovetail.modelspec import ModelSpec
from dovetail.sim.trace import Arrival
from dovetail.store import Catalogue
from dovetail_bench.fleet import CHANGED, Fleet, NotDistinct, check_distinct, find_units, prompts_for, write_random
from dovetail_bench.many import compete
from dovetail_bench.servers import Settings, budget_bytes
from dovetail_bench.shapes import TINY

pytestmark = pytest.mark.slow  # whole contests of processes

SHAPE = ModelSpec("qwen2", 400, 64, 2, 4, 2, 16, 96, 512, qkv_bias=True, tied_embeddings=True)
MANY = ("bench", "many", "--models", "3", "--input", "4-8", "--output", "2-4", "--json")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model; every test finds what the ones before it have made of it."""
    folder = tmp_path_factory.mktemp("many")
    save_tiny_gguf("llama", folder / "tiny.gguf")
    return folder


def run_many(place: Path, *arguments: str) -> dict[str, Any]:
    done = run_command(*MANY, "--base", place / "tiny.gguf", "--folder", place / "fleet", *arguments)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_copies_differ_in_one_tensor_and_share_no_file(place: Path) -> None:
    models = Fleet(place / "fleet", str(place / "tiny.gguf")).make(3, 0)
    first, second = (gguf.GGUFReader(model.gguf).tensors for model in models[:2])
    different = [a.name for a, b in zip(first, second, strict=True) if not np.array_equal(a.data, b.data)]
    assert different == [CHANGED]
    assert len({path.stat().st_ino for model in models for path in model.blobs}) == 3
    assert budget_bytes(models, 1.0) == pytest.approx(3 * budget_bytes(models, 0.4) / 1.25, rel=0.01)
    with pytest.raises(NotDistinct, match="one file"):
        check_distinct([models[0], models[1], type(models[0])(models[2].card, models[0].gguf)])


def test_a_random_shape_is_a_model_that_both_can_read(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write_random(place / "tiny.gguf", path, spec=SHAPE, seed=1)
    card = Catalogue(tmp_path / "store").pull(str(path), name="random")
    assert (card.spec.family, card.spec.vocab_size, card.spec.num_layers) == ("qwen2", 400, 2)
    assert card.spec.qkv_bias


def test_a_random_model_is_made_in_a_folder_where_nothing_is_yet(place: Path, tmp_path: Path) -> None:
    model = Fleet(tmp_path / "bucket", str(place / "tiny.gguf")).make_random("one", TINY)
    assert model.gguf == tmp_path / "bucket" / "gguf" / "one.gguf"
    assert all(path.exists() for path in model.blobs)


def test_prompts_have_as_many_tokens_as_were_asked_for(place: Path) -> None:
    from tokenizers import Tokenizer

    model = Fleet(place / "fleet", str(place / "tiny.gguf")).make(1, 0)[0]
    tokenizer = Tokenizer.from_file(model.card.tokenizer_file)
    prompts = prompts_for([model], seed=3)[model.name]
    texts = [prompts.make(17) for _ in range(5)]
    assert {len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts} == {17}
    assert len(set(texts)) == 5
    assert find_units(Path(model.card.tokenizer_file))


def test_requests_are_served_and_every_figure_is_there(place: Path) -> None:
    names = "dovetail,nobody"
    report = run_many(place, "--minutes", "0.05", "--rate", "4", "--contenders", names, "--details", "--share", "0.4")
    assert report["requests"] == 12
    assert [failure["contender"] for failure in report["failures"]] == ["nobody"]
    (ours,) = report["outcomes"]
    assert ours["contender"] == "dovetail"
    figures = ours["figures"]
    assert figures["finished"] + figures["refused"] + figures["errors"] == 12
    assert figures["errors"] == 0, [answer["error"] for answer in ours["answers"]]
    assert 0 <= figures["attained"] <= figures["attained_with_grace"] <= 12
    assert 0 < figures["ttft_p50_s"] <= figures["ttft_p99_s"]
    assert sum(ours["server_outcomes"].values()) == 12
    assert ours["memory_peak_bytes"] >= ours["memory_mean_bytes"] > 50e6
    assert len(ours["samples"]) >= 2
    assert Path(ours["event_log"]).read_text().startswith('{"dovetail_sim": 1, "real": true')
    assert ours["cold_starts"]["loads"] >= 3
    assert all(each["num_tokens"] == each["output_tokens"] for each in ours["answers"] if not each["error"])
    assert report["twin"][0] == f"dovetail sim replay {ours['event_log']}"


def test_starts_and_idleness_are_measured_in_a_running_server(place: Path) -> None:
    arguments = ("--cold-start", "--runs", "2", "--idle", "--idle-wait", "1", "--minutes", "0.01", "--rate", "10")
    report = run_many(place, *arguments, "--keep-alive", "0.2")
    warm, host, disk = report["cold_start"]
    assert [each["state"] for each in (warm, host, disk)] == ["warm", "host", "disk"]
    assert [each["runs"] for each in (warm, host, disk)] == [2, 2, 2]
    assert warm["tiers"] == {"device": 2}
    assert "device" not in host["tiers"]
    assert "device" not in disk["tiers"]
    assert 0.0 <= disk["cached_share"] <= 1.0
    assert warm["over_warm_s"] == 0.0
    idle = report["idle"]
    assert idle["requests"] == 6
    assert idle["after_s"] >= 1.0
    assert idle["empty"]["pss_bytes"] > 50e6
    assert abs(idle["memory_over_empty"]) < 1.0


def test_what_cannot_be_had_is_said_and_the_rest_goes_on(place: Path, tmp_path: Path) -> None:
    models = Fleet(place / "fleet", str(place / "tiny.gguf")).make(1, 0)
    settings = Settings(tmp_path, cores=1, peers=tmp_path / "none", install=False)
    contest = compete(["llama-cpp-python"], models, [Arrival(0.0, 0, 4, 2)], settings, seed=0)
    assert not contest.outcomes
    assert contest.failures[0].contender == "llama-cpp-python"
    assert "llama" in contest.failures[0].reason
    assert contest.ratio_to_best_peer is None
