"""Run a method with the recipe and the seeds of earlier records, and tell what it gains on each method there.

python tools/benchmark.py my_method.py --against results/sequences.zip
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from fedkeep.cli.main import DEVICE, MACHINE, add_arguments, numbers
from fedkeep.cli.run import machine_of, run_with_progress
from fedkeep.cli.text import Terminal, say, say_error
from fedkeep.errors import ConfigError, FedKeepError, RunError
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.plugins import import_user_code
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.recipe_loader import parse_recipe
from fedkeep.experiment.run import prepare_run, resume_command
from fedkeep.interface import algorithms, get_algorithm
from fedkeep.reporting.html import write_all
from fedkeep.reporting.metric import Metric, headline
from fedkeep.reporting.run_folder import Run, read_run
from fedkeep.reporting.summary import Row, difference, show_difference, summary, trials_of
from fedkeep.reporting.table import TextTable, print_table


def benchmark(options: argparse.Namespace, console: Console) -> int:
    """Run methods in the setting of earlier records, and show their paired differences to the methods there."""
    machine = machine_of(options)
    import_user_code(machine.use)
    names = _import_methods(options.method)
    if options.method.endswith(".py"):
        machine = replace(machine, use=(*machine.use, options.method))
    records = read_run(options.against)
    recipe = benchmark_recipe(records, names, options.seeds, allow_code=machine.allow_code)
    experiment = Experiment(recipe, machine)
    folder = prepare_run(experiment, options.out, sys.argv)
    seeds = ", ".join(map(str, recipe.seeds))
    say(
        console,
        f"{', '.join(method.label for method in recipe.methods)} in the setting of {records.path}, seeds {seeds}",
    )
    say(console, f"run folder: {folder}")
    again = resume_command(folder, machine)
    if stop := run_with_progress(experiment.trials(folder), console, again, quiet=options.quiet):
        return stop
    rows = summary([records, write_all(folder)])
    console.print(print_table(rows, width=console.width))
    for method in recipe.methods:
        _show_gains(rows, method.label, console)
    paths = " ".join(shlex.quote(str(path)) for path in (records.path, folder))
    say(console, f"again, as a table for a paper: fedkeep compare {paths} --format latex")
    return 0


def _import_methods(method: str) -> list[str]:
    """Return the names of the methods to run: a file's own, or the one that is named."""
    if not method.endswith(".py"):
        return [get_algorithm(method).name()]
    import_user_code([method])
    path = Path(method).resolve()
    own = [name for name, cls in algorithms().items() if _file_of(cls) == path]
    if not own:
        raise ConfigError(f"{method} defines no method. `fedkeep new-method NAME` writes a file with one.")
    return own


def _file_of(cls: type) -> Path | None:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return Path(file).resolve() if file else None


def benchmark_recipe(
    records: Run, names: Sequence[str], seeds: Sequence[int] | None = None, *, allow_code: bool = False
) -> Recipe:
    """Return the recipe of earlier records with other methods.

    ``names``: Names of the methods. One whose label the records have already is called new.
    ``seeds``: The seeds (default: all of which the records have a finished trial).
    ``allow_code``: Let the recipe of the records import its model.
    """
    finished = {trial.seed for trial in records.trials if trial.finished}
    if not finished:
        raise RunError(f"{records.path} has no finished trial to compare with.")
    if unknown := sorted(set(seeds or ()) - finished):
        known = ", ".join(map(str, sorted(finished)))
        raise RunError(
            f"{records.path} has no finished trial with seed {unknown[0]}, so that nothing could be paired with it. "
            f"Choose --seeds among {known}."
        )
    if not records.recipe:
        raise RunError(f"{records.path} has no recipe.toml, which would say how its methods were run.")
    recipe = parse_recipe(records.recipe, f"the recipe of {records.path}", allow_code=allow_code)
    methods = []
    for name in names:
        algorithm = get_algorithm(name)()
        label = algorithm.title or type(algorithm).__name__
        methods.append(Method(f"{label} (new)" if label in records.labels else label, algorithm))
    title = f"{', '.join(method.label for method in methods)}, benchmarked: {records.title}"
    name = f"benchmark-{records.path.stem}"
    return replace(recipe, name=name, title=title, methods=tuple(methods), seeds=tuple(seeds or sorted(finished)))


def _show_gains(rows: Sequence[Row], label: str, console: Console) -> None:
    """Print a method's differences to all others, and how many of them it is separated from.

    Last models are compared with last models, and averages with averages of the same kind.
    """
    accuracy, forgetting = headline(trials_of(rows))
    for new in (row for row in rows if row.method == label and row.finished):
        if new.trouble:
            why = "had rounds of its window rolled back" if new.learned else "has not learned"
            say(console, f"{new.label} {why}, so that it is compared with no other.")
            continue
        kept = [row for row in rows if row.finished and not row.trouble and row.method != label]
        others = [row for row in kept if row.evaluation_model == new.evaluation_model]
        heads = (f"{new.label} minus it, {metric.title.lower()}" for metric in (accuracy, forgetting))
        lines = [
            [row.name, *(show_difference(difference(new, row, metric)) for metric in (accuracy, forgetting))]
            for row in others
        ]
        note = (
            "In points, with the 95 % interval; * within one seed. What has not learned is left out, and what had "
            "rounds of its window rolled back."
        )
        console.print(TextTable(["method", *heads], lines, note).terminal())
        say(console, _verdict(new, others, accuracy))


def _verdict(new: Row, others: Sequence[Row], metric: Metric) -> str:
    """Return how many methods one is above, below, and not separated from, and how many it is not compared with."""
    found = [difference(new, row, metric) for row in others]
    known = [one.interval for one in found if one.interval.known]
    above = sum(one.separated and one.mean > 0 for one in known)
    below = sum(one.separated and one.mean < 0 for one in known)
    reasons = Counter(one.reason for one in found if one.reason)
    unknown = len(found) - len(known) - reasons.total()
    within = " (within one seed; says nothing of other seeds)" * any(one.blocks for one in known)
    return (
        f"{new.label} beside {len(others)} {'method' if len(others) == 1 else 'methods'}: better than {above}, "
        f"worse than {below}, not separated from {len(known) - above - below}{within}"
        + "".join(f", {count} {'is' if count == 1 else 'are'} {reason}" for reason, count in reasons.items())
        + (f", and for {unknown} there is no interval: run more of their seeds." if unknown else ".")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", metavar="METHOD", help="a .py file with methods of your own, or a method's name")
    parser.add_argument("--against", required=True, metavar="RUN", help="a run folder, an archive, or a folder in one")
    parser.add_argument("--seeds", type=numbers, metavar="0,1", help="seeds (default: all that the records have)")
    parser.add_argument("--out", metavar="DIR", help="run folder (default: a new one under runs/)")
    add_arguments(parser, [*DEVICE, *MACHINE])
    try:
        return benchmark(parser.parse_args(arguments), Terminal())
    except FedKeepError as error:
        say_error(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
