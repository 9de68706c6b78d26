"""What the thesis's platform is assumed to do: arithmetic per vCPU, how far it scales, how long a stage's input and
output travel, what a process needs beside the weights. Fitted, not measured.

The profiles of Wide ResNets that are shipped were made from this and say so in their `source`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.plan.chains import Chain, Layer
from dovetail.plan.fits import fit_exponential
from dovetail.plan.function_profile import (
    ColdStarts,
    CurveSection,
    FunctionProfile,
    GpuSection,
    PartitionSection,
    StageSection,
    Triple,
)
from dovetail_bench.thesis_work import passed_bytes, slowest_flops

GB = 1e9


@dataclass(frozen=True)
class Platform:
    name: str
    vcpu_flops: float  # sustained by one vCPU
    parallel_share: float  # of a run that further vCPUs speed up (Amdahl)
    weight_copies: float  # of the weights in memory: as stored, and as the convolutions want them
    runtime_gb: float  # of a process without a model
    call_s: float  # of invoking one function and getting its answer
    pass_bytes_per_s: float
    tail: float  # 99th percentile over the mean, CPU
    gpu_flops: float
    gpu_call_s: float
    gpu_tail: float
    start_s: float  # of a process without a model
    load_bytes_per_s: float
    master_gb: float = 0.4

    def run_s(self, flops: float, vcpus: float) -> float:
        """Below one vCPU a run gets a share of its time, above it Amdahl's law."""
        alone_s = flops / self.vcpu_flops
        if vcpus <= 1:
            return alone_s / vcpus
        return alone_s * (1 - self.parallel_share + self.parallel_share / vcpus)

    def pass_s(self, num_bytes: float) -> float:
        return self.call_s + num_bytes / self.pass_bytes_per_s

    def memory_gb(self, layers: Sequence[Layer]) -> float:
        weights = sum(layer.weight_bytes for layer in layers)
        largest = max(layer.in_bytes + layer.out_bytes for layer in layers)
        return self.runtime_gb + (self.weight_copies * weights + 2 * largest) / GB

    def start_of(self, layers: Sequence[Layer]) -> float:
        return self.start_s + sum(layer.weight_bytes for layer in layers) / self.load_bytes_per_s


# The thesis names the platform (Function Compute, A10, MXNet) and publishes none of its coefficients. These are fitted
# to its frontiers, within what such hardware does. `dovetail bench thesis` changes each by half, and `make frontiers`
# says what all platforms have in common that show the frontiers; docs/measurements/planner.md has both.
ALIBABA_FC = Platform(
    name="alibaba-fc",
    vcpu_flops=27.5e9,  # float32 convolutions on one hyperthread of an AVX-512 Xeon: a quarter of its peak
    parallel_share=0.925,
    weight_copies=2.0,
    runtime_gb=0.2,
    call_s=0.015,
    pass_bytes_per_s=60e6,
    tail=1.2,
    gpu_flops=4e12,  # float32 on an A10, single images: an eighth of its peak
    gpu_call_s=0.055,
    gpu_tail=1.14,
    start_s=1.5,
    load_bytes_per_s=500e6,
)
POINTS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)  # vCPUs that curves are fitted to
BATCHES = (1, 2)


def profile_of(
    chain: Chain, platform: Platform, templates: Sequence[Sequence[tuple[int, int, int]]], max_gpu_batch: int = 32
) -> FunctionProfile:
    """`templates`: of each stage its first layer, one past the last, and workers."""
    weights_s = platform.start_of(chain.layers)
    stages = [chain.layers[first:end] for template in templates for first, end, _ in template]
    return FunctionProfile(
        model=chain.name,
        source=f"assumed from arithmetic and weights: {platform}",
        memory_gb=platform.memory_gb(chain.layers),
        vcpus=(POINTS[0], POINTS[-1]),
        cpu=_curves(platform, chain.flops),
        gpu=GpuSection(
            mean=(chain.flops / platform.gpu_flops, platform.gpu_call_s),
            p99=(platform.gpu_tail, 0.0),
            memory_gb=chain.weight_bytes / GB + 2,
            max_batch=max_gpu_batch,
        ),
        partitions=tuple(_partition(chain, platform, template) for template in templates),
        cold_start_s=ColdStarts(cpu=weights_s, gpu=weights_s + 3, stage=max(map(platform.start_of, stages), default=0)),
    )


def _partition(chain: Chain, platform: Platform, template: Sequence[tuple[int, int, int]]) -> PartitionSection:
    sections = []
    passed = 0.0
    for first, end, workers in template:
        part = chain.layers[first:end]
        passed += passed_bytes(part, workers)
        curves = _curves(platform, slowest_flops(part, workers))
        memory_gb = platform.memory_gb(part)
        sections.append(StageSection(layers=(first, end), workers=workers, memory_gb=memory_gb, cpu=curves))
    passes = len(sections) - 1  # (4.10) counts one pass fewer than there are stages
    transfer = (platform.call_s * len(sections) / passes, passed / platform.pass_bytes_per_s / passes)
    return PartitionSection(transfer=transfer, stages=tuple(sections), master_memory_gb=platform.master_gb)


def _curves(platform: Platform, flops: float) -> dict[int, CurveSection]:
    curves = {}
    for batch in BATCHES:
        seconds = [platform.run_s(batch * flops, vcpus) for vcpus in POINTS]
        curve = fit_exponential(POINTS, seconds)
        mean: Triple = (curve.alpha, curve.beta, curve.gamma)
        tail: Triple = (curve.alpha * platform.tail, curve.beta, curve.gamma * platform.tail)
        curves[batch] = CurveSection(mean=mean, p99=tail)
    return curves
