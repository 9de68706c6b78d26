"""The thesis's frontiers reproduced: which platforms give WRN50-5 three regions by SLO and WRN50-4 two, as published.

`python -m dovetail_bench.thesis_platforms [COUNT] [SEED]` draws platforms; `dovetail bench thesis` changes each
constant of the shipped one by half.

The thesis publishes no coefficients, so those of the shipped platform are fitted to its frontiers. Platforms are drawn
from ranges that contain it, and what those that show the frontiers have in common is what must have been true of the
thesis's platform.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from dovetail.errors import ConfigError
from dovetail.plan.frontier import over_slo, regions, spaced
from dovetail.plan.known_chains import chain_named
from dovetail.plan.prices import read_sheet
from dovetail.plan.provision import Provisioner
from dovetail_bench.thesis_hardware import ALIBABA_FC, Platform
from dovetail_bench.thesis_profiles import assumed_profile

RATE = 0.05
SLOS = spaced(0.05, 20, 60)
SHEET = read_sheet("alibaba-fc")
RANGES: dict[str, tuple[float, float]] = {  # of drawn platforms, least and most
    "vcpu_flops": (22e9, 50e9),
    "parallel_share": (0.86, 0.98),
    "weight_copies": (1.0, 2.5),
    "runtime_gb": (0.2, 0.5),
    "call_s": (0.01, 0.04),
    "pass_bytes_per_s": (30e6, 500e6),
    "gpu_flops": (1.8e12, 8e12),
    "gpu_call_s": (0.01, 0.07),
    "tail": (1.05, 1.2),
    "gpu_tail": (1.05, 1.25),
}
SPREAD = ("vcpu_flops", "pass_bytes_per_s", "gpu_flops")  # drawn by their logarithm
FURTHER = ("start_s", "load_bytes_per_s")  # changed by half, too; neither matters without cold starts
CHAINS = {width: chain_named(f"wrn50-{width}") for width in (4, 5)}


def draw(random: Random) -> Platform:
    def between(name: str, low: float, high: float) -> float:
        return math.exp(random.uniform(math.log(low), math.log(high))) if name in SPREAD else random.uniform(low, high)

    drawn = {name: between(name, *bounds) for name, bounds in RANGES.items()}
    return replace(ALIBABA_FC, **drawn)  # type: ignore[arg-type]


def sensitivity() -> Iterator[dict[str, Any]]:
    """The regions by SLO of both networks as shipped, and with each constant half and half as large again."""
    yield _told("as shipped", "", ALIBABA_FC)
    for name in (*RANGES, *FURTHER):
        value = getattr(ALIBABA_FC, name)
        for factor in (0.5, 1.5):
            changed = factor * value
            if name == "parallel_share":
                changed = min(changed, 1.0)
            elif name in ("tail", "gpu_tail"):
                changed = 1 + factor * (value - 1)  # what the 99th percentile has beyond the mean
            yield _told(name, f"{factor:g}", replace(ALIBABA_FC, **{name: changed}))


def _told(constant: str, factor: str, platform: Platform) -> dict[str, Any]:
    return {"constant": constant, "factor": factor} | {f"wrn50-{width}": modes(platform, width) for width in (5, 4)}


def modes(platform: Platform, width: int) -> str:
    """Such as gpu-cpu-partitioned, by rising SLO."""
    try:
        provisioner = Provisioner(assumed_profile(CHAINS[width], platform, SHEET), SHEET, cold_starts=False)
    except ConfigError:
        return "no partition is worth it"
    return "-".join(region.mode for region in regions(over_slo(provisioner, RATE, SLOS)))


def gpu_ms(platform: Platform, width: int) -> float:
    return 1e3 * (CHAINS[width].flops / platform.gpu_flops + platform.gpu_call_s)


def main() -> None:
    count, seed = (int(argument) for argument in [*sys.argv[1:], "200", "0"][:2])
    random = Random(seed)
    drawn = [draw(random) for _ in range(count)]
    three = []
    for number, platform in enumerate(drawn, 1):
        if sys.stderr.isatty():
            print(f"\r{number} of {count}", end="", file=sys.stderr)
        if modes(platform, 5) == "gpu-cpu-partitioned":
            three.append((platform, modes(platform, 4)))
    print(f"{count} platforms; WRN50-5 has its three regions on {len(three)}. There WRN50-4 has:")
    for shape, times in Counter(shape for _, shape in three).most_common(8):
        print(f"  {times:4d}  {shape}")
    both = [platform for platform, shape in three if shape == "gpu-partitioned"]
    if both:
        print("Where it has two:")
        _range("GPU run of WRN50-4, ms", [gpu_ms(platform, 4) for platform in both])
        _range("GPU run of WRN50-5, ms", [gpu_ms(platform, 5) for platform in both])
        _range("GFLOP/s of a vCPU", [platform.vcpu_flops / 1e9 for platform in both])


def _range(what: str, values: Sequence[float]) -> None:
    print(f"  {what}: {min(values):.0f} to {max(values):.0f}")


if __name__ == "__main__":
    main()
