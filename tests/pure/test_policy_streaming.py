"""Which layers of a model stay on a device, and how those that do not take turns in its slots."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from dovetail.engine.layer_slots import LayerSlots
from dovetail.policy.latency import Curve, LatencyModel, Surface
from dovetail.policy.streaming import SLOTS, ResidentLayers, StreamedWeights, residency, streamed_layers, with_link


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 32, 80])
def test_as_many_layers_stay_as_were_asked_for_and_the_others_are_spread_evenly(num_layers: int) -> None:
    for resident in range(num_layers + 1):
        streamed = streamed_layers(num_layers, resident)
        assert len(streamed) == num_layers - resident
        assert sorted(set(streamed)) == list(streamed)
        gaps = [b - a for a, b in pairwise(streamed)]
        assert not gaps or max(gaps) - min(gaps) <= 1
    assert streamed_layers(num_layers, num_layers + 5) == ()


def llama_8b(**options: bool) -> StreamedWeights:
    layer = 436_207_616
    return StreamedWeights(32 * layer + 2_101_346_304, (layer,) * 32, (layer,) * 32, **options)


def test_a_model_takes_its_resident_share_and_two_slots() -> None:
    weights = llama_8b()
    layer, rest = weights.kept[0], weights.total_bytes - 32 * weights.kept[0]
    assert weights.device_bytes(32) == weights.total_bytes
    assert weights.device_bytes(0) == rest + SLOTS * layer
    assert weights.device_bytes(8) == rest + (8 + SLOTS) * layer
    assert llama_8b(is_unpacked=True).device_bytes(8) == rest + (8 + SLOTS + 1) * layer
    assert weights.link_bytes(8) == 24 * layer
    assert weights.link_bytes(32) == 0


@pytest.mark.parametrize("is_unpacked", [False, True])
def test_as_many_layers_stay_as_fit(is_unpacked: bool) -> None:
    weights = llama_8b(is_unpacked=is_unpacked)
    for room in range(weights.device_bytes(0), weights.total_bytes + 1, 10**8):
        most = weights.most_resident(room)
        assert most == 0 or weights.device_bytes(most) <= room
        assert all(weights.device_bytes(more) > room for more in range(most + 1, 33))
    assert weights.most_resident(0) == 0


def test_layers_of_different_sizes_are_counted_one_by_one() -> None:
    weights = StreamedWeights(1000, (10, 300, 20, 400), (5, 150, 10, 200), is_unpacked=True)
    assert streamed_layers(4, 2) == (1, 3)
    assert weights.device_bytes(2) == 1000 - 700 + 2 * 200 + 400
    assert weights.link_bytes(2) == 350


def test_all_stay_where_they_fit_beside_some_cache_unless_the_user_says_otherwise() -> None:
    weights = llama_8b()
    kv = 268_435_456
    assert residency(weights, weights.total_bytes + kv, kv, None) is None
    assert residency(weights, weights.total_bytes, kv, None) == ResidentLayers(29)  # slots take what two of them save
    assert residency(weights, 8 << 30, kv, None) == ResidentLayers(weights.most_resident((8 << 30) - kv))
    chosen = [residency(weights, 1 << 40, kv, share) for share in (0.0, 0.25, 0.5, 1.0)]
    assert chosen == [ResidentLayers(0), ResidentLayers(8), ResidentLayers(16), None]


def test_where_there_is_no_room_for_slots_layers_are_read_in_place_unless_they_are_codes() -> None:
    weights = llama_8b()
    small = weights.device_bytes(0) - 1
    assert residency(weights, small, 0, None) == ResidentLayers(0, in_place=True)
    assert weights.device_bytes(0, in_place=True) == weights.total_bytes - 32 * weights.kept[0] < small
    assert residency(weights, weights.device_bytes(0), 0, None) == ResidentLayers(0)
    assert residency(llama_8b(is_unpacked=True), small, 0, None) == ResidentLayers(0)


def test_no_iteration_is_expected_to_be_shorter_than_the_link_takes() -> None:
    prefill = Curve([(1, 0.004), (1024, 0.025), (8192, 0.4)])
    decode = Surface([(256, Curve([(1, 0.004), (256, 0.010)])), (4096, Curve([(1, 0.005), (256, 0.5)]))])
    base = LatencyModel(prefill, decode)
    linked = with_link(base, 0.25)
    for tokens in (1, 100, 1024, 4000, 8192):
        assert linked.prefill_s(tokens) >= max(0.25, base.prefill_s(tokens))
    assert linked.prefill_s(8192) == base.prefill_s(8192)
    assert linked.decode_s(1, 256) == linked.decode_s(8, 8 * 256) == 0.25
    assert linked.decode_s(256, 256 * 4096) == 0.5
    assert with_link(base, 0.0).decode_s(1, 300) == base.decode_s(1, 300)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("num_layers", [0, 1, 2, 3, 10])
def test_every_layer_is_in_its_slot_when_its_turn_comes_and_none_is_overwritten_before(
    num_layers: int, num_slots: int
) -> None:
    layers = sorted(random.Random(num_layers).sample(range(40), num_layers))
    slots = LayerSlots(layers, num_slots)
    for _ in range(3):
        copied = {slots.slot_of(layer): layer for layer in slots.begin()}
        copies = len(copied)
        for layer in layers:
            assert copied[slots.slot_of(layer)] == layer
            slots.acquire(layer)
            following = slots.release(layer)
            if following is not None:
                assert slots.slot_of(following) == slots.slot_of(layer)
                copied[slots.slot_of(layer)] = following
                copies += 1
        assert copies == num_layers


def test_a_layer_out_of_turn_is_a_mistake() -> None:
    slots = LayerSlots([1, 4, 6])
    with pytest.raises(AssertionError, match="out of turn"):
        slots.acquire(1)  # before an iteration has begun
    slots.begin()
    with pytest.raises(AssertionError, match="out of turn"):
        slots.release(4)
    slots.release(1)
    with pytest.raises(AssertionError, match="out of turn"):
        slots.release(1)
    assert slots.begin() == [1, 4], "an iteration that broke off is forgotten"
    assert slots.release(1) == 6
    assert 4 in slots
    assert 0 not in slots
