"""Pictures of the report: line charts and heatmaps, as SVG paths and small PNG files that a page holds.

A chart is whole without a script: its lines are paths in a square of 1,000 by 1,000 that the page stretches, its labels
are text of the page, so that they keep their size on any screen. The page's script reads the values back from the paths
and the pixels; there is no second copy of them.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedkeep.reporting.figures import CurveMetric, Floats, LineStyle, history
from fedkeep.reporting.summary import Row

CHART_SIDE = 1000  # of the square in which lines are drawn
MOST_HEATMAP_COLUMNS = 400  # of a heatmap, at most: more rounds are averaged, as no screen shows them apart
MOST_NAMED_ROWS = 24  # more rows than this have no room for a name each
BLUE = (38, 125, 210)  # seen on white and on the dark ground
UNKNOWN = (128, 128, 128, 56)  # of what was not measured


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    ``label``: Of the method, by which the legend hides it.
    ``name``: The label with what is to be said of it.
    ``style``: Its colour and dashes.
    ``line``: An SVG path through the smoothed values.
    ``raw``: The same through the values as they were measured; empty if nothing is smoothed.
    ``band``: A path around all seeds; empty of one seed.
    ``finished``: An unfinished seed is drawn as a thin line that ends in a cross.
    """

    label: str
    name: str
    style: LineStyle
    line: str
    raw: str = ""
    band: str = ""
    finished: bool = True


@dataclass(frozen=True)
class Chart:
    """A line chart.

    ``name``: An identifier on the page.
    ``title``: Its heading.
    ``alt``: What it shows, for those who do not see it.
    ``x``, ``y``: The ends of the axes.
    ``x_ticks``, ``y_ticks``: Where labels stand, in percent of the axis, and their text.
    """

    name: str
    title: str
    alt: str
    x: tuple[float, float]
    y: tuple[float, float]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    series: list[Series]


def line_chart(
    rows: Sequence[Row], line_styles: Mapping[str, LineStyle], metric: CurveMetric, title: str, window: int = 1
) -> Chart:
    """Return a chart of one metric over rounds: the mean over the seeds of each row, and a band around all seeds.

    ``rows``: What it shows; unfinished ones too.
    ``metric``: As of `fedkeep.reporting.figures.curves`.
    ``window``: How many evaluations a running mean takes in.
    """
    found = [(row, *history(row.trials, metric, window), history(row.trials, metric)[1]) for row in rows]
    found = [(row, rounds, smooth, raw) for row, rounds, smooth, raw in found if len(rounds)]
    first, last = ([rounds[end] for _, rounds, _, _ in found] for end in (0, -1))
    x = (float(min(1, *first)) if first else 1.0, float(max(last, default=1)))
    y = _range(np.concatenate([smooth.ravel() for _, _, smooth, _ in found]) if found else np.zeros(0))
    series = []
    for row, rounds, smooth, raw in found:
        across = (np.asarray(rounds) - x[0]) / max(x[1] - x[0], 1)
        low, high = (_up(edge, y) for edge in (smooth.min(axis=0), smooth.max(axis=0)))
        band = f"{_path(across, low)}L{_path(across[::-1], high[::-1])[1:]}Z" if len(smooth) > 1 else ""
        series.append(
            Series(
                row.label,
                row.name,
                line_styles[row.label],
                _path(across, _up(smooth.mean(axis=0), y)),
                _path(across, _up(raw.mean(axis=0), y)) if window > 1 else "",
                band,
                row.finished,
            )
        )
    ends = [f"{row.name} {smooth.mean(axis=0)[-1]:.1f} at round {rounds[-1]}" for row, rounds, smooth, _ in found]
    unit = "" if metric == "loss" else " in percent"
    alt = f"Line chart of {metric}{unit} over rounds, one line per method. Last values: {'; '.join(ends) or 'none'}."
    ticks = [(100 * (tick - x[0]) / max(x[1] - x[0], 1), f"{tick:g}") for tick in _ticks(*x, whole=True)]
    return Chart(
        metric, title, alt, x, y, ticks, [(100 * (v - y[0]) / (y[1] - y[0]), f"{v:g}") for v in _ticks(*y)], series
    )


def _range(values: Floats) -> tuple[float, float]:
    """Return the ends of an axis; a few values far above all others are cut off, such as losses that diverge."""
    known = values[np.isfinite(values)]
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    usual = float(np.quantile(known, 0.9))
    high = 1.5 * usual if high > 5 * usual > 0 else high
    room = 0.05 * (high - low or abs(high) or 1.0)
    return low - room, high + room


def _up(values: Floats, y: tuple[float, float]) -> Floats:
    """Return how high values stand, from 0 at the bottom to 1 at the top."""
    heights: Floats = (values - y[0]) / (y[1] - y[0])
    return heights


def _path(across: ArrayLike, up: ArrayLike) -> str:
    """Return an SVG path through points."""
    points = zip(np.asarray(across, dtype=float), np.asarray(up, dtype=float), strict=True)
    return "M" + "L".join(f"{CHART_SIDE * a:.0f} {CHART_SIDE * (1 - u):.1f}" for a, u in points if math.isfinite(u))


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return four to seven round numbers between two ends."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span))
    factors = (0.1, 0.2, 0.5, 1.0) if whole else (0.1, 0.2, 0.25, 0.5, 1.0)
    step *= next((factor for factor in factors if span / (step * factor) <= 6.5), 2.0)
    step = max(step, 1.0) if whole else step
    return [round(step * k, 10) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Heatmap:
    """Values in rows and columns, as a picture of one pixel each.

    ``title``: What stands above it.
    ``alt``: What it shows, for those who do not see it.
    ``png``: The picture, in base64: of each pixel the opacity is the value.
    ``rows``: The names of the rows, from above.
    ``columns``: The names of the columns, or of the first of those that were averaged.
    ``what``: For the script: ``rows`` and ``columns`` (what they are called), ``unit``, and ``top``, the value of full
        opacity; ``log`` if values grow with the exponential of the opacity.
    """

    title: str
    alt: str
    png: str
    rows: list[str]
    columns: list[str]
    what: dict[str, Any]

    @property
    def named(self) -> bool:
        """Tell whether there is room for the name of every row."""
        return len(self.rows) <= MOST_NAMED_ROWS


def heatmap(
    values: ArrayLike,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    alt: str,
    axes: tuple[str, str],
    unit: str,
    **what: Any,
) -> Heatmap:
    """Return a heatmap of values from 0 to 1, float [rows, columns]; NaN, what was not measured, is grey.

    Of more than `MOST_HEATMAP_COLUMNS` columns neighbours are averaged. ``axes`` says what rows and columns are called.
    """
    table = np.asarray(values, dtype=np.float64).reshape(len(rows), -1)
    names = list(columns)
    if table.shape[1] > MOST_HEATMAP_COLUMNS:
        parts = np.array_split(np.arange(table.shape[1]), MOST_HEATMAP_COLUMNS)
        known = [np.where(np.isnan(table[:, part]).all(axis=1), np.nan, _mean(table[:, part])) for part in parts]
        table, names = np.stack(known, axis=1), [names[part[0]] for part in parts]
    pixels = np.empty((*table.shape, 4), dtype=np.uint8)
    pixels[..., :3] = BLUE
    pixels[..., 3] = np.round(255 * np.clip(np.nan_to_num(table), 0, 1))
    pixels[np.isnan(table)] = UNKNOWN
    what = {"rows": axes[0], "columns": axes[1], "unit": unit, "top": 100, **what}
    return Heatmap(title, alt, _png(pixels), list(rows), names, what)


def _mean(values: Floats) -> Floats:
    """Return the mean of the known values of each row; 0 where none is."""
    known = ~np.isnan(values)
    means: Floats = np.where(known, values, 0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    return means


def _png(pixels: Any) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(file, format="PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
