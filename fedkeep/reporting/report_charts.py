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

from fedkeep.metrics import Floats, kold
from fedkeep.reporting.figures import CurveMetric, LineStyle, curve_of, history
from fedkeep.reporting.metric import rounds_covered
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import Row
from fedkeep.reporting.trial import TrialResult

CHART_SIDE = 1000  # of the square in which lines are drawn
MOST_HEATMAP_COLUMNS = 400  # of a heatmap, at most: more rounds are averaged, as no screen shows them apart
MOST_CLIENTS = 1000  # of more, evenly spaced ones are shown
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
    rows: Sequence[Row], line_styles: Mapping[str, LineStyle], metric: CurveMetric, window: int = 1
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
    curve = curve_of(metric)
    unit = " in percent" if curve.scale == 100 else ""
    alt = f"Line chart of {metric}{unit} over rounds, one line per method. Last values: {'; '.join(ends) or 'none'}."
    x_ticks = [(100 * (tick - x[0]) / max(x[1] - x[0], 1), f"{tick:g}") for tick in _ticks(*x, whole=True)]
    y_ticks = [(100 * (tick - y[0]) / (y[1] - y[0]), f"{tick:g}") for tick in _ticks(*y)]
    return Chart(metric, curve.heading, alt, x, y, x_ticks, y_ticks, series)


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


def class_names(trial: TrialResult) -> list[str]:
    """Return the names of a trial's classes, or their numbers."""
    names = [str(name) for name in trial.info.get("label_names") or []]
    return names if len(names) == len(trial.test_total) else [str(number) for number in range(len(trial.test_total))]


def class_heatmaps(rows: Sequence[Row]) -> list[Heatmap]:
    """Return the accuracy of each class over rounds for each method, with its first seed."""
    maps = []
    for row in rows:
        trial = row.trials[0]
        if len(trial.evaluated) > 1:
            last = ", ".join(
                f"{name} {100 * value:.0f}"
                for name, value in zip(class_names(trial), trial.class_history[-1], strict=True)
                if not np.isnan(value)
            )
            alt = f"Map of {row.name}: accuracy of each class over rounds. In percent at the end: {last}."
            maps.append(
                heatmap(
                    trial.class_history.T, class_names(trial), [str(number) for number in trial.evaluated], row.name,
                    alt, ("class", "round"), " %",
                )
            )  # fmt: skip
    return maps


def teacher_heatmaps(rows: Sequence[Row]) -> list[Heatmap]:
    """Return the weight of each teacher over rounds, of methods that record who teaches; with the first seed."""
    maps = []
    seen = set()
    for row in rows:
        trial = row.trials[0]
        rounds = [(entry["round"], entry["log"]) for entry in trial.rounds if (entry.get("log") or {}).get("teachers")]
        if not rounds or trial.path in seen:
            continue  # an average of a method's models has the method's teachers
        seen.add(trial.path)
        clients = sorted({str(name) for _, log in rounds for name in log["teachers"]}, key=_natural)
        for name, words in (("target_weights", "target part"), ("nontarget_weights", "non-target part"), ("", "")):
            if (name and not all(name in log for _, log in rounds)) or (not name and "target_weights" in rounds[0][1]):
                continue
            weights = np.zeros((len(clients), len(rounds)))
            for place, (_, log) in enumerate(rounds):
                for client, weight in zip(log["teachers"], log.get(name) or [1.0] * len(log["teachers"]), strict=True):
                    weights[clients.index(str(client)), place] = weight
            top = float(weights.max()) or 1.0
            title = f"{row.label}, weight of the {words}" if words else f"{row.label}, teachers"
            most = clients[int(weights.sum(axis=1).argmax())]
            alt = f"Map of {title} over rounds, one row for each client that taught. The most: client {most}."
            maps.append(
                heatmap(
                    weights / top, clients, [str(number) for number, _ in rounds], title, alt,
                    ("client", "round"), "", top=round(top, 3),
                )
            )  # fmt: skip
    return maps


def confusion_heatmaps(rows: Sequence[Row]) -> list[Heatmap]:
    """Return how often each class was taken for each at the end, in shares of the true class; with the first seed."""
    maps = []
    for row in rows:
        trial = row.trials[0]
        counts = np.asarray(trial.confusions, dtype=np.float64)
        if len(counts):
            total = counts.sum(axis=1, keepdims=True)
            shares = np.divide(counts, total, out=np.full_like(counts, np.nan), where=total > 0)
            wrong = np.nan_to_num(shares * (1 - np.eye(len(shares))))
            true, taken = divmod(int(wrong.argmax()), len(shares))
            names = class_names(trial)
            alt = (
                f"Confusion matrix of {row.name}, true classes in rows, predicted ones in columns. Most often "
                f"{names[true]} is taken for {names[taken]}, {100 * wrong[true, taken]:.0f} %."
            )
            maps.append(heatmap(shares, names, names, row.name, alt, ("true class", "predicted as"), " %"))
    return maps


def partition_heatmap(run: Run) -> dict[str, Any]:
    """Return the heatmap of the first partition, its seed, and how many different partitions there are besides."""
    drawn = next((trial for trial in run.trials if trial.partition.get("counts")), None)
    if drawn is None:
        return {"map": None, "others": 0, "seed": None}
    counts = np.asarray(drawn.partition["counts"], dtype=np.float64)
    names = list(map(str, drawn.info.get("label_names") or range(counts.shape[1])))
    alt = (
        f"Map of the examples per client and class: {len(counts)} clients, {len(names)} classes; a client holds "
        f"{(counts > 0).sum(axis=1).mean():.1f} classes and {counts.sum(axis=1).mean():.0f} examples on average."
    )
    shown = np.unique(np.linspace(0, len(counts) - 1, min(len(counts), MOST_CLIENTS)).round().astype(np.int64))
    top = float(counts.max()) or 1.0
    share = np.log1p(counts[shown].T) / np.log1p(top)
    picture = heatmap(
        share, names, [str(client) for client in shown], "", alt,
        ("class", "client"), " examples", top=top, log=True,
    )  # fmt: skip
    hashes = {str(trial.partition.get("hash", trial.seed)) for trial in run.trials if trial.partition}
    return {"map": picture, "others": len(hashes) - 1, "seed": drawn.seed, "top": f"{top:,.0f}"}


def client_accuracies(rows: Sequence[Row]) -> dict[str, Any]:
    """Return for each client the model's accuracy on classes in the client's proportions.

    It is the mean over the window (unfinished: of the last evaluation) of the accuracies on clients' own test examples;
    where they have none, of the class-wise test accuracies, weighted by the client's label distribution.

    Returns: ``lines`` of a ``row``, the ``texts`` of its columns, and its ``box``: the quantiles 0, 0.1, 0.5, 0.9 and
        1.
    """
    lines: list[dict[str, Any]] = []
    for row in rows:
        values = np.concatenate([_of_clients(trial) for trial in row.trials])
        if len(values):
            worst = np.sort(values)[: max(1, len(values) // 10)]
            columns = (values.mean(), worst.mean(), values.min(), values.std(ddof=1) if len(values) > 1 else 0.0)
            box = [100 * float(value) for value in np.quantile(values, [0, 0.1, 0.5, 0.9, 1])]
            lines.append({"row": row, "texts": [f"{100 * value:.1f}" for value in columns], "box": box})
    own = any(trial.client_history for row in rows for trial in row.trials)
    return {"lines": lines, "covered": _covered([line["row"] for line in lines]), "own": own}


def _of_clients(trial: TrialResult) -> Floats:
    """Return the accuracy of a trial's model for each client, float64 [clients]; empty where it is not known."""
    if trial.client_history:
        told = trial.client_history
        shown = [of for number, of in told.items() if trial.windows and number in trial.windows[-1]]
        shown = shown or list(told.values())[-1:]
        names = dict.fromkeys(client for of in shown for client in of)
        return np.asarray([np.mean([of[client] for of in shown if client in of]) for client in names])
    counts = trial.partition.get("counts") or []
    if not len(trial.evaluated) or trial.task_sizes or any(len(held) != len(trial.test_total) for held in counts):
        return np.zeros(0)
    window = trial.windows[-1] if trial.windows else range(0)
    inside = [number in window for number in trial.evaluated]
    history = trial.class_history[inside] if any(inside) else trial.class_history[-1:]
    accuracy = history.mean(axis=0)
    values = [kold(held, accuracy)[0] for held in np.asarray(counts, dtype=np.float64) if sum(held)]
    return np.asarray([value for value in values if not np.isnan(value)])


def _covered(rows: Sequence[Row]) -> str:
    """Return the rounds that are covered, if they are the same of all rows."""
    covered: Mapping[str, None] = dict.fromkeys(rounds_covered(row.trials[0]) for row in rows if row.finished)
    return next(iter(covered)) if len(covered) == 1 else "the window"


def _natural(name: str) -> tuple[int, int, str]:
    """Sort numbers as numbers, before words."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)
