"""Where the cheapest mode changes: cost against the SLO at a rate, against the rate at an SLO; as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from dovetail.plan.batching import App, demand_of
from dovetail.plan.options import Mode
from dovetail.plan.provision import Config, Provisioner
from dovetail.plots import new_figure, plain_axes, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEPS = 60
COLOURS = {Mode.CPU: "#2563eb", Mode.GPU: "#c2410c", Mode.PARTITIONED: "#059669"}


@dataclass(frozen=True)
class Step:
    """The cheapest at one SLO or rate; None = nothing keeps the SLO."""

    x: float
    config: Config | None

    @property
    def mode(self) -> Mode | None:
        return None if self.config is None else self.config.option.mode


@dataclass(frozen=True)
class Region:
    mode: Mode
    start: float
    end: float
    cost_start: float
    cost_end: float
    batch: tuple[int, int]  # least and most


def over_slo(provisioner: Provisioner, rate: float, slos: Sequence[float]) -> list[Step]:
    return [Step(slo, _best(provisioner, rate, slo)) for slo in slos]


def over_rate(provisioner: Provisioner, slo_s: float, rates: Sequence[float]) -> list[Step]:
    return [Step(rate, _best(provisioner, rate, slo_s)) for rate in rates]


def _best(provisioner: Provisioner, rate: float, slo_s: float) -> Config | None:
    return provisioner.best(demand_of((App("", provisioner.profile.model, rate, slo_s),)))


def spaced(low: float, high: float, steps: int = STEPS) -> list[float]:
    """Equal ratios."""
    return [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]


def regions(steps: Iterable[Step]) -> list[Region]:
    """Neighbouring steps of one mode together."""
    found: list[Region] = []
    for step in steps:
        if step.config is None or step.mode is None:
            continue
        cost, batch = step.config.cost_per_request, step.config.option.batch
        if found and found[-1].mode is step.mode:
            last = found[-1]
            size = min(last.batch[0], batch), max(last.batch[1], batch)
            found[-1] = Region(last.mode, last.start, step.x, last.cost_start, cost, size)
        else:
            found.append(Region(step.mode, step.x, step.x, cost, cost, (batch, batch)))
    return found


def draw(title: str, panels: Sequence[tuple[str, Sequence[Step]]]) -> str:
    """One panel for each sweep, x by ratios; a dashed line where the mode changes."""
    figure = new_figure(5 * len(panels), 3.6)
    figure.suptitle(title, fontweight="bold")
    for index, (label, steps) in enumerate(panels, start=1):
        axes = plain_axes(figure, 1, len(panels), index)
        axes.set_xlabel(label)
        axes.set_ylabel("cost of a million requests")
        _panel(axes, [step for step in steps if step.config is not None])
    return svg_of(figure)


def _panel(axes: Axes, steps: Sequence[Step]) -> None:
    if not steps:
        axes.text(0.5, 0.5, "nothing keeps the SLO", transform=axes.transAxes, ha="center")
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    for before, step in pairwise(steps):
        if before.mode is not step.mode:
            axes.axvline(step.x, color="#111111", linestyle="--", linewidth=1)
    for mode, colour in COLOURS.items():
        own = [(step.x, 1e6 * step.config.cost_per_request) for step in steps if step.config and step.mode is mode]
        if own:
            axes.plot(*zip(*own, strict=True), "o", markersize=4, color=colour, label=str(mode))
    axes.set_ylim(bottom=0.0)
    axes.legend(frameon=False)
