"""FedKeep from Python: run a recipe, read what it found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedkeep.errors import ConfigError
from fedkeep.experiment.changes import SECTIONS
from fedkeep.experiment.reading import load_recipe
from fedkeep.experiment.recipe import Recipe, with_methods
from fedkeep.experiment.run import Machine, OnProgress, Progress, begin, carry_out
from fedkeep.interface import Algorithm
from fedkeep.reporting.outputs import write_all
from fedkeep.reporting.run_folder import Run


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
) -> Run:
    """Run a recipe to its end and return the run, with its report written beside its records.

    Parameters
    ----------
    recipe : a recipe's name, a path to a .toml file, or a `Recipe`.
    methods : methods to run instead of the recipe's, such as ``[FedSeq(), SFedKD(teachers=3)]``.
    seeds, rounds, settings : changes to the recipe; settings are written as ``"training.lr=0.05"``.
    out : the run folder, which must not exist or be empty; default: a new one under ``runs/``.
    machine : device, threads and workers; default: this process, one thread, on the CPU.
    on_progress : called after every round.

    Raises
    ------
    FedKeepError
        For anything that cannot be carried out, before any training starts; the message says what to do.
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
    addressed = [setting for setting in settings if setting.partition(".")[0].strip() not in SECTIONS]
    if methods is not None and addressed:
        raise ConfigError(f"settings {addressed} address methods, and methods are given. Set their options there.")
    if methods is not None:
        recipe = with_methods(recipe, methods)
    machine = machine or Machine(workers=1)
    folder = begin(recipe, out, machine, ["fedkeep.run", recipe.name])
    carry_out(folder, machine, _of_rounds(on_progress), recipe)
    return write_all(folder)


def resume(folder: str | Path, *, machine: Machine | None = None, on_progress: OnProgress | None = None) -> Run:
    """Continue a run that was stopped, to the same result as if it had not been, and return it."""
    carry_out(Path(folder), machine or Machine(workers=1), _of_rounds(on_progress))
    return write_all(folder)


def _of_rounds(on_progress: OnProgress | None) -> OnProgress:
    """Leave out what is told within a long round, which whoever counts calls does not expect."""

    def after_rounds(progress: Progress) -> None:
        if on_progress is not None and not progress.doing:
            on_progress(progress)

    return after_rounds
