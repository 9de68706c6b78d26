"""Models with random weights of one shape, made on the GPU that they are for."""

from __future__ import annotations

from pathlib import Path

from dovetail_bench.fleet import FleetModel, Report
from dovetail_bench.gpu_switches import make_model


def random_models(
    folder: Path, shape: str, count: int, report: Report = lambda what, done, total: None
) -> list[FleetModel]:
    models = []
    for index in range(count):
        report(f"making random-{index:02d}", index, count)
        card = make_model(folder, f"random-{index:02d}", shape, index, lambda what: None)
        models.append(FleetModel(card, Path(card.path)))
    return models
