"""Which client holds which classes, as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkeep.reporting.figures import import_matplotlib

_MOST_CLIENTS = 1000  # columns beyond this cannot be told apart; evenly spaced clients are shown then
_MOST_LABELS = 30  # class names that fit on the axis


def partition_figure(counts: npt.NDArray[Any], label_names: Sequence[str], title: str) -> str:
    """Draw the clients' class distribution and return it as a self-contained SVG text.

    Clients lie along x, classes along y; the colour is the number of examples on a logarithmic scale, white for none.
    The colour map keeps its order in grey and for colour-blind readers. Of more than 1,000 clients, 1,000 evenly spaced
    ones are shown, and the axis says so.
    """
    counts = np.asarray(counts)
    if counts.ndim != 2 or counts.shape[1] != len(label_names):
        raise ValueError(f"Counts of shape {counts.shape} do not fit {len(label_names)} class names.")
    # Text stays text (small, and a reader can select it); a fixed salt and no date make equal pictures equal bytes.
    with import_matplotlib().rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "fedkeep", "font.size": 9.0, "text.parse_math": False}
    ):
        buffer = io.StringIO()
        _figure(counts, label_names, title).savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    # Without the XML prolog the text can stand in an HTML page as well as in a file of its own.
    return text[text.index("<svg") :]


def _figure(counts: npt.NDArray[Any], label_names: Sequence[str], title: str) -> Any:
    """Return the matplotlib Figure of the heat map."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    clients, classes = counts.shape
    shown = np.arange(clients)
    if clients > _MOST_CLIENTS:
        shown = np.linspace(0, clients - 1, _MOST_CLIENTS).round().astype(np.int64)
    table = counts[shown].T.astype(np.float64)
    rows_high = float(np.clip(0.19 * classes, 1.4, 5.5))
    figure = Figure(figsize=(8.4, rows_high + 1.0), layout="constrained")
    axes = figure.add_subplot()
    picture = axes.imshow(
        np.ma.masked_equal(table, 0),
        norm=LogNorm(1, max(2.0, float(table.max(initial=0)))),
        cmap=_colours(),
        aspect="auto",
        interpolation="none",  # one pixel a cell in the file, scaled without smoothing by the reader's program
    )
    axes.set_title(title, loc="left", fontsize=10)
    every = f" ({len(shown):,} of {clients:,} shown, evenly spaced)" if len(shown) < clients else ""
    axes.set_xlabel(f"client{every}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    if len(shown) < clients:
        ticks = np.linspace(0, len(shown) - 1, 6).round().astype(np.int64)
        axes.set_xticks(ticks, [f"{shown[tick]:,}" for tick in ticks])
    step = -(-classes // _MOST_LABELS)
    axes.set_yticks(range(0, classes, step), [str(name) for name in label_names[::step]])
    axes.tick_params(length=2, labelsize=8)
    axes.spines[:].set_color("0.7")
    # Thin lines part the cells while there are few enough to leave room for them.
    if len(shown) <= 120 and classes <= 40:
        axes.set_xticks(np.arange(len(shown) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="0.88", linewidth=0.4)
        axes.tick_params(which="minor", length=0)
    bar = figure.colorbar(picture, ax=axes, pad=0.01, aspect=max(8.0, 6.0 * rows_high), label="examples (white: none)")
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    bar.ax.yaxis.set_minor_formatter(lambda value, _: "")
    bar.outline.set_color("0.7")
    return figure


def _colours() -> Any:
    """Return light to dark, visible against the white of empty cells from its first colour on."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    # The palest sixth of the map would be hard to tell from white.
    colours = colormaps["YlGnBu"](np.linspace(0.18, 1.0, 256))
    return LinearSegmentedColormap.from_list("fedkeep", colours).with_extremes(bad="white")
