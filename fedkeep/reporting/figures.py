"""Curves over rounds by Matplotlib, for a paper and for notebooks; line charts and heatmaps of the HTML report.

A chart of the report is whole without a script: its lines are SVG paths in a square of 1,000 by 1,000 that the page
stretches, its heatmaps small PNG files, its labels text of the page, so that they keep their size on any screen. The
page's script reads the values back from the paths and the pixels; there is no second copy of them.
"""

from __future__ import annotations

import base64
import importlib
import io
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkeep._utils.files import atomic_write
from fedkeep.errors import RunError, did_you_mean
from fedkeep.metrics import Floats, kold, mean_of_known
from fedkeep.reporting.metric import LOGGED, METRICS, metric_of, rounds_covered
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import Row, deduplicate
from fedkeep.reporting.trial import TrialResult
from fedkeep.rounds.run_settings import AVERAGE_SUFFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CurveMetric: TypeAlias = str
"""One of `CURVES`, or the name of a metric."""


@dataclass(frozen=True)
class Curve:
    """What is drawn over rounds: the title of a figure, the property of a trial, the heading in the report ("": none).

    ``scale``: 100 for fractions, which are drawn in percent.
    """

    title: str
    history: str
    heading: str = ""
    scale: int = 100


CURVES: Mapping[CurveMetric, Curve] = {
    "accuracy": Curve("Accuracy on the global test set, %", "accuracies", "Accuracy over rounds, %"),
    "forgetting": Curve(
        "Forgetting, percentage points", "forgetting_history", "Forgetting over rounds, percentage points"
    ),
    "balanced": Curve("Mean class-wise accuracy, %", "balanced_history"),
    "loss": Curve("Loss on the global test set", "test_losses", "Loss on the test set over rounds", scale=1),
}


def curve_of(metric: CurveMetric) -> Curve:
    """Return what is drawn of a metric; raise `RunError` for a name that is none."""
    if metric in CURVES:
        return CURVES[metric]
    if not isinstance(metric, str):
        raise RunError(f"curves are of a metric, by its name, such as 'accuracy', not {metric!r:.80}.")
    if metric not in METRICS and not metric.startswith(LOGGED):
        raise RunError(f"There are no curves of {metric!r}.{did_you_mean(metric, [*CURVES, *METRICS])}")
    found = metric_of(metric)
    scale, unit = (100, ", %") if found.unit == "%" else (1, "")
    return Curve(f"{found.title}{unit}", "", f"{found.title} over rounds{unit}", scale)


INK, MUTED, GRID, PAPER = "#1c2530", "#5c6773", "#dde2e7", "#ffffff"
# Each at least 4.5:1 on white, of different lightness or hue for every common colour blindness; line styles differ too.
COLOURS = ("#0065a8", "#c24a00", "#007d5c", "#9b3d86", "#7a5d00", "#4a5560", "#b0203c", "#23788c", "#5b4bc4", "#5f7600")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.6), (1.2, 1.4), (9, 2), (6, 1.5, 1.2, 1.5), (3, 1, 1.2, 1, 1.2, 1))
FONT_SIZE = 8.0
COLUMN = 3.3
"""Width of a column of a paper, in inches."""
WIDE = 5.0  # inches from which a figure has room for a legend beside its axes
LETTER = 0.6  # a generous mean width of a letter, in font sizes


@dataclass(frozen=True)
class LineStyle:
    """How a method, or an average of its models, looks in every figure and table.

    ``index``: Of the method, which gives the colour.
    ``average``: Which of its models: the last one, the mean of the round, or the moving average. It gives the dashes.
    """

    index: int
    average: int = 0

    @property
    def colour(self) -> str:
        """Return the line's colour on a white ground."""
        return COLOURS[self.index % len(COLOURS)]

    @property
    def dashes(self) -> tuple[float, ...]:
        """Return on and off lengths in line widths; empty for a solid line.

        Methods beyond the number of colours have dashes of their own.
        """
        return DASHES[(self.average + len(AVERAGE_SUFFIX) * (self.index // len(COLOURS))) % len(DASHES)]


def styles(trials: Iterable[TrialResult]) -> dict[str, LineStyle]:
    """Return a style for every label, in the order of first appearance: a colour a method, dashes for its averages."""
    found, averages = {trial.label: trial for trial in trials}, list(AVERAGE_SUFFIX)
    places = {method: place for place, method in enumerate(dict.fromkeys(trial.method for trial in found.values()))}
    return {
        label: LineStyle(places[trial.method], averages.index(trial.evaluation_model)) for label, trial in found.items()
    }


def _import_matplotlib() -> Any:
    """Return matplotlib, also where MPLBACKEND names a backend that is not installed: files need none."""
    try:
        return importlib.import_module("matplotlib")
    except ValueError:
        backend = os.environ.pop("MPLBACKEND", None)
        if backend is None:
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            del sys.modules[name]  # half imported
        try:
            return importlib.import_module("matplotlib")
        finally:
            os.environ["MPLBACKEND"] = backend


def theme() -> AbstractContextManager[None]:
    """Return the context in which figures are made and written: small deterministic SVG with real text."""
    matplotlib = _import_matplotlib()
    settings: Any = {
        "svg.fonttype": "none",
        "pdf.fonttype": 42,  # letters stay letters, which journals ask for
        "svg.hashsalt": "fedkeep",
        "font.family": ["DejaVu Sans"],
        "font.size": FONT_SIZE,
        "text.color": INK,
        "axes.edgecolor": GRID,
        "axes.labelcolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "path.simplify": True,
    }
    context: AbstractContextManager[None] = matplotlib.rc_context(settings)
    return context


def smoothing(trials: Iterable[TrialResult]) -> int:
    """Return over how many evaluations `curves` averages: one for every twenty that there are, at most ten.

    The last model of a sequence swings from one evaluation to the next; many such lines over each other show nothing.
    """
    return max(1, min(10, max((len(trial.evaluated) for trial in trials), default=0) // 20))


def curves(trials: Sequence[TrialResult], metric: CurveMetric, width: float = COLUMN) -> Figure:
    """Draw one metric over rounds: per label the mean of its finished seeds, and a band from lowest to highest.

    Many evaluations are smoothed (see `smoothing`), which the title says. An unfinished trial is a thin line of its own
    that ends in a cross and enters no mean.

    ``trials``: Trials of any number of labels and seeds; those of one label are taken as comparable.
    ``metric``: ``"accuracy"``, ``"forgetting"``, ``"balanced"``, ``"loss"``, or a metric by its name in CSV files.
    ``width``: In inches, by default that of a column of a paper. Letters keep their size.
    """
    curve, line_styles, window = curve_of(metric), styles(trials), smoothing(trials)
    with theme():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, 0.66 * width), facecolor=PAPER, layout="constrained")
        axes = figure.add_subplot(facecolor="none")
        labels = dict.fromkeys(trial.label for trial in trials)
        of_labels = {label: [trial for trial in trials if trial.label == label] for label in labels}
        drawn = [label for label in labels if _draw_label(axes, of_labels[label], metric, line_styles[label], window)]
        _dress(axes, curve.title + (f" (running mean of {window} evaluations)" if window > 1 else ""))
        if drawn:
            _add_legend(figure, drawn, line_styles)
        else:
            missing = (
                f"{metric} was not measured" if any(len(t.evaluated) for t in trials) else "nothing was evaluated yet"
            )
            axes.text(0.5, 0.5, missing, transform=axes.transAxes, ha="center", color=MUTED)
    return figure


def history(trials: Sequence[TrialResult], metric: CurveMetric, window: int = 1) -> tuple[NDArray[np.int64], Floats]:
    """Return the rounds that all trials evaluated, int64 [T], and the values there, float64 [trials, T].

    Values are in percent, losses as they are.

    With a window, each value is the mean of the last so many evaluations, or of as many as there were.
    """
    curve = curve_of(metric)
    tables = [
        trial.by_round(getattr(trial, curve.history)) if curve.history else metric_of(metric).by_evaluation(trial)
        for trial in trials
    ]
    if metric == "accuracy":  # a given initial model is that of round 0
        tables = [
            ({0: t.initial_accuracy} if t.initial_model else {}) | table
            for t, table in zip(trials, tables, strict=True)
        ]
    rounds = sorted(set.intersection(*map(set, tables))) if trials else []
    values = np.asarray([[curve.scale * table[r] for r in rounds] for table in tables], dtype=np.float64)
    values = values.reshape(len(trials), len(rounds))
    measured = np.isfinite(values).all(axis=0)  # forgetting has no value at the first evaluation
    values = values[:, measured]
    means = [values[:, max(0, t + 1 - window) : t + 1].mean(axis=1) for t in range(values.shape[1])]
    return np.asarray(rounds, dtype=np.int64)[measured], np.stack(means, axis=1) if means else values


FORMATS: Mapping[str, Mapping[str, Any]] = {
    ".pdf": {"CreationDate": None},
    ".svg": {"Date": None},
    ".png": {"Software": None},
}
"""By suffix, what a file would say of when and by what it was written; without it, equal figures are equal files."""


def check_suffix(path: str | Path) -> str:
    """Return the suffix of a figure's file; raise `RunError` for one that is none of `FORMATS`."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise RunError(f"{path} names no format of a figure. End the name in {', '.join(FORMATS)}.")
    return suffix


def save_figure(figure: Figure, path: str | Path, *, dpi: int = 300) -> Path:
    """Write a figure as PDF, SVG or PNG, as its name says, the same bytes for the same figure; return the path."""
    suffix = check_suffix(path)
    file = io.BytesIO()
    with theme():
        figure.savefig(file, format=suffix[1:], dpi=dpi, metadata=dict(FORMATS[suffix]))
    return atomic_write(path, file.getvalue())


def _draw_label(axes: Axes, trials: Sequence[TrialResult], metric: CurveMetric, style: LineStyle, window: int) -> bool:
    """Draw the trials of one label; return whether there was anything to draw."""
    before = len(axes.lines)
    line: dict[str, Any] = {"color": style.colour, "solid_capstyle": "round"}
    if style.dashes:
        line["dashes"] = style.dashes
    for trial in (trial for trial in trials if not trial.finished):
        rounds, values = history([trial], metric, window)
        if len(rounds):
            axes.plot(rounds, values[0], linewidth=0.7, alpha=0.75, marker="x", markevery=[len(rounds) - 1], **line)
    rounds, values = history([trial for trial in trials if trial.finished], metric, window)
    if len(values) > 1:
        axes.fill_between(rounds, values.min(axis=0), values.max(axis=0), color=style.colour, alpha=0.13, linewidth=0)
    if len(rounds):
        one: dict[str, Any] = {"marker": "o", "markersize": 3} if len(rounds) == 1 else {}
        axes.plot(rounds, values.mean(axis=0), linewidth=1.4, **line, **one)
    return len(axes.lines) > before


def _dress(axes: Axes, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=FONT_SIZE, color=INK, pad=6, wrap=True)
    axes.set_xlabel("round", labelpad=2)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=3)
    axes.margins(x=0.0, y=0.06)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(6))


def _add_legend(figure: Figure, drawn: Iterable[str], line_styles: Mapping[str, LineStyle]) -> None:
    """Put a legend beside the axes of a wide figure, and else below, for which the figure grows."""
    from matplotlib.lines import Line2D

    looks = {label.replace("$", r"\$"): line_styles[label] for label in drawn}
    samples = [
        Line2D([], [], color=style.colour, linewidth=1.4, linestyle=(0, style.dashes) if style.dashes else "-")
        for style in looks.values()
    ]
    width, height = figure.get_size_inches()
    beside = width >= WIDE
    widest = max(map(len, looks)) * LETTER * FONT_SIZE + 47
    columns = 1 if beside else max(1, min(len(looks), int(72 * width // widest)))
    if not beside:
        figure.set_size_inches(width, height + -(-len(looks) // columns) * 1.5 * FONT_SIZE / 72)
    place = "outside right upper" if beside else "outside lower left"
    legend: Any = figure.legend
    legend(samples, looks, loc=place, ncols=columns, frameon=False, fontsize=0.9 * FONT_SIZE, handlelength=2.5)


CHART_SIDE = 1000  # of the square in which lines are drawn
MAX_HEATMAP_COLUMNS = 400  # of a heatmap, at most: more rounds are averaged, as no screen shows them apart
MAX_CLIENTS = 1000  # of more, evenly spaced ones are shown
MAX_NAMED_ROWS = 24  # more rows than this have no room for a name each
BLUE = (38, 125, 210)  # seen on white and on the dark ground
UNKNOWN = (128, 128, 128, 56)  # of what was not measured


def line_chart(rows: Sequence[Row], metric: CurveMetric, window: int = 1) -> dict[str, Any]:
    """Return a chart of one metric over rounds: the mean over the seeds of each row, and a band around all seeds.

    ``window``: How many evaluations a running mean takes in.
    Returns: ``name``, ``title`` and ``alt``; the ends of the axes, ``x`` and ``y``; ``x_ticks`` and ``y_ticks``, each
        where it stands in percent of the axis, and its text; ``series``, of each row the label, the name, its paths
        (``line``, as smoothed; ``raw``, as measured, empty where nothing is smoothed; ``band``, around all seeds, empty
        of one), and whether it is ``finished``: otherwise it is a thin line that ends in a cross.
    """
    found = [(row, *history(row.trials, metric, window), history(row.trials, metric)[1]) for row in rows]
    found = [(row, rounds, smooth, raw) for row, rounds, smooth, raw in found if len(rounds)]
    first, last = ([rounds[end] for _, rounds, _, _ in found] for end in (0, -1))
    x = (float(min(1, *first)) if first else 1.0, float(max(last, default=1)))
    curve = curve_of(metric)
    drawn = np.concatenate([smooth.ravel() for _, _, smooth, _ in found]) if found else np.zeros(0)
    y = _range(drawn, cut=curve.scale == 1)
    series, ends = [], []
    for row, rounds, smooth, raw in found:
        across = (np.asarray(rounds) - x[0]) / max(x[1] - x[0], 1)
        low, high, mean, measured = (
            (each - y[0]) / (y[1] - y[0])
            for each in (smooth.min(axis=0), smooth.max(axis=0), smooth.mean(axis=0), raw.mean(axis=0))
        )
        of_row = {"label": row.label, "name": row.name, "line": _path(across, mean), "finished": row.finished}
        of_row["raw"] = _path(across, measured) if window > 1 else ""
        of_row["band"] = f"{_path(across, low)}L{_path(across[::-1], high[::-1])[1:]}Z" if len(smooth) > 1 else ""
        series.append(of_row)
        ends.append(f"{row.name} {smooth.mean(axis=0)[-1]:.1f} at round {rounds[-1]}")
    unit = " in percent" if curve.scale == 100 else ""
    alt = f"Line chart of {metric}{unit} over rounds, one line per method. Last values: {'; '.join(ends) or 'none'}."
    x_ticks = [(100 * (tick - x[0]) / max(x[1] - x[0], 1), f"{tick:g}") for tick in _ticks(*x, whole=True)]
    y_ticks = [(100 * (tick - y[0]) / (y[1] - y[0]), f"{tick:g}") for tick in _ticks(*y)]
    shown = {"name": metric, "title": curve.heading, "alt": alt, "series": series}
    return shown | {"x": x, "y": y, "x_ticks": x_ticks, "y_ticks": y_ticks}


def _range(values: Floats, *, cut: bool) -> tuple[float, float]:
    """Return the ends of an axis.

    ``cut``: Whether a few values far above all others are cut off, such as losses that diverge.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    usual = float(np.quantile(known, 0.9))
    high = 1.5 * usual if cut and high > 5 * usual > 0 else high
    room = 0.05 * (high - low or abs(high) or 1.0)
    return low - room, high + room


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


def heatmap(
    values: ArrayLike,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    alt: str,
    axes: tuple[str, str],
    **what: Any,
) -> dict[str, Any]:
    """Return values from 0 to 1, float [rows, columns], as a picture of one pixel each; NaN, not measured, is grey.

    Of more than `MAX_HEATMAP_COLUMNS` columns neighbours are averaged. ``axes`` says what rows and columns are called.

    Returns: ``title`` and ``alt``; ``png``, in base64, in which the opacity is the value; the names of ``rows`` and
        ``columns``; ``what`` the script needs: ``rows`` and ``columns`` (what they are called), ``unit``, and ``top``,
        the value of full opacity; ``log`` if values grow with the exponential of the opacity.
    """
    from PIL import Image

    table = np.asarray(values, dtype=np.float64).reshape(len(rows), -1)
    names = list(columns)
    if table.shape[1] > MAX_HEATMAP_COLUMNS:
        parts = np.array_split(np.arange(table.shape[1]), MAX_HEATMAP_COLUMNS)
        means = [[mean_of_known(row) for row in table[:, part]] for part in parts]
        table, names = np.asarray(means).T, [names[part[0]] for part in parts]
    pixels = np.empty((*table.shape, 4), dtype=np.uint8)
    pixels[..., :3] = BLUE
    pixels[..., 3] = np.round(255 * np.clip(np.nan_to_num(table), 0, 1))
    pixels[np.isnan(table)] = UNKNOWN
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(file, format="PNG", optimize=True)
    what = {"rows": axes[0], "columns": axes[1], "unit": " %", "top": 100, **what}
    shown = {"title": title, "alt": alt, "png": base64.b64encode(file.getvalue()).decode()}
    return shown | {"rows": list(rows), "columns": names, "what": what, "named": len(rows) <= MAX_NAMED_ROWS}


def class_names(trial: TrialResult) -> list[str]:
    """Return the names of a trial's classes, or their numbers."""
    names = [str(name) for name in trial.info.get("label_names") or []]
    return names if len(names) == len(trial.test_total) else [str(number) for number in range(len(trial.test_total))]


def class_heatmaps(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the accuracy of each class over rounds for each method, with its first seed."""
    maps = []
    for row in rows:
        trial = row.trials[0]
        if len(trial.evaluated) > 1:
            names, rounds = class_names(trial), list(map(str, trial.evaluated))
            ends = zip(names, trial.class_history[-1], strict=True)
            last = ", ".join(f"{name} {100 * value:.0f}" for name, value in ends if not np.isnan(value))
            alt = f"Map of {row.name}: accuracy of each class over rounds. In percent at the end: {last}."
            maps.append(heatmap(trial.class_history.T, names, rounds, row.name, alt, ("class", "round")))
    return maps


def teacher_heatmaps(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the weight of each teacher over rounds, of methods that record who teaches; with the first seed."""
    maps = []
    for trial in deduplicate(row.trials[0] for row in rows):  # an average of models has its method's teachers
        rounds = [(entry["round"], entry["log"]) for entry in trial.rounds if (entry.get("log") or {}).get("teachers")]
        if not rounds:
            continue
        names = {str(name) for _, log in rounds for name in log["teachers"]}
        clients = sorted(names, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
        for name, words in (("target_weights", "target part"), ("nontarget_weights", "non-target part"), ("", "")):
            if (name and not all(name in log for _, log in rounds)) or (not name and "target_weights" in rounds[0][1]):
                continue
            weights = np.zeros((len(clients), len(rounds)))
            for place, (_, log) in enumerate(rounds):
                for client, weight in zip(log["teachers"], log.get(name) or [1.0] * len(log["teachers"]), strict=True):
                    weights[clients.index(str(client)), place] = weight
            top = float(weights.max()) or 1.0
            title = f"{trial.label}, weight of the {words}" if words else f"{trial.label}, teachers"
            most = clients[int(weights.sum(axis=1).argmax())]
            alt = f"Map of {title} over rounds, one row for each client that taught. The most: client {most}."
            numbers, axes = [str(number) for number, _ in rounds], ("client", "round")
            maps.append(heatmap(weights / top, clients, numbers, title, alt, axes, unit="", top=round(top, 3)))
    return maps


def confusion_heatmaps(rows: Sequence[Row]) -> list[dict[str, Any]]:
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
            maps.append(heatmap(shares, names, names, row.name, alt, ("true class", "predicted as")))
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
    shown = np.unique(np.linspace(0, len(counts) - 1, min(len(counts), MAX_CLIENTS)).round().astype(np.int64))
    top = float(counts.max()) or 1.0
    share, clients, axes = np.log1p(counts[shown].T) / np.log1p(top), list(map(str, shown)), ("class", "client")
    picture = heatmap(share, names, clients, "", alt, axes, unit=" examples", top=top, log=True)
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
    covered = {rounds_covered(trial) for line in lines if line["row"].finished for trial in line["row"].trials}
    return {"lines": lines, "covered": covered.pop() if len(covered) == 1 else "the window", "own": own}


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
