"""`bench thesis`: how far the reproduction of the thesis's frontiers hangs on each fitted constant."""

from __future__ import annotations

from typing import Annotated

import typer

from dovetail.cli.output import print_json, print_table
from dovetail_bench.cli.progress import progress


def thesis(as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False) -> None:
    """Regions of the cheapest mode by SLO for WRN50-5 and WRN50-4, with each constant of the platform changed by half.

    Example: dovetail bench thesis
    """
    from dovetail_bench.thesis_platforms import sensitivity

    with progress("Plans two networks once for each constant and factor.") as step:
        rows = []
        for row in sensitivity():
            rows.append(row)
            step("constants and factors", len(rows), 0)
    if as_json:
        print_json(rows)
        return
    print_table(tuple(rows[0]), [tuple(row.values()) for row in rows])


def templates(
    model: Annotated[str, typer.Argument(help="wrn50-K.")],
    prices: Annotated[str, typer.Option(help="A price sheet: a name, or a .yaml file.")] = "alibaba-fc",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Where a network is cut: our template beside the latency-optimal one (Gillis-LO), by vCPUs per worker.

    Example: dovetail bench templates wrn50-5
    """
    from dovetail.plan.known_chains import chain_named
    from dovetail.plan.prices import read_sheet
    from dovetail_bench.thesis_hardware import ALIBABA_FC
    from dovetail_bench.thesis_profiles import REFERENCE_VCPUS, stages_of
    from dovetail_bench.thesis_templates import Partitioner

    chain, sheet = chain_named(model), read_sheet(prices)
    reference = Partitioner(chain, ALIBABA_FC, sheet, REFERENCE_VCPUS)
    ours, fastest = reference.best(), reference.latency_optimal()
    rows = []
    for vcpus in (1.5, 2.0, 2.5, 3.0, 4.0):
        at = Partitioner(chain, ALIBABA_FC, sheet, vcpus)
        a, b = at.template(ours.stages), at.template(fastest.stages)
        rows.append({"vcpus": vcpus, "ours_s": a.latency_s, "gillis_lo_s": b.latency_s, "ours_cost": a.cost,
                     "gillis_lo_cost": b.cost, "cheaper": 1 - a.cost / b.cost})  # fmt: skip
    stages = {"ours": stages_of(ours), "gillis_lo": stages_of(fastest)}
    memory = {
        "one_function_gb": reference.whole.memory_gb,
        "ours_gb": ours.memory_gb,
        "gillis_lo_gb": fastest.memory_gb,
    }
    if as_json:
        print_json({"stages": stages, "memory": memory, "sweep": rows})
        return
    for name, cuts in stages.items():
        said = ", ".join(f"layers {first}–{end - 1} on {workers}" for first, end, workers in cuts)
        print(f"{name} (at {REFERENCE_VCPUS:g} vCPUs): {said}")
    print(", ".join(f"{key} {value:.2f}" for key, value in memory.items()))
    print_table(list(rows[0]), [[f"{value:.4g}" for value in row.values()] for row in rows])
