"""``fedkeep run``, ``resume`` and ``tune``: run recipes, and choose options on held-out examples."""

import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fedkeep._utils.process import Terminated
from fedkeep.cli.dry_run import dry_run
from fedkeep.cli.text import Terminal, say
from fedkeep.display import Display
from fedkeep.errors import ConfigError, FedKeepError
from fedkeep.experiment.experiment import Experiment, Trial, describe_data
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.provenance import check_code
from fedkeep.experiment.python_recipe import fit_cohort
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.run import check_run_folder, dated_folder, join_run, open_run, prepare_run, resume_command
from fedkeep.experiment.runtime import Machine
from fedkeep.experiment.trial_runner import run_trials
from fedkeep.options import options_of
from fedkeep.reporting.findings import is_undecided, warnings
from fedkeep.reporting.html import REPORT, write_all
from fedkeep.reporting.metric import check_main
from fedkeep.reporting.summary import Row, summary
from fedkeep.reporting.table import print_table
from fedkeep.reporting.trial import data_read
from fedkeep.tuning import BEST, RUN
from fedkeep.tuning import tune as choose

CLASSES_SHOWN = 12
"""Classes and clients that are listed on the console; the report has all."""


CHANGING = ("settings", "methods", "seeds", "rounds", "log", "grid")
"""The options of commands that change a recipe, as `load_recipe` takes them by name."""
TUNED = ("methods", "seeds", "rounds", "validation", "settings", "reported_seeds")
"""The options of ``fedkeep tune`` that `fedkeep.tuning.tune` takes by name."""


def run(options: Namespace, console: Console) -> int:
    """Run a recipe and show its results."""
    machine = machine_of(options)
    recipe = recipe_of(options, allow_code=machine.allow_code)
    check_main(recipe.run.metric)
    if options.dry_run:
        with suppress(FedKeepError):  # the estimate raises it too
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
    return _run_and_show(folder, experiment, console, quiet=options.quiet)


def resume(options: Namespace, console: Console) -> int:
    """Continue a run and show its results."""
    machine = machine_of(options)
    folder = Path(options.run)
    check_run_folder(folder)
    check_code(folder, machine.use)  # first: it says where the copies are of methods that are not known
    experiment = open_run(folder, machine)
    return _run_and_show(folder, experiment, console, quiet=options.quiet)


def tune(options: Namespace, console: Console) -> int:
    """Run all points of a grid, and show the best."""
    machine, out = machine_of(options), options.out or dated_folder(options.recipe, "tune-")
    try:
        with Display(console, {}, quiet=options.quiet) as display:
            tuning = choose(
                options.recipe, options.grid, machine=machine, on_progress=display, out=out,
                **{name: getattr(options, name) for name in TUNED},
            )  # fmt: skip
    except (KeyboardInterrupt, Terminated) as stop:
        return say_stopped(stop, f"the same command with --out {shlex.quote(str(out))}", console)
    table = tuning.table.terminal()
    for row, (*_, verdict) in zip(table.rows, tuning.table.lines, strict=True):
        row.style = "bold" if verdict == "best" else ""
    console.print(table)
    say(console, f"folder: {tuning.path}, with the report of all points in {RUN}/")
    own = "".join(f" --use {shlex.quote(file)}" for file in options.use)
    again = f"fedkeep run {shlex.quote(str(tuning.path / BEST))}{own}"
    say(console, f"now with the reported seeds, on the test examples: {again}")
    return 0


def _run_one(options: Namespace, experiment: Experiment, console: Console) -> int:
    """Run one trial of a run that other processes may be running too."""
    if options.out is None:
        raise ConfigError("--trial needs the run folder that all trials share: --out DIR.")
    count = len(experiment.recipe.methods) * len(experiment.recipe.seeds)
    if options.trial > count:
        raise ConfigError(f"there is no trial {options.trial}: this run has {count}, counted from 1.")
    folder = join_run(experiment, options.out, ["fedkeep", *sys.argv[1:]])
    check_code(folder, experiment.machine.use)
    experiment = open_run(folder, experiment.machine)
    trial = experiment.all_trials(folder)[options.trial - 1]
    again = shlex.join(["fedkeep", *sys.argv[1:]])
    if not trial.is_finished and (stop := run_with_progress([trial], console, again, quiet=options.quiet)):
        return stop
    report = resume_command(folder, replace(experiment.machine, workers=0, executor="processes", address=None))
    say(console, f"trial {options.trial} of {count}, {trial.name}, is finished. When all are: {report}")
    return 0


SAVED = "finished rounds are saved; a round that was going begins again"


def run_with_progress(trials: Sequence[Trial], console: Console, again: str, *, quiet: bool) -> int:
    """Run trials and show their progress; the exit code is 0, or that of a signal that stopped them."""
    try:
        with Display(console, {trial.name: trial.rounds for trial in trials}, quiet=quiet) as display:
            run_trials(trials, retry=again, on_progress=display)
    except (KeyboardInterrupt, Terminated) as stop:
        return say_stopped(stop, again, console)
    return 0


def say_stopped(stop: KeyboardInterrupt | Terminated, command: str, console: Console, saved: str = SAVED) -> int:
    """Say that a run was stopped and how it goes on, and return the exit code: 128 plus the signal's number."""
    by, code = (f" by {stop.signal}", int(stop.code or 1)) if isinstance(stop, Terminated) else ("", 130)
    text = f"\nstopped{by}; {saved}. Continue with: {command}"
    with suppress(OSError, Terminated):  # the terminal may be closed
        say(Terminal(stderr=True) if "SIGPIPE" in by else console, text)
    return code


def _run_and_show(folder: Path, experiment: Experiment, console: Console, *, quiet: bool) -> int:
    """Run the trials that are not finished, write the report, and show the results."""
    again = resume_command(folder, experiment.machine)
    if stop := run_with_progress(experiment.trials(folder), console, again, quiet=quiet):
        return stop
    result = write_all(folder)
    rows = summary(result)
    console.print()
    console.print(print_table(rows, width=console.width))
    for line in warnings(result.trials, result.settings):
        console.print(f"warning: {line}", style="yellow", markup=False)
    say(console, _next_steps(folder, experiment, rows))
    return 0


def recipe_of(options: Namespace, *, allow_code: bool = False) -> Recipe:
    """Return the recipe that the command line names, with its changes.

    ``allow_code``: Let the recipe import its model.
    """
    given = {name: value for name, value in vars(options).items() if name in CHANGING and value}
    recipe = load_recipe(options.recipe, allow_code=allow_code, **given)
    set_here = {setting.partition("=")[0].strip() for setting in options.settings or ()}
    by_column = "partition.scheme" in set_here and "run.cohort_size" not in set_here
    return fit_cohort(recipe, getattr(options, "data_dir", None)) if by_column else recipe


def machine_of(options: Namespace) -> Machine:
    """Return the machine that the command line describes, with the user's code imported.

    Returns: The machine. ``fedkeep resume`` later replaces its device, threads and stack by the recorded ones.
    """
    machine = Machine(**{name: value for name, value in vars(options).items() if name in options_of(Machine)})
    import_user_code(machine.use)
    return machine


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
        steps.append(("more seeds", f"{again} --seeds {more}"))
        steps.append(("both runs as one table", f"fedkeep compare {shlex.quote(str(folder))} THE_NEW_RUN"))
    own = "".join(f" --use {shlex.quote(file)}" for file in machine.use)
    last = recipe.methods[-1]
    steps += [
        (f"what {last.label} does", f"fedkeep methods {last.algorithm.name()}{own}"),
        ("a table for a paper", f"fedkeep report {shlex.quote(str(folder))} --format latex"),
        ("this run again", again),
        ("what else there is to run", "fedkeep recipes"),
    ]
    report = (folder / REPORT).resolve().as_uri()
    return "\n".join([f"\nreport: {report}", "", "what to try next:", *(f"  {what}:\n    {do}" for what, do in steps)])
