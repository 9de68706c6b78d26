"""Applications, profiles and sheets with defaults."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from dovetail.plan.batching import App
from dovetail.plan.function_profile import (
    CurveSection,
    FunctionProfile,
    PartitionSection,
    StageSection,
    read_function_profile,
)
from dovetail.plan.prices import CpuSizes, GpuSizes, PriceSheet, Rates, read_sheet
from dovetail.plan.provision import Provisioner

MODELS = ("wrn50-4", "wrn50-5")


def make_app(name: str = "a", model: str = "toy", rate: float = 1.0, slo_s: float = 2.0) -> App:
    return App(name, model, rate, slo_s)


def curve(alpha: float, gamma: float, tail: float = 1.1) -> CurveSection:
    return CurveSection(mean=(alpha, 2.0, gamma), p99=(alpha * tail, 2.0, gamma * tail))


def make_profile(**changes: Any) -> FunctionProfile:
    stage = {"memory_gb": 1.0, "cpu": {1: curve(0.5, 0.1), 2: curve(0.9, 0.2)}}
    stages = (StageSection(layers=(0, 3), **stage), StageSection(layers=(3, 6), workers=2, **stage))
    fields: dict[str, Any] = {
        "model": "toy",
        "source": "a test",
        "memory_gb": 2.0,
        "vcpus": (0.5, 8),
        "cpu": {1: curve(1.0, 0.2), 2: curve(1.9, 0.4)},
        "gpu": {"mean": (0.01, 0.02), "p99": (1.2, 0.0), "memory_gb": 4, "max_batch": 16},
        "partitions": (PartitionSection(transfer=(0.02, 0.005), stages=stages),),
    }
    return FunctionProfile.model_validate(fields | changes)


def make_sheet(**changes: Any) -> PriceSheet:
    fields: dict[str, Any] = {
        "name": "test",
        "source": "a test",
        "rates": Rates(vcpu_s=1e-5, memory_gb_s=2e-6, gpu_gb_s=3e-5, invocation=1e-7, idle_share=0.2),
        "quantum": 0.1,
        "keep_alive": 300.0,
        "cpu": CpuSizes(vcpus=(0.5, 1, 2, 4, 8), gb_per_vcpu=(0.5, 4), max_memory_gb=32),
        "gpu": GpuSizes(memory_gb=(24,), card_gb=24, vcpus=8, host_memory_gb=32),
    }
    return PriceSheet.model_validate(fields | changes)


@cache
def shipped() -> dict[str, Provisioner]:
    """The models that come with the package, on Function Compute."""
    sheet = read_sheet("alibaba-fc")
    return {model: Provisioner(read_function_profile(model), sheet) for model in MODELS}


def random_apps(seed: int, count: int, models: tuple[str, ...] = MODELS) -> list[App]:
    """Rates and SLOs over two decades each."""
    random = Random(seed)
    return [
        App(f"a{place}", random.choice(models), 0.02 * 500 ** random.random(), 0.4 * 30 ** random.random())
        for place in range(count)
    ]
