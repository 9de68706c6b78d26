"""Cutting chains into stages, and where the cheapest mode changes."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

pytest.importorskip("scipy", reason="assumed profiles are fitted")

from dovetail.errors import ConfigError
from dovetail.modelspec import ModelSpec
from dovetail.plan.chains import decoder, even_cuts, shares, wide_resnet50
from dovetail.plan.frontier import over_rate, regions, spaced
from dovetail.plan.function_profile import read_function_profile
from dovetail.plan.known_chains import chain_named
from dovetail.plan.options import Mode
from dovetail.plan.prices import read_sheet
from dovetail.plan.provision import Provisioner
from dovetail_bench.thesis_hardware import ALIBABA_FC
from dovetail_bench.thesis_profiles import REFERENCE_VCPUS, assumed_profile
from dovetail_bench.thesis_templates import Partitioner, StageCut
from dovetail_bench.thesis_work import slowest_flops

SHEET = read_sheet("alibaba-fc")


def test_a_resnet50_has_its_published_size() -> None:
    chain = wide_resnet50(1)
    assert chain.weight_bytes / 4 == pytest.approx(25.6e6, rel=0.01)  # parameters, and the norms' statistics
    assert chain.flops == pytest.approx(2 * 4.1e9, rel=0.02)


def test_workers_shares_cover_every_row_once_and_reach_their_windows() -> None:
    layers = wide_resnet50(1).layers[1:8]
    parts = shares(layers, 3)
    assert [share.outputs[-1] for share in parts] == [(0, 9), (9, 18), (18, 28)]
    assert parts[0].inputs[0] == 0
    assert parts[-1].inputs[1] == 56
    assert parts[1].inputs[0] < parts[0].inputs[1]  # the halo is sent to both
    assert sum(layer.flops for layer in layers) / 3 < slowest_flops(layers, 3) < sum(layer.flops for layer in layers)


def test_the_latency_optimal_template_is_the_best_of_all_cuts() -> None:
    """Against every cut of the chain into two stages, and three, of one worker each."""
    chain = wide_resnet50(1)
    partitioner = Partitioner(chain, ALIBABA_FC, SHEET, 2.0)
    count = len(chain.layers)
    for stages, found in zip((2, 3), partitioner.candidates([1]), strict=False):
        brute = []
        for cuts in combinations(range(1, count), stages - 1):
            borders = (0, *cuts, count)
            parts = [StageCut(a, b, 1) for a, b in pairwise(borders)]
            brute.append(partitioner.template(parts).latency_s)
        assert found.latency_s == pytest.approx(min(brute))


@pytest.mark.parametrize("name", ["wrn50-4", "wrn50-5"])
def test_our_template_is_cheaper_than_the_latency_optimal_one_and_no_faster(name: str) -> None:
    partitioner = Partitioner(chain_named(name), ALIBABA_FC, SHEET, REFERENCE_VCPUS)
    ours, fastest = partitioner.best(), partitioner.latency_optimal()
    assert ours.cost < fastest.cost
    assert fastest.latency_s <= ours.latency_s


def test_even_cuts_are_the_best_of_all() -> None:
    random = Random(2)
    costs = [random.random() for _ in range(9)]
    for stages in (1, 2, 3, 4):
        cuts = even_cuts(costs, stages)
        assert [cut[0] for cut in cuts] == [0, *[cut[1] for cut in cuts[:-1]]]
        brute = min(
            max(sum(costs[a:b]) for a, b in zip((0, *inner), (*inner, 9), strict=True))
            for inner in combinations(range(1, 9), stages - 1)
        )
        assert max(sum(costs[a:b]) for a, b in cuts) == pytest.approx(brute)
    with pytest.raises(ConfigError, match="cannot be cut into 10 stages"):
        even_cuts(costs, 10)


def test_a_decoders_chain_has_all_its_parameters() -> None:
    spec = ModelSpec("llama", 1000, 64, 3, 4, 2, 16, 128, 256, tied_embeddings=True)
    chain = decoder(spec, weight_bytes=2)
    assert chain.weight_bytes == 2 * (spec.num_parameters() + 1000 * 64)  # the head's copy of the embedding
    assert [layer.name for layer in chain.layers] == ["embed", "layer0", "layer1", "layer2", "head"]


@pytest.mark.parametrize("name", ["wrn50-4", "wrn50-5"])
def test_shipped_profiles_are_what_the_assumptions_give(name: str) -> None:
    made, shipped = assumed_profile(chain_named(name), ALIBABA_FC, SHEET), read_function_profile(name)
    assert made.source == shipped.source
    assert made.cpu[1].mean == pytest.approx(shipped.cpu[1].mean, rel=1e-3)
    assert [[stage.layers for stage in p.stages] for p in made.partitions] == [
        [stage.layers for stage in p.stages] for p in shipped.partitions
    ]


def test_the_platforms_of_the_reproduction_are_drawn_around_the_shipped_one() -> None:
    from dovetail_bench.thesis_platforms import RANGES

    for name, (low, high) in RANGES.items():
        assert low <= getattr(ALIBABA_FC, name) <= high, name


def test_at_high_rates_a_gpu_in_batches_is_cheapest() -> None:
    provisioner = Provisioner(read_function_profile("wrn50-5"), SHEET, cold_starts=False)
    by_rate = regions(over_rate(provisioner, 4.0, spaced(0.01, 50)))
    assert by_rate[-1].mode is Mode.GPU
    assert by_rate[-1].batch[1] > 8
