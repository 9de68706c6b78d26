"""Pictures by matplotlib, as SVG: what every report and bench draws with. An extra; nothing else imports it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0b6e99", "#c4511d", "#2f7d32", "#7b3fa0", "#8a6d00", "#b0224f", "#555555", "#008a8a")
INSTALL = "drawing needs matplotlib: pip install 'dovetail[plots]'"


def require() -> None:
    """Before hours of work whose last step is a picture."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(INSTALL) from error


def new_figure(width: float, height: float) -> Figure:
    """In inches. No display, no state of pyplot's: a figure is garbage like any other object."""
    require()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain_axes(figure: Figure, rows: int = 1, columns: int = 1, index: int = 1) -> Axes:
    """With a light grid and without the frame that says nothing."""
    axes = figure.add_subplot(rows, columns, index)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return axes


def svg_of(figure: Figure) -> str:
    """The picture as text, the same for the same figure; letters stay letters, so that a browser can find them."""
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "dovetail", "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
