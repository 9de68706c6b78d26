"""A report of one or several runs as one HTML file: inline SVG by matplotlib, no script, nothing fetched.

TTFT distribution, SLO attainment, nodes in use, memory, batch sizes, and a timeline of who held which device.
"""

from __future__ import annotations

import colorsys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from dovetail.plots import COLOURS, new_figure, plain_axes, svg_of
from dovetail.sim.metrics import Result, Sample, percentile

WIDTH, HEIGHT = 8.0, 2.8  # inches
MAX_POINTS = 300  # of a line
MAX_NODES = 32
STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1000px;color:#222;background:#fff}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{display:block;max-width:100%;height:auto}
.legend span{margin-right:1.2rem}.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}"""

Points = list[tuple[float, float]]


# What the keys of `Result.summary` are called where people read them.
WORDS = {
    "policy": "policy",
    "requests": "requests",
    "slo_met": "requests within their SLO",
    "slo_met_strict": "within their SLO, every token counted",
    "slo_met_without_grace": "within their SLO, cold starts not excused",
    "broken_promises": "accepted with an SLO of their own, and late",
    "broken_answers": "of these, after the first token",
    "silence_p50_s": "longest gap between tokens, median (s)",
    "silence_p99_s": "longest gap between tokens, 99th percentile (s)",
    "silence_max_s": "longest gap between tokens, worst (s)",
    "dropped": "given up after queueing",
    "rejected": "refused",
    "failed": "failed",
    "cpu_nodes_mean": "CPU nodes in use, mean",
    "gpu_nodes_mean": "GPU nodes in use, mean",
    "ttft_p50_s": "time to first token, median (s)",
    "ttft_p95_s": "time to first token, 95th percentile (s)",
    "tpot_p50_s": "time per further token, median (s)",
    "cold_starts": "cold starts",
    "batch_mean": "sequences in a decode, mean",
    "priority": "requests that go first",
    "priority_met": "of these, within their SLO",
    "best_effort": "best-effort requests",
    "best_effort_unended": "of these, without all their tokens",
    "best_effort_tokens_per_s": "tokens of best effort per second",
    "moves": "moves to another node",
    "events": "events simulated",
    "wall_s": "seconds the simulation took",
}


def write_report(
    path: Path,
    results: Sequence[Result],
    labels: Sequence[str] | None = None,
    origin: Mapping[str, object] | None = None,
) -> None:
    """`origin`: what was run (trace, profile, seed), shown at the top."""
    names = list(labels or [result.policy for result in results])
    told = " · ".join(f"{key}: {value}" for key, value in (origin or {}).items())
    sections = [
        f"<p>{escape(told)}</p>",
        _table(names, results),
        _legend(names),
        _chart("TTFT: first token within x seconds", "seconds", "requests (%)", [_cdf(r) for r in results]),
        _over("GPU nodes in use", "nodes", results, lambda sample: sample.gpu_nodes),
        _over("CPU nodes in use", "nodes", results, lambda sample: sample.cpu_nodes),
        _over("GPU memory planned", "of the memory (%)", results, lambda sample: 100 * sample.gpu_memory),
        _over("KV pool in use", "of what is committed (%)", results, lambda sample: 100 * sample.kv_used),
        _chart("Batch size: at most x sequences", "sequences", "instance-seconds (%)", [_batches(r) for r in results]),
        *[_timeline(name, result) for name, result in zip(names, results, strict=True)],
    ]
    body = "\n".join(sections)
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>Dovetail simulation</title><style>{STYLE}</style>"
    path.write_text(f"{page}<h1>Dovetail simulation</h1>{body}</html>\n", encoding="utf-8")


def _over(title: str, y_label: str, results: Sequence[Result], value: Callable[[Sample], float]) -> str:
    return _chart(title, "time (s)", y_label, [_over_time(result, value) for result in results])


def _table(names: Sequence[str], results: Sequence[Result]) -> str:
    keys = list(results[0].summary())
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = ""
    for key in keys:
        cells = "".join(f"<td>{escape(str(result.summary()[key]))}</td>" for result in results)
        rows += f"<tr><td>{escape(WORDS.get(key, key))}</td>{cells}</tr>"
    shares = "".join(f"<td>{result.met() / len(result.waited_for):.1%}</td>" for result in results)
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
    ranked = sorted(record.ttft_s for record in result.waited_for if record.first_token_s is not None)
    total = len(result.waited_for)
    points = [(percentile(ranked, step / 200), step / 2 * len(ranked) / total) for step in range(200)]
    return [point for point in points if point[0] <= 10.0]


def _over_time(result: Result, value: Callable[[Sample], float]) -> Points:
    step = max(len(result.samples) // MAX_POINTS, 1)
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
        points.append((batch, 100 * so_far / total))
    return points


def _chart(title: str, x_label: str, y_label: str, series: Sequence[Points]) -> str:
    """Shares are in per cent, from 0."""
    figure = new_figure(WIDTH, HEIGHT)
    axes = plain_axes(figure)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    for index, points in enumerate(series):
        axes.plot([x for x, _ in points], [y for _, y in points], color=_colour(index), linewidth=1.4)
    axes.set_xlim(left=0.0)
    axes.set_ylim(bottom=0.0)
    return f"<h2>{escape(title)}</h2>{svg_of(figure)}"


def _timeline(name: str, result: Result) -> str:
    """Per node one row; each column a slice of time, coloured by the model that held the device longest in it."""
    nodes = result.node_names[:MAX_NODES]
    step = max(len(result.samples) // MAX_POINTS, 1)
    starts = range(0, len(result.samples), step)
    times = [result.samples[start].time_s for start in starts]
    figure = new_figure(WIDTH, 0.7 + 0.22 * len(nodes))
    axes = plain_axes(figure)
    for row in range(len(nodes)):
        spans: dict[str, list[tuple[float, float]]] = {}
        for column, start in enumerate(starts):
            held: Counter[str] = Counter()
            for sample in result.samples[start : start + step]:
                held.update(sample.holders[row])
            if held and max(held.values()) > 0:
                until = times[column + 1] if column + 1 < len(times) else result.samples[-1].time_s
                spans.setdefault(held.most_common(1)[0][0], []).append((times[column], until - times[column]))
        for model, pieces in spans.items():
            axes.broken_barh(pieces, (row - 0.4, 0.8), facecolors=_colour_of(model))
    axes.set_yticks(range(len(nodes)), nodes)
    axes.set_ylim(len(nodes) - 0.5, -0.5)
    axes.set_xlabel("time (s)")
    axes.grid(visible=False, axis="y")
    return f"<h2>Who held which device: {escape(name)}</h2>{svg_of(figure)}"


def _colour_of(model: str) -> tuple[float, float, float]:
    """Neighbouring models get colours that differ."""
    number = int(model) if model.isdigit() else zlib.crc32(model.encode())
    return colorsys.hls_to_rgb(number * 47 % 360 / 360, 0.55, 0.6)
