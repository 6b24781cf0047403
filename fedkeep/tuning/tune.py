"""Run a method with every combination of some options on held-out training examples, and choose the best."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedkeep._utils.files import atomic_write
from fedkeep.errors import ConfigError, RunError, require_optional
from fedkeep.experiment.experiment import Experiment, Trial
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import create_run_folder, open_run
from fedkeep.experiment.runtime import Machine, OnProgress
from fedkeep.experiment.trial_runner import run_trials
from fedkeep.reporting.metric import METRICS, Metric, metric_of
from fedkeep.reporting.run_folder import AVERAGE_SUFFIX, method_of, read_run
from fedkeep.reporting.summary import Row
from fedkeep.reporting.trial import TrialResult
from fedkeep.rounds.evaluation_models import EvaluationModel
from fedkeep.tuning.result import RECIPE, TunedPoint, Tuning, write_tuning
from fedkeep.tuning.space import Dimension, Point, point_label, points_of, read_space, settings_of

FILE, POINTS = "tune.json", "points"
"""What a folder of a tuning holds beside its recipe: its settings, and a run folder for each point."""
SEEDS = (100, 101)
"""The seeds of a tuning unless others are given."""


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
        What decides: the name of a table's column; default: accuracy over the window.
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
    chosen = metric_of(metric) if metric else METRICS["window_incremental" if recipe.has_tasks else "window_mean"]
    if not chosen.better:
        raise ConfigError(f"methods are not ranked by {chosen.name}. Choose accuracy or forgetting.")
    tuning = _Job(recipe, space, _methods(recipe, space, methods), tuple(seeds), share, chosen, search, machine)
    result = tuning.run(_folder(recipe, out), on_progress)
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


@dataclass(frozen=True)
class _Job:
    """A tuning that was checked."""

    recipe: Recipe
    space: tuple[Dimension, ...]
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    share: float
    metric: Metric
    search: int
    machine: Machine

    def run(self, folder: Path, on_progress: OnProgress | None) -> Tuning:
        self._begin(folder)
        points = [
            tuned
            for number, method in enumerate(self.methods, start=1)
            for tuned in (
                self._search(folder, number, method, on_progress)
                if self.search
                else self._grid(folder, number, method, on_progress)
            )
        ]
        return Tuning(folder, self.recipe, self.metric, tuple(points), self.machine.allow_code)

    def _begin(self, folder: Path) -> None:
        """Check all points, then create the folder, or check that it belongs to the same tuning."""
        described = json.dumps(
            {
                "grid": {d.path: list(d.values) or f"{d.low}..{d.high}" for d in self.space},
                "methods": [method.label for method in self.methods],
                "seeds": list(self.seeds),
                "validation": self.share,
                "metric": self.metric.name,
                "search": self.search,
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
        if not self.search:
            for method in self.methods:
                for point in points_of(self.space, self.recipe, method):
                    self._recipe(folder, method, point)  # every value is checked before anything runs
        atomic_write(folder / FILE, described)

    def _recipe(self, folder: Path, method: Method, point: Point) -> Recipe:
        recipe = load_recipe(
            str(folder / RECIPE),
            settings=[f"data.validation={self.share}", *settings_of(point)],
            methods=[method.label],
            seeds=self.seeds,
            allow_code=self.machine.allow_code,
        )
        return replace(recipe, title=point_label(method, point))

    def _trials(self, folder: Path, number: int, place: int, method: Method, point: Point) -> tuple[Path, list[Trial]]:
        """Return a point's run folder, which is created if need be, and its unfinished trials."""
        run = folder / POINTS / f"{number:02d}-{method.slug}" / f"{place:03d}"
        if (run / "run.json").is_file():
            experiment = open_run(run, self.machine)
            held, asked = (
                replace(recipe, title="").to_toml()  # a recorded title has words on the held-out examples
                for recipe in (experiment.recipe, self._recipe(folder, method, point))
            )
            if held != asked:
                raise RunError(
                    f"{run} holds another point than {point_label(method, point)}, which the search proposes now: its "
                    "choices are not those of before, as with another version of Optuna. Take a new --out, or install "
                    "the version of before."
                )
        else:
            experiment = Experiment(self._recipe(folder, method, point), self.machine)
            experiment.check()
            create_run_folder(experiment.recipe, run, self.machine, ["fedkeep.tune", self.recipe.name])
            for seed in self.seeds:
                experiment.release(seed)
        label = point_label(method, point)
        trials = experiment.trials(run)
        return run, [replace(trial, name=f"{label}, seed {trial.seed}") for trial in trials]

    def _grid(self, folder: Path, number: int, method: Method, on_progress: OnProgress | None) -> Iterator[TunedPoint]:
        points = points_of(self.space, self.recipe, method)
        prepared = [self._trials(folder, number, i, method, point) for i, point in enumerate(points, start=1)]
        trials = [trial for _, own in prepared for trial in own]
        run_trials(trials, retry="the same command with the same --out", on_progress=on_progress)
        for (run, _), point in zip(prepared, points, strict=True):
            yield self._result(run, method, point)

    def _search(
        self, folder: Path, number: int, method: Method, on_progress: OnProgress | None
    ) -> Iterator[TunedPoint]:
        """Let Optuna choose points one after another. A resume repeats its choices, which depend on results only."""
        optuna = require_optional("optuna", "A search", "tune")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            direction="maximize" if self.metric.better > 0 else "minimize", sampler=optuna.samplers.TPESampler(seed=0)
        )
        own = [dimension for dimension in self.space if dimension.touches(method)]
        known: dict[Point, TunedPoint] = {}
        for place in range(1, self.search + 1):
            asked = study.ask()
            point = tuple((dimension.path, _suggest(asked, dimension)) for dimension in own)
            if point not in known:
                run, trials = self._trials(folder, number, place, method, point)
                run_trials(trials, retry="the same command with the same --out", on_progress=on_progress)
                known[point] = self._result(run, method, point)
                yield known[point]
            if known[point].counts(self.metric):
                study.tell(asked, known[point].spread.mean)
            else:
                study.tell(asked, state=optuna.trial.TrialState.FAIL)

    def _result(self, run: Path, method: Method, point: Point) -> TunedPoint:
        trials = _plain(read_run(run).trials)
        finished = [trial for trial in trials if trial.finished]
        values = tuple(self.metric.of(trial) for trial in finished)
        row = Row(method.label, tuple(finished))
        learned = row.learned and not row.broken
        return TunedPoint(point_label(method, point), method.label, point, values, learned)


def _plain(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials with their first evaluation model only, in the recipe's order."""
    first: dict[int, TrialResult] = {}
    for trial in trials:
        model: EvaluationModel = next(iter(trial.info.get("evaluation_models", [])), "last")
        if trial.label == method_of(trial.label) + AVERAGE_SUFFIX[model] or trial.seed not in first:
            first[trial.seed] = trial
    return list(first.values())


def _suggest(asked: Any, dimension: Dimension) -> str:
    """Return Optuna's value of an option as text."""
    if not dimension.is_range:
        return str(asked.suggest_categorical(dimension.path, list(dimension.values)))
    if type(dimension.low) is int and type(dimension.high) is int:
        return str(asked.suggest_int(dimension.path, dimension.low, dimension.high))
    # Over more than a factor of ten, such as a learning rate: equal shares of each factor.
    wide = dimension.low > 0 and dimension.high / dimension.low > 10
    return f"{asked.suggest_float(dimension.path, dimension.low, dimension.high, log=wide):.4g}"
