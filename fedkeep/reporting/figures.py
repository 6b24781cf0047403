"""Curves over rounds by Matplotlib, for a paper and for notebooks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedkeep._utils.files import atomic_write
from fedkeep.errors import RunError, did_you_mean
from fedkeep.metrics import Floats
from fedkeep.reporting.metric import LOGGED, METRICS, metric_of
from fedkeep.reporting.run_folder import AVERAGE_SUFFIX
from fedkeep.reporting.trial import TrialResult

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


def styles(labels: Iterable[str]) -> dict[str, LineStyle]:
    """Return a style for every label, in the order of first appearance: a colour a method, dashes for its averages."""
    found: dict[str, tuple[str, int]] = {}
    for label in labels:
        # What tells variants of one label apart stands behind the name of the average.
        average = next((i for i, words in enumerate(AVERAGE_SUFFIX.values()) if words and words in label), 0)
        found[label] = label.replace(list(AVERAGE_SUFFIX.values())[average], "") if average else label, average
    places = {method: place for place, method in enumerate(dict.fromkeys(method for method, _ in found.values()))}
    return {label: LineStyle(places[method], average) for label, (method, average) in found.items()}


def theme() -> AbstractContextManager[None]:
    """Return the context in which figures are made and written: small deterministic SVG with real text."""
    import matplotlib

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


def curves(
    trials: Sequence[TrialResult],
    metric: CurveMetric,
    line_styles: Mapping[str, LineStyle] | None = None,
    window: int | None = None,
    width: float = COLUMN,
) -> Figure:
    """Draw one metric over rounds: per label the mean of its finished seeds, and a band from lowest to highest.

    An unfinished trial is a thin line of its own that ends in a cross and enters no mean.

    ``trials``: Trials of any number of labels and seeds; those of one label are taken as comparable.
    ``metric``: ``"accuracy"``, ``"forgetting"``, ``"balanced"``, ``"loss"``, or a metric by its name in CSV files.
    ``line_styles``: The styles by label, where several figures show different trials; from `styles`.
    ``window``: How many evaluations a running mean takes in, 1 for none; by default as `smoothing` says. The title
        names it.
    ``width``: In inches, by default that of a column of a paper. Letters keep their size.
    """
    curve = curve_of(metric)
    line_styles = line_styles or styles(trial.label for trial in trials)
    window = window or smoothing(trials)
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
            axes.text(0.5, 0.5, "nothing was evaluated yet", transform=axes.transAxes, ha="center", color=MUTED)
    return figure


def history(trials: Sequence[TrialResult], metric: CurveMetric, window: int = 1) -> tuple[NDArray[np.int64], Floats]:
    """Return the rounds that all trials evaluated, int64 [T], and the values there, float64 [trials, T].

    Values are in percent, losses as they are.

    With a window, each value is the mean of the last so many evaluations, or of as many as there were.
    """
    curve = curve_of(metric)
    tables = [
        dict(zip(map(int, trial.evaluated), getattr(trial, curve.history), strict=True))
        if curve.history
        else metric_of(metric).by_evaluation(trial)
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
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
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
    columns = (
        1 if beside else max(1, min(len(looks), int(72 * width // (max(map(len, looks)) * LETTER * FONT_SIZE + 47))))
    )
    if not beside:
        figure.set_size_inches(width, height + -(-len(looks) // columns) * 1.5 * FONT_SIZE / 72)
    figure.legend(
        samples,
        looks,
        loc="outside right upper" if beside else "outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=0.9 * FONT_SIZE,
        handlelength=2.5,
    )
