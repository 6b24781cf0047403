"""``fedkeep run`` and ``fedkeep resume``: run a recipe, or continue a run."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fedkeep._utils.signals import Terminated
from fedkeep.cli.progress import Display, say_stopped
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import open_run, prepare_run, resume_command, retry_command
from fedkeep.experiment.runtime import Machine
from fedkeep.experiment.trial_runner import run_trials
from fedkeep.options import as_table
from fedkeep.reporting.columns import headline
from fedkeep.reporting.differences import leaders
from fedkeep.reporting.learning import warnings
from fedkeep.reporting.outputs import REPORT, write_all
from fedkeep.reporting.profile import profile_table, step_table
from fedkeep.reporting.summary import Row, summary, trials_of
from fedkeep.reporting.table import print_table


def run(options: Namespace, console: Console) -> int:
    """Run a recipe and show its results.

    Parameters
    ----------
    options : Namespace
        The command's arguments.
    console : Console
        Where to print.

    Returns
    -------
    int
        The exit code.
    """
    machine = machine_of(options)
    import_user_code(machine.use)
    recipe = recipe_of(options, allow_code=machine.allow_code)
    recipe = replace(recipe, title=options.title) if options.title else recipe
    experiment = Experiment(recipe, machine)
    folder = prepare_run(experiment, options.out, ["fedkeep", *sys.argv[1:]])
    console.print(recipe.title, style="bold", highlight=False, markup=False)
    console.print(_describe(recipe), highlight=False, markup=False)
    console.print(f"run folder: {folder}", highlight=False, markup=False, soft_wrap=True)
    return _run_and_show(folder, experiment, console, quiet=options.quiet, profile=options.profile)


def resume(options: Namespace, console: Console) -> int:
    """Continue a run and show its results.

    Parameters
    ----------
    options : Namespace
        The command's arguments.
    console : Console
        Where to print.

    Returns
    -------
    int
        The exit code.
    """
    machine = machine_of(options)
    import_user_code(machine.use)
    folder = Path(options.run)
    return _run_and_show(folder, open_run(folder, machine), console, quiet=options.quiet, profile=options.profile)


def _run_and_show(folder: Path, experiment: Experiment, console: Console, *, quiet: bool, profile: bool) -> int:
    """Run the trials that are not finished, and show the results."""
    recipe, machine, trials = experiment.recipe, experiment.machine, experiment.trials(folder)
    display = None if quiet else Display(console, {trial.name: trial.rounds for trial in trials})
    try:
        with display or nullcontext():
            run_trials(trials, retry=retry_command(folder, machine), on_progress=display)
    except (KeyboardInterrupt, Terminated) as stop:
        return say_stopped(stop, resume_command(folder, machine), console)
    result = write_all(folder)
    rows = summary(result)
    console.print()
    console.print(print_table(rows, width=console.width))
    if profile:
        console.print(profile_table(result))
        if recipe.has_tasks:
            console.print(step_table(result))
    for line in warnings(result.trials, result.settings):
        console.print(f"warning: {line}", style="yellow", highlight=False, markup=False)
    console.print(_next_steps(folder, experiment, rows), highlight=False, markup=False, soft_wrap=True)
    return 0


def recipe_of(options: Namespace, *, allow_code: bool = False) -> Recipe:
    """Return the recipe that the command line names, with its changes.

    Parameters
    ----------
    options : Namespace
        The command's arguments.
    allow_code : bool
        Let the recipe import its model.

    Returns
    -------
    Recipe
        The recipe.

    Raises
    ------
    ConfigError
        For anything that cannot be run as written.
    """
    return load_recipe(
        options.recipe,
        settings=options.settings,
        methods=options.methods,
        seeds=options.seeds,
        rounds=options.rounds,
        log=getattr(options, "log", None),
        grid=getattr(options, "grid", None) or None,
        allow_code=allow_code,
    )


def machine_of(options: Namespace) -> Machine:
    """Return the machine that the command line describes.

    Parameters
    ----------
    options : Namespace
        The command's arguments.

    Returns
    -------
    Machine
        The machine. ``fedkeep resume`` later replaces its device, threads, stack and compile by the recorded ones.
    """
    return Machine(
        device=getattr(options, "device", "cpu"),
        threads=getattr(options, "threads", 1),
        stack=getattr(options, "stack", 0),
        compile=getattr(options, "compile", "auto"),
        workers=options.workers,
        executor=options.executor,
        address=options.address,
        data_dir=options.data_dir,
        allow_code=options.allow_code,
        use=tuple(options.use),
    )


def _describe(recipe: Recipe) -> str:
    methods = ", ".join(method.label for method in recipe.methods)
    run = recipe.run
    clients = f"{recipe.partition.num_clients or 'natural'} clients ({recipe.partition.name})"
    sharing = recipe.tasks.sharing
    tasks = f" in each of {recipe.tasks.num_tasks} tasks ({sharing})" if sharing else ""
    return (
        f"{methods} on {recipe.data}, {clients}, {run.cohort_size} a round, {run.rounds} rounds{tasks}, "
        f"seeds {', '.join(map(str, recipe.seeds))}"
    )


def _next_steps(folder: Path, experiment: Experiment, rows: Sequence[Row]) -> str:
    """Return commands that follow from this run: what would tell more, and what to do with it."""
    recipe, machine = experiment.recipe, experiment.machine
    again = resume_command(folder / "recipe.toml", replace(machine, workers=0), "run")
    steps = []
    finished = [row for row in rows if row.finished]
    if len(recipe.seeds) == 1:
        steps.append(("intervals over seeds", f"{again} --seeds 0,1,2"))
    elif len(finished) > 1 and not leaders(finished, headline(trials_of(finished))[0]):
        more = ",".join(map(str, range(max(recipe.seeds) + 1, max(recipe.seeds) + 4)))
        steps.append(("more seeds, to add with fedkeep compare", f"{again} --seeds {more}"))
    skew = as_table(recipe.partition)
    for name in ("classes_per_client", "alpha"):
        if isinstance(skew.get(name), int | float):
            steps.append(
                (f"less skewed clients ({name} was {skew[name]})", f"{again} --set partition.{name}={2 * skew[name]}")
            )
            break
    own = "".join(f" --use {shlex.quote(file)}" for file in machine.use)
    name = recipe.methods[-1].algorithm.name()
    steps += [(f"what {recipe.methods[-1].label} does", f"fedkeep methods {name}{own}")]
    steps += [
        ("a table for a paper", f"fedkeep report {shlex.quote(str(folder))} --format latex"),
        ("this run again", again),
    ]
    if recipe.name == "demo":
        steps += [("the paper's setting, with Fashion-MNIST", "fedkeep run fedkeep/fashion-mnist-200 --rounds 20")]
    steps += [("what else there is to run", "fedkeep recipes")]
    report = (folder / REPORT).resolve().as_uri()
    return "\n".join([f"\nreport: {report}", "", "what to try next:", *(f"  {what}:\n    {do}" for what, do in steps)])
