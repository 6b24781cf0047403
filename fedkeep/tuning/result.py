"""The result of a tuning: its points, the best of them, and what is written of both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fedkeep._utils.escaping import csv_text, markdown
from fedkeep._utils.files import atomic_write
from fedkeep.experiment.recipe import SECTIONS, Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.reporting.figures import COLOURS, FONT_SIZE, GRID, INK, MUTED, PAPER, save_figure, theme
from fedkeep.reporting.metric import Metric
from fedkeep.reporting.summary import Spread
from fedkeep.reporting.table import show
from fedkeep.tuning.space import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECIPE = "recipe.toml"
"""The file in the folder of a tuning that holds the recipe."""


@dataclass(frozen=True)
class TunedPoint:
    """A point of a grid with its results.

    ``label``: Such as ``SFedKD (tau 2, teachers 3)``.
    ``method``: The method's label.
    ``point``: The options and values.
    ``values``: The metric of each seed.
    ``learned``: Whether the models of all seeds are better than guessing, in rounds that were not rolled back.
    """

    label: str
    method: str
    point: Point
    values: tuple[float, ...]
    learned: bool = True

    @property
    def spread(self) -> Spread:
        """Mean and standard deviation over seeds."""
        return Spread.of(self.values)

    def counts(self, metric: Metric) -> bool:
        """Tell whether the point may be the best: each seed has a value, and none is good for having learned nothing.

        A model that only guesses forgets nothing and does not drift, so metrics that are to be small count only models
        that have learned.
        """
        known = bool(self.values) and all(map(math.isfinite, self.values))
        return known and (self.learned or metric.better > 0)


@dataclass(frozen=True)
class Tuning:
    """The result of a tuning.

    Attributes
    ----------
    path : Path
        Its folder.
    recipe : Recipe
        The recipe that was tuned, as it is run with its own seeds on the test examples.
    metric : Metric
        What decides.
    points : tuple[TunedPoint, ...]
        All points, those of one method together, in the order of the grid.
    allow_code : bool
        Whether the recipe may import its network.
    """

    path: Path
    recipe: Recipe
    metric: Metric
    points: tuple[TunedPoint, ...]
    allow_code: bool = False

    @property
    def num_seeds(self) -> int:
        """The largest number of seeds of a point."""
        return max((len(tuned.values) for tuned in self.points), default=0)

    @cached_property
    def best(self) -> Mapping[str, TunedPoint]:
        """By method, the point with the best mean; of equals the first.

        A point that does not count (`TunedPoint.counts`), such as one that diverged, is never best.
        """
        found: dict[str, TunedPoint] = {}
        for tuned in self.points:
            value = self.metric.better * tuned.spread.mean
            before = found.get(tuned.method)
            if tuned.counts(self.metric) and (before is None or value > self.metric.better * before.spread.mean):
                found[tuned.method] = tuned
        return found


def best_recipes(tuning: Tuning) -> dict[str, Recipe]:
    """Return the recipes with the best options, for their own seeds and the test examples.

    Returns: By file name, a recipe: one with all methods, or, where the best options of sections differ between methods
        or would reach methods that were not tuned, one for each tuned method. Methods without a finished point keep
        their options.
    """
    best = tuning.best
    shared = {tuple(pair for pair in tuned.point if pair[0].rpartition(".")[0] in SECTIONS) for tuned in best.values()}
    reaches_others = any(shared) and len(best) < len(tuning.recipe.methods)
    if len(shared) <= 1 and not reaches_others:
        return {"best.toml": _best(tuning, list(best), [method.label for method in tuning.recipe.methods])}
    return {f"best-{tuning.recipe.method(label).slug}.toml": _best(tuning, [label], [label]) for label in best}


def _best(tuning: Tuning, tuned: Sequence[str], methods: Sequence[str]) -> Recipe:
    """Return the tuned recipe with some methods, and the best options of those that were tuned."""
    settings = []
    for label in tuned:
        for path, text in tuning.best[label].point:
            section, _, name = path.rpartition(".")
            settings.append(f"{path}={text}" if section in SECTIONS else f"{label}.{name}={text}")
    path = str(tuning.path / RECIPE)
    return load_recipe(path, settings=list(dict.fromkeys(settings)), methods=methods, allow_code=tuning.allow_code)


def write_tuning(tuning: Tuning) -> None:
    """Write table.md, results.csv, points.png and the recipes with the best options into a tuning's folder."""
    rows = table_of(tuning)
    heading = ("", "method", tuning.metric.title, "seeds")
    lines = [
        f"| {' | '.join(heading)} |",
        "|:--|:--|--:|--:|",
        *(f"| {' | '.join(map(markdown, row))} |" for row in rows),
    ]
    atomic_write(tuning.path / "table.md", "\n".join(lines) + "\n")
    header = ("method", "point", *(f"value {number}" for number in range(1, tuning.num_seeds + 1)))
    values = ((tuned.method, tuned.label, *tuned.values) for tuned in tuning.points)
    atomic_write(tuning.path / "results.csv", csv_text([header, *values]))
    save_figure(draw(tuning), tuning.path / "points.png")
    for name, recipe in best_recipes(tuning).items():
        atomic_write(tuning.path / name, recipe.to_toml())


def table_of(tuning: Tuning) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table: a verdict on the point, the point, its metric, its number of seeds.

    Returns: The rows, in the order of the grid. The verdict is "best", "has not learned" or empty.
    """
    best = set(map(id, tuning.best.values()))

    def verdict(tuned: TunedPoint) -> str:
        return "best" if id(tuned) in best else "" if tuned.learned else "has not learned"

    return [
        (verdict(tuned), tuned.label, show(tuned.spread, tuning.metric.unit), str(tuned.spread.n))
        for tuned in tuning.points
    ]


def draw(tuning: Tuning) -> Figure:
    """Draw the points of a tuning: a line each, a dot for each seed, a bar at the mean, the best in colour."""
    best = set(map(id, tuning.best.values()))
    factor = 100 if tuning.metric.unit == "%" else 1
    with theme():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 1.0 + 0.3 * len(tuning.points)), facecolor=PAPER, layout="constrained")
        axes = figure.add_subplot(facecolor="none")
        for place, tuned in enumerate(tuning.points):
            colour = COLOURS[0] if id(tuned) in best else MUTED
            values = [factor * value for value in tuned.values if math.isfinite(value)]
            axes.plot(values, [place] * len(values), "o", color=colour, markersize=4, alpha=0.6)
            if values:
                axes.plot([sum(values) / len(values)], [place], "|", color=colour, markersize=14, markeredgewidth=2)
        axes.set_yticks(range(len(tuning.points)), [tuned.label.replace("$", r"\$") for tuned in tuning.points])
        for label, tuned in zip(axes.get_yticklabels(), tuning.points, strict=True):
            label.set_color(COLOURS[0] if id(tuned) in best else INK)
        axes.set_ylim(len(tuning.points) - 0.5, -0.5)
        axes.set_title(
            f"{tuning.metric.title} on held-out training examples", loc="left", fontsize=FONT_SIZE, color=INK
        )
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="both", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
    return figure
