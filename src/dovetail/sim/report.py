"""A report of one or several runs as one HTML file: inline SVG, no script, nothing fetched from elsewhere.

TTFT distribution, SLO attainment, nodes in use, memory, batch sizes, and a timeline of who held which device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from dovetail.sim.metrics import Result, Sample, percentile

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM = 640, 240, 48, 24, 28
COLOURS = ("#0b6e99", "#c4511d", "#2f7d32", "#7b3fa0", "#8a6d00", "#b0224f", "#555555", "#008a8a")
STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1000px;color:#222;background:#fff}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{display:block;max-width:100%;height:auto}
.legend span{margin-right:1.2rem}.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}"""

Points = list[tuple[float, float]]


def write_report(path: Path, results: Sequence[Result], labels: Sequence[str] | None = None) -> None:
    names = list(labels or [result.policy for result in results])
    sections = [
        _table(names, results),
        _legend(names),
        _chart("TTFT: share of all requests with a first token within x seconds", names, [_cdf(r) for r in results]),
        _chart("GPU nodes in use over time (s)", names, [_over_time(r, lambda s: s.gpu_nodes) for r in results]),
        _chart("CPU nodes in use over time (s)", names, [_over_time(r, lambda s: s.cpu_nodes) for r in results]),
        _chart(
            "GPU memory planned (share)",
            names,
            [_over_time(r, lambda s: s.gpu_memory) for r in results],
        ),
        _chart("KV pool in use (share of committed)", names, [_over_time(r, lambda s: s.kv_used) for r in results]),
        _chart("Batch size: share of instance-seconds at or below x", names, [_batches(r) for r in results]),
        *[_timeline(name, result) for name, result in zip(names, results, strict=True)],
    ]
    body = "\n".join(sections)
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>Dovetail simulation</title><style>{STYLE}</style>"
    path.write_text(f"{page}<h1>Dovetail simulation</h1>{body}</html>\n", encoding="utf-8")


def _table(names: Sequence[str], results: Sequence[Result]) -> str:
    keys = list(results[0].summary())
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = ""
    for key in keys:
        cells = "".join(f"<td>{escape(str(result.summary()[key]))}</td>" for result in results)
        rows += f"<tr><td>{escape(key)}</td>{cells}</tr>"
    shares = "".join(f"<td>{result.met() / len(result.records):.1%}</td>" for result in results)
    rows += f"<tr><td>SLO attainment</td>{shares}</tr>"
    for quarter in range(4):
        cells = ""
        for result in results:
            by_popularity = result.by_popularity()
            cells += f"<td>{by_popularity[quarter]:.1%}</td>" if quarter < len(by_popularity) else "<td></td>"
        rows += f"<tr><td>… models of popularity quartile {quarter + 1}</td>{cells}</tr>"
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f"<span><i style='background:{_colour(index)}'></i>{escape(name)}</span>" for index, name in enumerate(names)
    )
    return f"<p class=legend>{items}</p>"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _cdf(result: Result) -> Points:
    ranked = sorted(record.ttft_s for record in result.records if record.first_token_s is not None)
    total = len(result.records)
    points = [(percentile(ranked, step / 200), step / 200 * len(ranked) / total) for step in range(200)]
    return [point for point in points if point[0] <= 10.0]


def _over_time(result: Result, value: Callable[[Sample], float]) -> Points:
    step = max(len(result.samples) // 300, 1)
    points = []
    for start in range(0, len(result.samples), step):
        window = result.samples[start : start + step]
        points.append((window[0].time_s, sum(value(sample) for sample in window) / len(window)))
    return points


def _batches(result: Result) -> Points:
    counts = Counter(batch for sample in result.samples for batch in sample.batches)
    total = sum(counts.values()) or 1
    points: Points = []
    so_far = 0
    for batch in sorted(counts):
        so_far += counts[batch]
        points.append((batch, so_far / total))
    return points


def _chart(title: str, names: Sequence[str], series: Sequence[Points]) -> str:
    xs = [x for points in series for x, _ in points] or [0.0]
    ys = [y for points in series for _, y in points] or [0.0]
    x_max, y_max = max(max(xs), 1e-9), max(max(ys), 1e-9)

    def place(x: float, y: float) -> str:
        across = LEFT + x / x_max * (WIDTH - LEFT - RIGHT)
        return f"{across:.1f},{HEIGHT - BOTTOM - y / y_max * (HEIGHT - BOTTOM - 12):.1f}"

    lines = ""
    for index, points in enumerate(series):
        path = " ".join(place(x, y) for x, y in points)
        lines += f"<polyline fill=none stroke='{_colour(index)}' stroke-width=1.5 points='{path}'/>"
    axes = f"<path d='M{LEFT},8V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}' fill=none stroke='#999'/>"
    ticks = "".join(_tick(place, x_max * part / 4, y_max * part / 4) for part in range(5))
    frame = f"viewBox='0 0 {WIDTH} {HEIGHT}' width={WIDTH} role=img aria-label='{escape(title)}'"
    return f"<h2>{escape(title)}</h2><svg {frame}>{axes}{ticks}{lines}</svg>"


def _tick(place: Callable[[float, float], str], x: float, y: float) -> str:
    across = place(x, 0).split(",")[0]
    down = place(0, y).split(",")[1]
    style = "font-size=11 fill='#555'"
    return (
        f"<text x={across} y={HEIGHT - 10} text-anchor=middle {style}>{x:.4g}</text>"
        f"<text x={LEFT - 6} y={down} text-anchor=end {style}>{y:.3g}</text>"
    )


def _timeline(name: str, result: Result) -> str:
    """Per node one row; each column a slice of time, coloured by the model that held the device longest in it."""
    step = max(len(result.samples) // 300, 1)
    row_height, width = 18, WIDTH - LEFT - 60
    cells = ""
    columns = -(-len(result.samples) // step)
    for row, node in enumerate(result.node_names[:32]):
        top = row * row_height
        cells += f"<text x=0 y={top + 13} font-size=11 fill='#555'>{escape(node)}</text>"
        for column in range(columns):
            held: Counter[str] = Counter()
            for sample in result.samples[column * step : (column + 1) * step]:
                held.update(sample.holders[row])
            if held and max(held.values()) > 0:
                model, busy_s = held.most_common(1)[0]
                x = 60 + column * width / columns
                hue = int(model) * 47 % 360 if model.isdigit() else len(model) * 47 % 360
                size = f"width={width / columns + 0.3:.2f} height={row_height - 3}"
                tip = f"<title>{escape(node)}: model {escape(model)}, {busy_s:.1f} s</title>"
                cells += f"<rect x={x:.1f} y={top} {size} fill='hsl({hue} 60% 55%)'>{tip}</rect>"
    height = min(len(result.node_names), 32) * row_height
    svg = f"<svg viewBox='0 0 {WIDTH} {height}' width={WIDTH} role=img aria-label='timeline'>{cells}</svg>"
    return f"<h2>Who held which device: {escape(name)}</h2>{svg}"
