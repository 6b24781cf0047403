"""Choosing options on held-out training examples, with seeds that are not reported."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import tomli_w

from fedkeep._utils.escaping import csv_text, markdown
from fedkeep._utils.files import atomic_write
from fedkeep.errors import ConfigError, RunError, require_optional
from fedkeep.experiment.experiment import Experiment, Trial
from fedkeep.experiment.overrides import grid_label, parse_value, split_grid
from fedkeep.experiment.recipe import SECTIONS, Method, Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import create_run_folder, open_run
from fedkeep.experiment.runtime import Machine, OnProgress
from fedkeep.experiment.trial_runner import run_trials
from fedkeep.options import options_of, plain
from fedkeep.reporting.metric import Metric, metric_of
from fedkeep.reporting.run_folder import AVERAGE_SUFFIX, method_of, read_run
from fedkeep.reporting.summary import Row, Spread
from fedkeep.reporting.table import show
from fedkeep.reporting.trial import TrialResult
from fedkeep.rounds.evaluation_models import EvaluationModel

FILE, POINTS, RECIPE = "tune.json", "points", "recipe.toml"
"""What a folder of a tuning holds: its settings, a run folder for each point, and its recipe."""
SEEDS = (100, 101)
"""The seeds of a tuning unless others are given."""
Point = tuple[tuple[str, str], ...]
"""Options and their values as text, such as ``(("sfedkd.tau", "2"), ("training.lr", "0.1"))``."""


@dataclass(frozen=True)
class Dimension:
    """An option and what to try for it.

    ``path``: The option, written ``method.option``, ``algorithm.option`` or ``section.option``.
    ``values``: The values as text.
    ``ends``: Instead of values, the ends of a range, which only a search can sample.
    """

    path: str
    values: tuple[str, ...] = ()
    ends: tuple[float, float] | None = None

    def touches(self, method: Method) -> bool:
        """Return whether it changes a method's results: as an option of the method, or of a section of the recipe."""
        section, _, name = self.path.rpartition(".")
        if section.casefold() == "algorithm":
            return name in options_of(type(method.algorithm))
        return section.casefold() in (*SECTIONS, method.label.casefold(), method.algorithm.name())


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


def tune(
    recipe: str | Recipe,
    grid: Mapping[str, Any] | Sequence[str],
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] = SEEDS,
    rounds: int | None = None,
    validation: float | None = None,
    settings: Sequence[str] = (),
    metric: str | None = None,
    search: int = 0,
    reported_seeds: bool = False,
    out: str | Path | None = None,
    machine: Machine | None = None,
    on_progress: OnProgress | None = None,
) -> Tuning:
    """Try values of options on held-out training examples, and write the recipe with the best.

    The test examples are never used: a part of each class's training examples takes their place, and no client holds
    it. The same call with the same ``out`` continues a tuning that was stopped.

    Parameters
    ----------
    recipe : str or Recipe
        A recipe's name, a path to a .toml file, or a `Recipe`.
    grid : Mapping[str, object] or Sequence[str]
        What to try, such as ``{"sfedkd.tau": [1, 2, 4], "training.lr": [0.01, 0.1]}``. Options of a method vary for
        that method, those of a section for each method.
    methods : Sequence[str], optional
        Methods to tune; default: those whose options the grid names, or all if it names sections only.
    seeds : Sequence[int]
        The seeds, which should not be those whose results are reported.
    rounds : int, optional
        Rounds instead of the recipe's.
    validation : float, optional
        The share of each class's training examples that is held out; default: the recipe's, or 0.1.
    settings : Sequence[str]
        Changes to the recipe, such as ``"training.lr=0.05"``, which the best recipe keeps.
    metric : str, optional
        What decides: the name of a table's column; default: the recipe's ``run.metric``, or else accuracy over the
        window.
    search : int
        Instead of the whole grid, so many points for each method, which Optuna chooses one after another (extra
        ``tune``). The grid may then contain ranges such as ``"0.001..0.1"``.
    reported_seeds : bool
        Allow the recipe's own seeds, whose results are then no longer a fair comparison.
    out : str or Path, optional
        The folder; default: a new one under ``runs/``.
    machine : Machine, optional
        Device, threads and workers.
    on_progress : Callable[[Progress], None], optional
        Called after every round.

    Returns
    -------
    Tuning
        All points with their results, and the best of each method.

    Raises
    ------
    FedKeepError
        For anything that cannot be tuned as asked, before any training starts.
    """
    machine = machine or Machine()
    if not all(isinstance(method, str) for method in methods or ()):
        raise ConfigError(
            "methods= of fedkeep.tune are names or labels of a recipe's methods, such as 'sfedkd'. Options of a method "
            "object go into a recipe: write its table [[methods]] there, or give settings such as 'sfedkd.tau=1'."
        )
    if isinstance(recipe, str):
        recipe = load_recipe(
            recipe, settings=settings, methods=methods, rounds=rounds, grid=False, allow_code=machine.allow_code
        )
    elif settings or methods is not None or rounds is not None:
        raise ConfigError("settings, methods and rounds change a recipe given by name; change a Recipe directly.")
    space = read_space(grid)
    share = validation if validation is not None else recipe.validation or 0.1
    if share == 0:
        raise ConfigError("tuning needs held-out training examples. Give a share above 0, such as --validation 0.1.")
    both = sorted({*seeds} & {*recipe.seeds})
    if both and not reported_seeds:
        raise ConfigError(
            f"seeds {', '.join(map(str, both))} are the recipe's own, whose results are reported: options chosen on "
            "them look better than they are. Tune on others, such as --seeds 100,101, or allow it with "
            "--reported-seeds."
        )
    accuracy = "window_incremental" if recipe.has_tasks else "window_mean"
    chosen = metric_of(metric or recipe.run.metric or accuracy)
    if not chosen.better:
        raise ConfigError(f"methods are not ranked by {chosen.name}. Choose accuracy or forgetting.")
    folder, varied = _folder(recipe, out), _methods(recipe, space, methods)
    job = _Job(folder, recipe, space, tuple(seeds), share, chosen, machine, on_progress)
    job.begin(varied, search)
    points: list[TunedPoint] = []
    for number, method in enumerate(varied, start=1):
        place = folder / POINTS / f"{number:02d}-{method.slug}"
        points += job.search(place, method, search) if search else job.grid(place, method)
    result = Tuning(folder, recipe, chosen, tuple(points), machine.allow_code)
    write_tuning(result)
    return result


def _methods(recipe: Recipe, space: Sequence[Dimension], wanted: Sequence[str] | None) -> tuple[Method, ...]:
    """Return the methods to tune; raise `ConfigError` for an option that none of them has."""
    for dimension in space:
        if not any(dimension.touches(method) for method in recipe.methods):
            raise ConfigError(
                f"the grid names {dimension.path}, which no method of the recipe has. Its methods: "
                f"{', '.join(method.label for method in recipe.methods)}. Choose others with --methods."
            )
    if wanted is not None:
        return recipe.methods
    named = [d for d in space if not all(d.touches(method) for method in recipe.methods)]
    return tuple(m for m in recipe.methods if not named or any(d.touches(m) for d in named))


def _folder(recipe: Recipe, out: str | Path | None) -> Path:
    if out is not None:
        return Path(out)
    stem = Path(recipe.name).stem if recipe.name.endswith(".toml") else recipe.name.replace("/", "-")
    return Path("runs") / f"tune-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def read_space(grid: Mapping[str, Any] | Sequence[str]) -> tuple[Dimension, ...]:
    """Read what to try.

    ``grid``: By option, a list of values or a range as text: ``{"sfedkd.tau": [1, 2, 4]}``; or the same as text,
        ``"sfedkd.tau=1,2,4"`` and ``"training.lr=0.001..0.1"``.
    """
    if isinstance(grid, Mapping):
        lines = [(path, _texts(path, values)) for path, values in grid.items()]
    else:
        lines = [split_grid(line) for line in grid]
    found: dict[str, Dimension] = {}
    for path, values in lines:
        if path in found:
            raise ConfigError(f"the grid names {path} twice. Put its values into one list.")
        ends = values[0].split("..") if len(values) == 1 else []
        if len(ends) == 2:
            low, high = map(parse_value, ends)
            if not {type(low), type(high)} <= {int, float} or not low < high:
                raise ConfigError(f"the grid's range {path}={values[0]} needs two numbers, such as 0.001..0.1.")
            found[path] = Dimension(path, ends=(low, high))
        else:
            found[path] = Dimension(path, tuple(values))
    if not found:
        raise ConfigError("there is nothing to tune. Name values to try, such as --grid sfedkd.tau=1,2,4.")
    return tuple(found.values())


def _texts(path: str, values: Any) -> list[str]:
    values = plain(values)
    if isinstance(values, str):
        return split_grid(f"{path}={values}")[1]
    if not isinstance(values, list | tuple | range) or not len(values):
        raise ConfigError(f"the grid of {path} must be a list of values or a range such as '0.001..0.1'.")
    return [tomli_w.dumps({"v": plain(value)}).partition("=")[2].strip() for value in values]


def points_of(space: Sequence[Dimension], method: Method) -> list[Point]:
    """Return the points of a method's grid: all combinations of the values."""
    own = [dimension for dimension in space if dimension.touches(method)]
    if ranges := [dimension.path for dimension in own if dimension.ends]:
        raise ConfigError(f"{', '.join(ranges)} is a range, which a grid cannot list. Add --search 20, or list values.")
    return list(product(*([(dimension.path, value) for value in dimension.values] for dimension in own)))


def point_label(method: Method, point: Point) -> str:
    """Return a point in words, such as ``SFedKD (tau 2, lr 0.1)``."""
    return grid_label(method.label, {path.rpartition(".")[2]: parse_value(text) for path, text in point})


@dataclass(frozen=True)
class _Job:
    """A tuning that was checked."""

    folder: Path
    recipe: Recipe
    space: tuple[Dimension, ...]
    seeds: tuple[int, ...]
    share: float
    metric: Metric
    machine: Machine
    on_progress: OnProgress | None

    def begin(self, methods: Sequence[Method], search: int) -> None:
        """Check all points, then create the folder, or check that it belongs to the same tuning."""
        folder = self.folder
        described = json.dumps(
            {
                "grid": {d.path: f"{d.ends[0]}..{d.ends[1]}" if d.ends else list(d.values) for d in self.space},
                "methods": [method.label for method in methods],
                "seeds": list(self.seeds),
                "validation": self.share,
                "metric": self.metric.name,
                "search": search,
            },
            indent=2,
        )
        text = self.recipe.to_toml()
        if (folder / FILE).is_file():
            kept = [(folder / name).read_text(encoding="utf-8") for name in (FILE, RECIPE)]
            if kept != [described, text]:
                raise RunError(f"{folder} holds another tuning ({FILE}, {RECIPE} differ). Choose another --out.")
        elif folder.exists() and (not folder.is_dir() or any(p for p in folder.iterdir() if p.name != RECIPE)):
            raise RunError(f"{folder} exists and is not empty. Choose another --out.")
        atomic_write(folder / RECIPE, text)
        for method in () if search else methods:
            for point in points_of(self.space, method):
                self._recipe(method, point)  # every value is checked before anything runs
        atomic_write(folder / FILE, described)

    def grid(self, folder: Path, method: Method) -> list[TunedPoint]:
        """Run all points of a method."""
        return self._run(folder, 1, method, *points_of(self.space, method))

    def search(self, folder: Path, method: Method, count: int) -> Iterator[TunedPoint]:
        """Let Optuna choose points one after another. A resume repeats its choices, which depend on results only."""
        optuna = require_optional("optuna", "A search", "tune")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            direction="maximize" if self.metric.better > 0 else "minimize", sampler=optuna.samplers.TPESampler(seed=0)
        )
        own = [dimension for dimension in self.space if dimension.touches(method)]
        known: dict[Point, TunedPoint] = {}
        for place in range(1, count + 1):
            asked = study.ask()
            point = tuple((dimension.path, _suggest(asked, dimension)) for dimension in own)
            if point not in known:
                (known[point],) = self._run(folder, place, method, point)
                yield known[point]
            if known[point].counts(self.metric):
                study.tell(asked, known[point].spread.mean)
            else:
                study.tell(asked, state=optuna.trial.TrialState.FAIL)

    def _recipe(self, method: Method, point: Point) -> Recipe:
        recipe = load_recipe(
            str(self.folder / RECIPE),
            settings=[f"data.validation={self.share}", *(f"{path}={text}" for path, text in point)],
            methods=[method.label],
            seeds=self.seeds,
            allow_code=self.machine.allow_code,
        )
        return replace(recipe, title=point_label(method, point))

    def _run(self, folder: Path, place: int, method: Method, *points: Point) -> list[TunedPoint]:
        """Run points in run folders that are numbered from ``place`` on, those trials that are not finished."""
        runs = [folder / f"{number:03d}" for number in range(place, place + len(points))]
        trials = [trial for run, point in zip(runs, points, strict=True) for trial in self._trials(run, method, point)]
        run_trials(trials, retry="the same command with the same --out", on_progress=self.on_progress)
        return [self._result(run, method, point) for run, point in zip(runs, points, strict=True)]

    def _trials(self, run: Path, method: Method, point: Point) -> list[Trial]:
        """Return the unfinished trials of a point, whose run folder is created if need be."""
        recipe, label = self._recipe(method, point), point_label(method, point)
        if (run / "run.json").is_file():
            experiment = open_run(run, self.machine)
            # A recorded title has words on the held-out examples.
            held, asked = (replace(each, title="").to_toml() for each in (experiment.recipe, recipe))
            if held != asked:
                raise RunError(
                    f"{run} holds another point than {label}, which the search proposes now: its choices are not those "
                    "of before, as with another version of Optuna. Take a new --out, or install the version of before."
                )
        else:
            experiment = Experiment(recipe, self.machine)
            experiment.check()
            create_run_folder(experiment.recipe, run, self.machine, ["fedkeep.tune", self.recipe.name])
            for seed in self.seeds:
                experiment.release(seed)
        return [replace(trial, name=f"{label}, seed {trial.seed}") for trial in experiment.trials(run)]

    def _result(self, run: Path, method: Method, point: Point) -> TunedPoint:
        finished = tuple(trial for trial in _plain(read_run(run).trials) if trial.finished)
        row = Row(method.label, finished)
        values = tuple(self.metric.of(trial) for trial in finished)
        return TunedPoint(point_label(method, point), method.label, point, values, row.learned and not row.broken)


def _suggest(asked: Any, dimension: Dimension) -> str:
    """Return Optuna's value of an option as text."""
    if dimension.ends is None:
        return str(asked.suggest_categorical(dimension.path, list(dimension.values)))
    low, high = dimension.ends
    if type(low) is int and type(high) is int:
        return str(asked.suggest_int(dimension.path, low, high))
    # Over more than a factor of ten, such as a learning rate: equal shares of each factor.
    return f"{asked.suggest_float(dimension.path, low, high, log=low > 0 and high / low > 10):.4g}"


def _plain(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials with their first evaluation model only, in the recipe's order."""
    first: dict[int, TrialResult] = {}
    for trial in trials:
        model: EvaluationModel = next(iter(trial.info.get("evaluation_models", [])), "last")
        if trial.label == method_of(trial.label) + AVERAGE_SUFFIX[model] or trial.seed not in first:
            first[trial.seed] = trial
    return list(first.values())


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
    """Write table.md, results.csv and the recipes with the best options into a tuning's folder."""
    rows = table_of(tuning)
    heading = ("", "method", tuning.metric.title, "seeds")
    lines = [
        f"| {' | '.join(heading)} |",
        "|:--|:--|--:|--:|",
        *(f"| {' | '.join(map(markdown, row))} |" for row in rows),
    ]
    atomic_write(tuning.path / "table.md", "\n".join(lines) + "\n")
    seeds = max((len(tuned.values) for tuned in tuning.points), default=0)
    header = ("method", "point", *(f"value {number}" for number in range(1, seeds + 1)))
    values = ((tuned.method, tuned.label, *tuned.values) for tuned in tuning.points)
    atomic_write(tuning.path / "results.csv", csv_text([header, *values]))
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
