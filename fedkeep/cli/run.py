"""``fedkeep run``, ``resume``, ``gather`` and ``tune``: run recipes, and choose options on held-out examples."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from fedkeep._utils.signals import Terminated
from fedkeep.cli.dry_run import dry_run
from fedkeep.cli.progress import say_stopped
from fedkeep.cli.text import plain_table, say
from fedkeep.display import Display, progress_bars
from fedkeep.errors import ConfigError, FedKeepError, RunError
from fedkeep.experiment.belonging import check_code
from fedkeep.experiment.description import describe_data
from fedkeep.experiment.experiment import Experiment, Trial
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.python_recipe import fit_cohort
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import join_run, open_run, prepare_run, resume_command, retry_command
from fedkeep.experiment.runtime import Machine, Progress
from fedkeep.experiment.trial_runner import run_trials
from fedkeep.options import as_table, options_of
from fedkeep.reporting.findings import is_undecided
from fedkeep.reporting.html import REPORT, write_all
from fedkeep.reporting.learning import warnings
from fedkeep.reporting.metric import check_main
from fedkeep.reporting.record import data_read
from fedkeep.reporting.summary import Row, summary
from fedkeep.reporting.table import print_table, profile_table, step_table
from fedkeep.tuning import best_recipes, table_of
from fedkeep.tuning import tune as choose

CLASSES_SHOWN = 12
"""Classes and clients that are listed on the console; the report has all."""


def run(options: Namespace, console: Console) -> int:
    """Run a recipe and show its results."""
    machine = machine_of(options)
    import_user_code(machine.use)
    recipe = recipe_of(options, allow_code=machine.allow_code)
    recipe = replace(recipe, title=options.title) if options.title else recipe
    check_main(recipe.run.metric)
    if options.dry_run:
        with suppress(FedKeepError):  # the estimate tells of it
            say(console, _data_of(Experiment(recipe, machine)))
        return dry_run({"": recipe}, machine, console)
    experiment = Experiment(recipe, machine)
    if options.trial:
        return _run_one(options, experiment, console)
    folder = prepare_run(experiment, options.out, ["fedkeep", *sys.argv[1:]])
    console.print(recipe.title, style="bold", markup=False)
    console.print(_describe(recipe), markup=False)
    say(console, f"run folder: {folder}")
    say(console, _data_of(experiment))
    return _run_and_show(folder, experiment, console, quiet=options.quiet, profile=options.profile)


def resume(options: Namespace, console: Console) -> int:
    """Continue a run and show its results."""
    machine = machine_of(options)
    import_user_code(machine.use)
    folder = Path(options.run)
    experiment = open_run(folder, machine)
    check_code(folder, machine.use)
    return _run_and_show(folder, experiment, console, quiet=options.quiet, profile=options.profile)


def gather(options: Namespace, console: Console) -> int:
    """Write the report of a run whose trials were run one by one, and show its results."""
    import_user_code(options.use)
    folder = Path(options.run)
    machine = replace(machine_of(options), workers=0)
    check_code(folder, machine.use)
    experiment = open_run(folder, machine)
    trials = experiment.all_trials(folder)
    missing = {number: trial for number, trial in enumerate(trials, start=1) if not trial.is_finished}
    if missing:
        listed = ", ".join(f"{number} ({trial.name}, {_rounds_done(trial)})" for number, trial in missing.items())
        raise RunError(
            f"{len(missing)} of {len(trials)} trials are missing: {listed}. Run each with the command that began the "
            f"run and its number, such as --trial {min(missing)}, or all of them here: "
            f"{resume_command(folder, experiment.machine)}"
        )
    return _show(folder, experiment, console)


def tune(options: Namespace, console: Console) -> int:
    """Run all points of a grid, and show the best."""
    machine = machine_of(options)
    import_user_code(machine.use)
    bars = progress_bars(console, console.is_terminal and not options.quiet)
    tasks = {}

    def show(report: Progress) -> None:
        if report.trial not in tasks:
            tasks[report.trial] = bars.add_task(report.trial, total=report.rounds, note="")
        bars.update(tasks[report.trial], completed=report.done, note=report.activity)

    try:
        with bars:
            tuning = choose(
                options.recipe,
                options.grid,
                methods=options.methods,
                seeds=options.seeds,
                rounds=options.rounds,
                validation=options.validation,
                settings=options.settings,
                metric=options.metric,
                search=options.search,
                reported_seeds=options.reported_seeds,
                out=options.out,
                machine=machine,
                on_progress=show,
            )
    except KeyboardInterrupt:
        console.print("\nstopped; finished rounds are saved. The same command with the same --out continues.")
        return 130
    table = plain_table("", "method", tuning.metric.title, "seeds")
    for verdict, label, value, seeds in table_of(tuning):
        table.add_row(verdict, escape(label), value, seeds, style="bold" if verdict else "")
    console.print(table)
    say(console, f"folder: {tuning.path}")
    for name in best_recipes(tuning):
        own = "".join(f" --use {shlex.quote(file)}" for file in options.use)
        command = f"fedkeep run {shlex.quote(str(Path(tuning.path) / name))}{own}"
        say(console, f"now with the reported seeds, on the test examples: {command}")
    sys.stdout.flush()
    return 0


def _rounds_done(trial: Trial) -> str:
    """Return how far an unfinished trial has come."""
    records = trial.folder / "rounds.jsonl"
    done = records.read_bytes().count(b"\n") if records.is_file() else 0
    return f"{done} of {trial.rounds} rounds" if done else "not begun"


def _run_one(options: Namespace, experiment: Experiment, console: Console) -> int:
    """Run one trial of a run that other processes may be running too."""
    if options.out is None:
        raise ConfigError("--trial needs the run folder that all trials share: --out DIR.")
    if options.profile:
        raise ConfigError("--profile shows the time of a whole run, and --trial runs a part of one. Leave one out.")
    count = len(experiment.recipe.methods) * len(experiment.recipe.seeds)
    if options.trial > count:
        raise ConfigError(f"there is no trial {options.trial}: this run has {count}, counted from 1.")
    folder = join_run(experiment, options.out, ["fedkeep", *sys.argv[1:]])
    check_code(folder, experiment.machine.use)
    experiment = open_run(folder, experiment.machine)
    trial = experiment.all_trials(folder)[options.trial - 1]
    again = shlex.join(["fedkeep", *sys.argv[1:]])
    if not trial.is_finished and (stop := run_with_progress([trial], console, again, again, quiet=options.quiet)):
        return stop
    gather = resume_command(
        folder, replace(experiment.machine, workers=0, executor="processes", address=None), "gather"
    )
    say(console, f"trial {options.trial} of {count}, {trial.name}, is finished. When all are: {gather}")
    return 0


def run_with_progress(trials: Sequence[Trial], console: Console, again: str, retry: str, *, quiet: bool) -> int:
    """Run trials and show their progress; the exit code is 0, or that of a signal that stopped them."""
    display = None if quiet else Display(console, {trial.name: trial.rounds for trial in trials})
    try:
        with display or nullcontext():
            run_trials(trials, retry=retry, on_progress=display)
    except (KeyboardInterrupt, Terminated) as stop:
        return say_stopped(stop, again, console)
    return 0


def run_unfinished(folder: Path, experiment: Experiment, console: Console, *, quiet: bool) -> int:
    """Run the trials of a run folder that are not finished.

    ``quiet``: Whether no progress is shown.
    Returns: The exit code: 0, or that of a signal that stopped them.
    """
    again, retry = resume_command(folder, experiment.machine), retry_command(folder, experiment.machine)
    return run_with_progress(experiment.trials(folder), console, again, retry, quiet=quiet)


def _run_and_show(folder: Path, experiment: Experiment, console: Console, *, quiet: bool, profile: bool) -> int:
    """Run the trials that are not finished, and show the results."""
    if stop := run_unfinished(folder, experiment, console, quiet=quiet):
        return stop
    return _show(folder, experiment, console, profile=profile)


def _show(folder: Path, experiment: Experiment, console: Console, *, profile: bool = False) -> int:
    """Write the report of a run, and show its results."""
    recipe = experiment.recipe
    result = write_all(folder)
    rows = summary(result)
    console.print()
    console.print(print_table(rows, width=console.width))
    if profile:
        console.print(profile_table(result))
        if recipe.has_tasks:
            console.print(step_table(result))
    for line in warnings(result.trials, result.settings):
        console.print(f"warning: {line}", style="yellow", markup=False)
    say(console, _next_steps(folder, experiment, rows))
    return 0


def recipe_of(options: Namespace, *, allow_code: bool = False) -> Recipe:
    """Return the recipe that the command line names, with its changes.

    ``allow_code``: Let the recipe import its model.
    """
    recipe = load_recipe(
        options.recipe,
        settings=options.settings,
        methods=options.methods,
        seeds=options.seeds,
        rounds=options.rounds,
        log=getattr(options, "log", None),
        grid=getattr(options, "grid", None) or None,
        allow_code=allow_code,
    )
    set_here = {setting.partition("=")[0].strip() for setting in options.settings or ()}
    by_column = "partition.scheme" in set_here and "run.cohort_size" not in set_here
    return fit_cohort(recipe, getattr(options, "data_dir", None)) if by_column else recipe


def machine_of(options: Namespace) -> Machine:
    """Return the machine that the command line describes.

    Returns: The machine. ``fedkeep resume`` later replaces its device, threads and stack by the recorded ones.
    """
    return Machine(**{name: value for name, value in vars(options).items() if name in options_of(Machine)})


def _data_of(experiment: Experiment) -> str:
    """Return what was read, a line each."""
    seed = experiment.recipe.seeds[0]
    read = data_read(describe_data(experiment.federation(seed)), experiment.describe_partition(seed))
    lines = (f"  {what}: {text}" for what, text in read.facts(CLASSES_SHOWN) if text)
    return "\n".join(["data as read:", *lines])


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
    if len(recipe.seeds) == 1:
        steps.append(("intervals over seeds", f"{again} --seeds 0,1,2"))
    elif is_undecided(rows):
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
    if recipe.name == "demo" and recipe.data == "digits":
        steps += [("the paper's setting, with Fashion-MNIST", "fedkeep run fedkeep/fashion-mnist-200 --rounds 20")]
    steps += [("what else there is to run", "fedkeep recipes")]
    report = (folder / REPORT).resolve().as_uri()
    return "\n".join([f"\nreport: {report}", "", "what to try next:", *(f"  {what}:\n    {do}" for what, do in steps)])
