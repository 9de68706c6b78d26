"""The rows of `bench engines` as a picture: SVG, written as text, so that nothing need be installed for it."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from dovetail.bench.engine_figures import OURS, Row

_LABELS, _BARS, _ROW, _GAP = 230, 430, 16, 12
_COLOURS = {OURS: "#c2410c", "llama.cpp": "#2563eb", "transformers": "#7c3aed", "openvino-genai": "#059669"}
_OTHER = "#6b7280"


def draw(rows: Sequence[Row], title: str) -> str:
    """A bar per engine and cell: how many times as fast as the best peer, with quartiles; the milliseconds beside it.
    The dashed line is the best peer."""
    most = max([row.ratio_high or 1.0 for row in rows] + [1.0])
    scale = _BARS / most
    parts: list[str] = []
    y = 50
    for cell, group in _cells(rows).items():
        parts.append(_text(10, y, cell, "bold"))
        y += _GAP + 4
        for row in group:
            parts += _bar(row, y, scale)
            y += _ROW
        y += _GAP
    line = _LABELS + scale
    dashes = f'<line x1="{line:.1f}" y1="40" x2="{line:.1f}" y2="{y}" stroke="#111" stroke-dasharray="4 3"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LABELS + _BARS + 190}" height="{y + 10}"'
    frame = f'{head} font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    return "\n".join([frame, _text(10, 24, title, "bold"), *parts, dashes, "</svg>\n"])


def _cells(rows: Sequence[Row]) -> dict[str, list[Row]]:
    cells: dict[str, list[Row]] = {}
    for row in rows:
        batch = f", batch {row.batch}" if row.metric == "tpot" else ""
        cells.setdefault(f"{row.model}, {row.precision}: {row.metric}{batch}", []).append(row)
    return cells


def _bar(row: Row, y: int, scale: float) -> list[str]:
    ratio, middle = row.ratio_to_best_peer, y - 4
    width = scale * (ratio if ratio is not None else 1.0)
    low, high = (_LABELS + scale * (value if value is not None else 1.0) for value in (row.ratio_low, row.ratio_high))
    colour = _COLOURS.get(row.engine, _OTHER)
    said = f"{row.median_ms:.4g} ms" + (f" ({ratio:.2f}×)" if ratio is not None else "")
    return [
        _text(20, y, f"{row.engine} {row.weights}"),
        f'<rect x="{_LABELS}" y="{y - 10}" width="{width:.1f}" height="11" fill="{colour}"/>',
        f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}" stroke="#111" stroke-width="2"/>',
        _text(int(max(_LABELS + width, high)) + 6, y, said),
    ]


def _text(x: int, y: int, text: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}">{escape(text)}</text>'
