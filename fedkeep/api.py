"""FedKeep's Python functions: run a recipe, and resume a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedkeep.errors import ConfigError
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.overrides import SECTIONS
from fedkeep.experiment.recipe import Recipe, with_methods
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import open_run, prepare_run, retry_command
from fedkeep.experiment.runtime import Machine, OnProgress, Progress
from fedkeep.experiment.trial_runner import run_trials
from fedkeep.interface import Algorithm
from fedkeep.reporting.outputs import write_all
from fedkeep.reporting.run_folder import Run
from fedkeep.simulation.callbacks import Callback


def run(
    recipe: str | Recipe = "demo",
    *,
    methods: Iterable[Algorithm[Any, Any]] | None = None,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    settings: Sequence[str] = (),
    out: str | Path | None = None,
    machine: Machine | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Run a recipe and write its report beside its records.

    Parameters
    ----------
    recipe : str or Recipe
        A recipe's name, a path to a .toml file, or a `Recipe`.
    methods : Iterable[Algorithm], optional
        Methods to run instead of the recipe's, such as ``[FedSeq(), SFedKD(teachers=3)]``.
    seeds : Sequence[int], optional
        Seeds to run instead of the recipe's.
    rounds : int, optional
        Rounds to run instead of the recipe's.
    settings : Sequence[str]
        Changes to a recipe given by name, written as ``"training.lr=0.05"``.
    out : str or Path, optional
        The run folder, which must not exist or be empty; default: a new one under ``runs/``.
    machine : Machine, optional
        Device, threads and workers; default: this process, one thread, on the CPU.
    on_progress : Callable[[Progress], None], optional
        Called after every round.
    callbacks : Sequence[Callback]
        Called around the rounds of every trial, in this process (see `fedkeep.simulation.callbacks`). Workers then
        share cohorts instead of trials.

    Returns
    -------
    Run
        The finished run.

    Raises
    ------
    FedKeepError
        For anything that cannot be run, before any training starts; the message says what to do.
    """
    if isinstance(recipe, str):
        recipe = load_recipe(recipe, settings=settings, seeds=seeds, rounds=rounds)
    elif settings:
        raise ConfigError("settings change a recipe given by name; change a Recipe with dataclasses.replace.")
    else:
        recipe = replace(
            recipe,
            seeds=recipe.seeds if seeds is None else tuple(seeds),
            run=recipe.run if rounds is None else replace(recipe.run, rounds=rounds),
        )
    method_settings = [setting for setting in settings if setting.partition(".")[0].strip() not in SECTIONS]
    if methods is not None and method_settings:
        raise ConfigError(f"settings {method_settings} change methods, and methods are given. Set their options there.")
    if methods is not None:
        recipe = with_methods(recipe, methods)
    experiment = Experiment(recipe, machine or Machine())
    folder = prepare_run(experiment, out, ["fedkeep.run", recipe.name])
    retry = retry_command(folder, experiment.machine)
    run_trials(experiment.trials(folder), retry=retry, on_progress=_only_after_rounds(on_progress), callbacks=callbacks)
    return write_all(folder)


def resume(
    folder: str | Path,
    *,
    machine: Machine | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Continue a run that was stopped. The results are the same as without the stop.

    Parameters
    ----------
    folder : str or Path
        The run folder.
    machine : Machine, optional
        Workers and folders; device, threads and stack are those with which the run began.
    on_progress : Callable[[Progress], None], optional
        Called after every round.
    callbacks : Sequence[Callback]
        Called around the rounds of every trial, in this process.

    Returns
    -------
    Run
        The finished run.

    Raises
    ------
    FedKeepError
        If the folder is not a run folder, or the run cannot be continued.
    """
    folder = Path(folder)
    experiment = open_run(folder, machine or Machine())
    retry = retry_command(folder, experiment.machine)
    run_trials(experiment.trials(folder), retry=retry, on_progress=_only_after_rounds(on_progress), callbacks=callbacks)
    return write_all(folder)


def _only_after_rounds(on_progress: OnProgress | None) -> OnProgress:
    """Return a function that leaves out reports within a round, so that there is one call for each round."""

    def report(progress: Progress) -> None:
        if on_progress is not None and not progress.activity:
            on_progress(progress)

    return report
