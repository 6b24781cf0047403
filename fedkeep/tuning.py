"""Choosing options on held-out training examples, with seeds that are not reported: a run whose methods are a grid."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedkeep._utils.files import atomic_write
from fedkeep._utils.torch_state import one_thread_at_a_time, plain_torch
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.provenance import check_code
from fedkeep.experiment.python_recipe import as_list, for_workers, seeds_of
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.recipe_loader import load_recipe, untitled, with_grid
from fedkeep.experiment.run import dated_folder, join_run, open_run
from fedkeep.experiment.runtime import Machine, OnProgress, check_run_arguments
from fedkeep.experiment.trial_runner import run_trials
from fedkeep.models.custom import Custom
from fedkeep.reporting.html import write_all
from fedkeep.reporting.metric import OF_CLIENTS, Metric, metric_of
from fedkeep.reporting.run_folder import read_run
from fedkeep.reporting.summary import Row, Spread
from fedkeep.reporting.table import TextTable, show

RUN, BEST = "run", "best.toml"
"""In a tuning's folder: the run folder of all points, and the recipe with the best."""
SEEDS = (100, 101)
"""The seeds of a tuning unless others are given."""


@dataclass(frozen=True)
class TunedPoint:
    """A point of a grid with its results.

    ``method``: The method with the point's options, labelled such as ``SFedKD (tau 2, teachers 3)``.
    ``values``: The metric of each seed.
    ``learned``: Whether the models of all seeds are better than guessing, in rounds that were not rolled back.
    """

    method: Method
    values: tuple[float, ...]
    learned: bool = True

    @property
    def label(self) -> str:
        """The label of the method with its options."""
        return self.method.label

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
    """

    path: Path
    recipe: Recipe
    metric: Metric
    points: tuple[TunedPoint, ...]

    @cached_property
    def best(self) -> Mapping[str, TunedPoint]:
        """By the label of a method, the point with the best mean of those that have learned; of equals the first.

        If none has learned it is the best of all that count (`TunedPoint.counts`), and the table says so.
        """
        found: dict[str, TunedPoint] = {}
        for tuned in self.points:
            before = found.get(tuned.method.grid_of)
            if tuned.counts(self.metric) and (before is None or self._rank(tuned) > self._rank(before)):
                found[tuned.method.grid_of] = tuned
        return found

    def _rank(self, tuned: TunedPoint) -> tuple[bool, float]:
        # Rounded, since means of the same numbers of right answers may differ in their last bits.
        return tuned.learned, round(self.metric.better * tuned.spread.mean, 9)

    @property
    def best_recipe(self) -> Recipe:
        """The recipe with the best options, for its own seeds and the test examples."""
        methods = []
        for method in self.recipe.methods:
            tuned = self.best.get(method.label)
            methods.append(replace(tuned.method, label=method.label, grid_of="") if tuned else method)
        return replace(self.recipe, methods=tuple(methods))

    @property
    def table(self) -> TextTable:
        """A line for each point: its label, its metric, its seeds, a verdict (best, has not learned, both, none)."""
        best = set(map(id, self.best.values()))
        lines = []
        for tuned in self.points:
            verdict = ["best"] * (id(tuned) in best) + ["has not learned"] * (not tuned.learned)
            value = show(tuned.spread, self.metric.unit, own=self.metric.is_custom)
            lines.append([tuned.label, value, str(tuned.spread.n), ", ".join(verdict)])
        return TextTable(["method", self.metric.title, "seeds", ""], lines)


@one_thread_at_a_time()
@plain_torch()
def tune(
    recipe: str | Path | Recipe,
    grid: Mapping[str, Any] | str | Sequence[str],
    *,
    methods: str | Sequence[str] | None = None,
    seeds: int | Sequence[int] = SEEDS,
    rounds: int | None = None,
    validation: float | None = None,
    settings: str | Sequence[str] = (),
    metric: str | None = None,
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
    recipe : str or Path or Recipe
        A recipe's name, a path to a .toml file, or a `Recipe`.
    grid : Mapping[str, object] or str or Sequence[str]
        What to try, such as ``{"sfedkd.tau": [1, 2, 4], "training.lr": [0.01, 0.1]}``. Options of a method vary for
        that method, those of local training for each method.
    methods : str or Sequence[str], optional
        Methods to tune, of those that the grid varies; default: all of the recipe's.
    seeds : int or Sequence[int]
        How many seeds, of 0, 1, 2, ..., or which, which should not be those whose results are reported.
    rounds : int, optional
        Rounds instead of the recipe's.
    validation : float, optional
        The share of each class's training examples that is held out; default: the recipe's, or 0.1.
    settings : str or Sequence[str]
        Changes to the recipe, such as ``"training.lr=0.05"``, which the best recipe keeps.
    metric : str, optional
        What decides: the name of a table's column; default: the recipe's ``run.metric``, or else accuracy over the
        window.
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
    check_run_arguments(machine, on_progress)
    machine, seeds = machine or Machine(), seeds_of(seeds)
    grid = grid if isinstance(grid, Mapping) else as_list(grid)
    methods = None if methods is None else as_list(methods)
    import_user_code(machine.use)
    recipe = _recipe(recipe, as_list(settings), methods, rounds, machine)
    chosen = metric_of(metric or recipe.run.metric or ("window_incremental" if recipe.has_tasks else "window_mean"))
    if not chosen.better:
        raise ConfigError(f"methods are not ranked by {chosen.name}. Choose accuracy or forgetting.")
    if chosen.name in OF_CLIENTS and not recipe.run.client_test:
        raise ConfigError(f"{chosen.name} is of clients' own tests, and they test nothing. Set run.client_test=own.")
    if not grid:
        raise ConfigError(
            "there is nothing to tune. Name values to try, such as --grid sfedkd.tau=1,2,4; the recipe's own grids are "
            "not tuned."
        )
    share = validation if validation is not None else recipe.validation or 0.1
    if share == 0:
        raise ConfigError("tuning needs held-out training examples. Give a share above 0, such as --validation 0.1.")
    if (both := sorted({*seeds} & {*recipe.seeds})) and not reported_seeds:
        raise ConfigError(
            f"seeds {', '.join(map(str, both))} are the recipe's own, whose results are reported: options chosen on "
            "them look better than they are. Tune on others, such as --seeds 100,101, or allow it with "
            "--reported-seeds."
        )
    recipe = replace(recipe, validation=0.0, title=untitled(recipe.title))  # as it is run with the best options
    measured = replace(recipe.run, metric=chosen.name if chosen.shown == "scored" else recipe.run.metric)
    held_out = replace(recipe, run=measured, seeds=seeds, validation=float(share), title=f"{recipe.title}, tuned")
    points = with_grid(held_out, grid, allow_code=machine.allow_code)
    folder = _checked_folder(Path(out or dated_folder(recipe.name, "tune-")).absolute())
    machine = for_workers(points, machine)
    run = join_run(Experiment(points, machine), folder / RUN, ["fedkeep.tune", recipe.name])
    check_code(run, machine.use)
    trials = open_run(run, machine, points.model if isinstance(points.model, Custom) else None).trials(run)
    run_trials(trials, retry=f"the same command with --out {shlex.quote(str(folder))}", on_progress=on_progress)
    tuning = Tuning(folder, recipe, chosen, _read_points(run, points.methods, chosen))
    atomic_write(folder / "table.md", f"{tuning.table.markdown()}\n")
    if not any(map(math.isfinite, (value for point in tuning.points for value in point.values))):
        ended = sum(trial.ended_early for trial in read_run(run).trials)
        why = f" A callback ended {ended} trials early: run without it." if ended else ""
        raise RunError(f"no point has a value of {chosen.name}, so none is the best: {folder / 'table.md'}.{why}")
    atomic_write(folder / BEST, tuning.best_recipe.to_toml())
    return tuning


def _recipe(
    recipe: str | Path | Recipe,
    settings: Sequence[str],
    methods: Sequence[str] | None,
    rounds: int | None,
    machine: Machine,
) -> Recipe:
    """Return the recipe that is tuned."""
    if not all(isinstance(method, str) for method in methods or ()):
        raise ConfigError(
            "methods= of fedkeep.tune are names or labels of a recipe's methods, such as 'sfedkd'. Options of a method "
            "object go into a recipe: write its table [[methods]] there, or give settings such as 'sfedkd.tau=1'."
        )
    if not isinstance(recipe, Recipe):
        code = machine.allow_code
        return load_recipe(str(recipe), settings=settings, methods=methods, rounds=rounds, grid=False, allow_code=code)
    if settings or methods is not None or rounds is not None:
        raise ConfigError("settings, methods and rounds change a recipe given by name; change a Recipe directly.")
    return recipe


def _checked_folder(folder: Path) -> Path:
    """Return a folder that is new, empty, or that of a tuning that was begun; raise `RunError` for another."""
    known = (folder / RUN / "run.json").is_file()
    if folder.exists() and not known and (not folder.is_dir() or any(p.name != RUN for p in folder.iterdir())):
        raise RunError(f"{folder} exists and is not empty. Choose another --out.")
    return folder


def _read_points(folder: Path, methods: Sequence[Method], metric: Metric) -> tuple[TunedPoint, ...]:
    """Write the report of all points, and return their results; of several evaluation models the first counts."""
    run, points = write_all(folder), []
    for method in methods:
        finished = []
        for trial in run.trials:
            first = (trial.info.get("evaluation_models") or ["last"])[0]
            if trial.finished and (trial.method, trial.evaluation_model) == (method.label, first):
                finished.append(trial)
        row = Row(method.label, tuple(finished))
        points.append(TunedPoint(method, tuple(map(metric.of, finished)), row.learned and not row.broken))
    return tuple(points)
