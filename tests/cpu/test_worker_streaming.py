"""What a node of a device with memory of its own counts for a model that does not fit into it whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from dovetail import messages
from dovetail.engine.devices import Peaks
from dovetail.engine.devices.cpu import CpuDevice
from dovetail.policy.placement import DeviceKind
from dovetail.policy.streaming import ResidentLayers
from dovetail.profiles.live import LiveLatency
from dovetail.store import Catalogue
from dovetail.store.checkpoints import describe
from dovetail.types import ModelCard
from dovetail.worker.hosting import Profiles, streamed_weights
from dovetail.worker.instances import hosting_of, instance_config
from dovetail.worker.loading import InstanceConfig
from dovetail.worker.process import WorkerConfig

CONFIG = WorkerConfig(
    **dict.fromkeys([one.name for one in fields(WorkerConfig)], 0) | {"block_size": 4, "max_batch": 4}
)
LINK = 1e6  # bytes/s: a tiny layer takes a while


class Card(CpuDevice):
    """What a GPU says of itself."""

    kind = DeviceKind.GPU

    def peaks(self, dtype: str, kept: str) -> Peaks:
        return Peaks(1e12, 1e12, 1.0, 0.0, 0.0, LINK)


@pytest.fixture(params=["plain", "int8", "int4"])
def card(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path], tmp_path: Path) -> ModelCard:
    return Catalogue(tmp_path).pull(str(tiny_folder("gemma2")), name="m", dtype="f32", layout=request.param)


def configured(card: ModelCard, capacity: int, **options: Any) -> tuple[InstanceConfig, Profiles]:
    device, message = Card(1), messages.Load(card, "f32", **options)
    profiles = Profiles(None, device)
    return instance_config(message, CONFIG, device, capacity, profiles), profiles


def test_a_model_that_fits_stays_whole(card: ModelCard) -> None:
    config, profiles = configured(card, 1 << 30)
    assert config.residency is None
    hosting = hosting_of(config, profiles, 1.0, 0.0)
    assert hosting.weight_bytes == profiles.weight_bytes(card, "f32")


def test_of_one_that_does_not_as_many_layers_stay_as_fit(card: ModelCard) -> None:
    whole = Profiles(None, Card(1)).weight_bytes(card, "f32")
    needed = streamed_weights(card, "f32", "f32" if card.layout == "plain" else card.layout)
    capacity = needed.device_bytes(0) + 20_000
    assert capacity < whole + 20_000
    config, profiles = configured(card, capacity, kv_bytes=20_000)
    assert config.residency == ResidentLayers(needed.most_resident(capacity - 20_000))
    hosting = hosting_of(config, profiles, 1.0, 0.0)
    assert hosting.weight_bytes == needed.device_bytes(config.residency.layers) <= capacity - 20_000
    assert 0 < config.kv_bytes <= 20_000


def test_every_iteration_of_it_is_expected_to_take_as_long_as_the_link(card: ModelCard) -> None:
    config, profiles = configured(card, 1 << 30, resident_share=0.25)
    assert config.residency == ResidentLayers(1)  # of 4
    hosting = hosting_of(config, profiles, 1.0, 0.0)
    layers = streamed_weights(card, "f32", "f32" if card.layout == "plain" else card.layout)
    assert hosting.latency.decode_s(1, 64) >= layers.link_bytes(1) / LINK > 0
    assert hosting.latency is not profiles.latency(card, "f32")
    other, _ = configured(card, 1 << 30, resident_share=0.25)
    assert other == config


def test_the_layers_are_those_of_the_checkpoint(card: ModelCard) -> None:
    """Beside what they take in the files, which have norms, scales' padding and the embedding too."""
    kept = "f32" if card.layout == "plain" else card.layout
    layers = streamed_weights(card, "f32", kept)
    assert 0.5 * layers.total_bytes < sum(layers.kept) < layers.total_bytes
    assert layers.kept == layers.stored
    assert layers.is_unpacked == (card.layout != "plain")


def on_cpu(card: ModelCard, capacity: int, **options: Any) -> tuple[InstanceConfig, Profiles]:
    device, message = CpuDevice(1), messages.Load(card, "f32", **options)
    profiles = Profiles(None, device)
    return instance_config(message, CONFIG, device, capacity, profiles), profiles


def test_a_cpu_reads_from_the_disk_what_does_not_fit_and_nothing_else(card: ModelCard) -> None:
    whole = Profiles(None, CpuDevice(1)).weight_bytes(card, "f32")
    config, _ = on_cpu(card, 1 << 30, resident_share=0.25)
    assert config.residency is None, "the share is a GPU's"
    kept = "f32" if card.layout == "plain" else card.layout
    layers = replace(streamed_weights(card, "f32", kept), is_unpacked=False)
    capacity = layers.device_bytes(1) + 20_000
    config, profiles = on_cpu(card, capacity, kv_bytes=20_000)
    if capacity >= whole + 20_000:  # two slots take what two layers would
        assert config.residency is None
        return
    assert config.residency == ResidentLayers(layers.most_resident(capacity - 20_000))
    hosting = hosting_of(config, profiles, 1.0, 0.0)
    assert hosting.weight_bytes == layers.device_bytes(config.residency.layers) <= capacity - 20_000
    assert config.unloaded_bytes == card.size_bytes - hosting.weight_bytes
    link_s = layers.link_bytes(config.residency.layers) / profiles.disk_speed(card)
    assert hosting.latency.decode_s(1, 64) >= link_s > 0
    assert hosting.layer_s is not None
    assert 0 < hosting.layer_s < hosting.latency.decode_s(1, 1024)
    assert hosting.latency.decode_s(1, 64) >= link_s
    assert isinstance(hosting.latency, LiveLatency)
    for _ in range(50):
        hosting.latency.observe_decode(1, 64, link_s / 100)
    assert hosting.latency.decode_s(1, 64) >= link_s, "whatever is learnt"


def test_a_disk_that_is_faster_than_was_thought_makes_tokens_sooner(card: ModelCard) -> None:
    layers = replace(streamed_weights(card, "f32", "f32" if card.layout == "plain" else card.layout), is_unpacked=False)
    config, profiles = on_cpu(card, layers.device_bytes(1) + 20_000, kv_bytes=20_000)
    residency = ResidentLayers(1)
    before, speed = profiles.latency(card, "f32", residency=residency), profiles.disk_speed(card)
    assert not profiles.heard_speed(card, None)
    assert not profiles.heard_speed(card, 1.1 * speed)
    assert profiles.heard_speed(card, 4 * speed)
    after = profiles.latency(card, "f32", residency=residency)
    assert after is not before
    assert profiles.link_s(card, "f32", residency) == pytest.approx(layers.link_bytes(1) / (4 * speed))
    assert config.card.name in profiles.explain_streaming(card, "f32", residency)


def test_a_cpu_reads_no_layers_of_what_it_cannot_compute_with_as_it_lies(
    card: ModelCard, tiny_folder: Callable[[str], Path]
) -> None:
    profiles = Profiles(None, CpuDevice(1))
    assert profiles.residency(card, "f32", 1000, 100, 0.5) is None, "there is no room for two slots"
    folder = describe(tiny_folder("gemma2"), "m")
    whole = profiles.weight_bytes(folder, "f32")
    assert profiles.residency(folder, "f32", whole - 1000, 100, None) is None, "it is not in the store's form"
    if card.layout == "plain":
        assert profiles.residency(card, "bf16", whole // 2 - 1000, 100, None) is None
