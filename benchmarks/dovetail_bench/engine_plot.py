"""The rows of `bench engines` as a picture."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.plots import new_figure, plain_axes, svg_of
from dovetail_bench.engine_figures import OURS, Row

_COLOURS = {OURS: "#c2410c", "llama.cpp": "#2563eb", "transformers": "#7c3aed", "openvino-genai": "#059669"}
_OTHER = "#6b7280"
_ROW_INCHES = 0.2


def draw(rows: Sequence[Row], title: str) -> str:
    """A bar per engine and cell: how many times as fast as the best peer, with quartiles; the milliseconds beside it.
    The dashed line is the best peer."""
    figure = new_figure(9, 1.2 + _ROW_INCHES * (len(rows) + 2 * len(_cells(rows))))
    axes = plain_axes(figure)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("times as fast as the best peer (median, quartiles)")
    labels: dict[float, str] = {}
    y = 0.0
    for cell, group in _cells(rows).items():
        labels[y] = cell
        for row in group:
            y += 1
            labels[y] = f"{row.engine} {row.weights}"
            _bar(axes, row, y)
        y += 2
    axes.axvline(1.0, color="#111111", linestyle="--", linewidth=1)
    axes.set_yticks(list(labels), list(labels.values()))
    axes.set_ylim(max(y, 1.0), -1.0)
    axes.set_xlim(left=0.0)
    axes.grid(visible=False, axis="y")
    return svg_of(figure)


def _bar(axes, row: Row, y: float) -> None:  # type: ignore[no-untyped-def]
    ratio = row.ratio_to_best_peer
    width = 1.0 if ratio is None else ratio
    low, high = (width if value is None else value for value in (row.ratio_low, row.ratio_high))
    spread = [[max(width - low, 0.0)], [max(high - width, 0.0)]]
    axes.barh([y], [width], height=0.7, color=_COLOURS.get(row.engine, _OTHER), xerr=spread, gid=f"bar-{y:g}")
    said = f"{row.median_ms:.4g} ms" + ("" if ratio is None else f" ({ratio:.2f}×)")
    axes.annotate(said, (max(width, high), y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)


def _cells(rows: Sequence[Row]) -> dict[str, list[Row]]:
    cells: dict[str, list[Row]] = {}
    for row in rows:
        batch = f", batch {row.batch}" if row.metric == "tpot" else ""
        cells.setdefault(f"{row.model}, {row.precision}: {row.metric}{batch}", []).append(row)
    return cells
