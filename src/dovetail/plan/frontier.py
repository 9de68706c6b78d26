"""Where the cheapest mode changes: cost against the SLO at a rate, against the rate at an SLO; as a picture (SVG)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from dovetail.plan.batching import App, demand_of
from dovetail.plan.options import Mode
from dovetail.plan.provision import Config, Provisioner

STEPS = 60
COLOURS = {Mode.CPU: "#2563eb", Mode.GPU: "#c2410c", Mode.PARTITIONED: "#059669"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 460, 260, 70, 36, 44


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
    width = len(panels) * _WIDTH + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT + 60}"'
    frame = f'{head} font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    parts = [frame, _text(10, 20, title, "bold")]
    for index, (label, steps) in enumerate(panels):
        parts += _panel(index * _WIDTH, label, [step for step in steps if step.config is not None])
    for index, (mode, colour) in enumerate(COLOURS.items()):
        x = 70 + 120 * index
        parts += [f'<circle cx="{x}" cy="{_HEIGHT + 42}" r="4" fill="{colour}"/>', _text(x + 8, _HEIGHT + 46, mode)]
    return "\n".join([*parts, "</svg>\n"])


def _panel(left: float, label: str, steps: Sequence[Step]) -> list[str]:
    if not steps:
        return [_text(left + _LEFT, _TOP + 40, f"{label}: nothing keeps the SLO")]
    costs = [step.config.cost_per_request for step in steps if step.config is not None]
    low, high, most = steps[0].x, steps[-1].x, max(costs) * 1.1

    def place(x: float, cost: float) -> tuple[float, float]:
        ratio = math.log(x / low) / max(math.log(high / low), 1e-9)
        return left + _LEFT + ratio * (_WIDTH - _LEFT - 20), _HEIGHT - _BOTTOM - cost / most * (
            _HEIGHT - _BOTTOM - _TOP
        )

    bottom, right = _HEIGHT - _BOTTOM, left + _WIDTH - 20
    parts = [f'<path d="M{left + _LEFT},{_TOP}V{bottom}H{right}" fill="none" stroke="#999"/>']
    parts.append(_text(left + _LEFT, bottom + 34, label))
    for part in range(5):
        x, cost = low * (high / low) ** (part / 4), most * part / 4
        across, down = place(x, cost)
        parts += [_text(across - 10, bottom + 16, f"{x:.3g}"), _text(left + 10, down + 4, f"{cost:.2g}")]
    for before, step, cost in zip([None, *steps], steps, costs, strict=False):
        across, down = place(step.x, cost)
        if before is not None and before.mode is not step.mode:
            parts.append(
                f'<line x1="{across:.1f}" y1="{_TOP}" x2="{across:.1f}" y2="{bottom}" stroke="#111" '
                'stroke-dasharray="4 3"/>'
            )
        assert step.mode is not None
        parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{COLOURS[step.mode]}"/>')
    return parts


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-weight="{weight}">{escape(text)}</text>'
