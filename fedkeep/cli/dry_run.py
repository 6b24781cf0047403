"""What a run would take: its trials, with an estimate of the time, memory and bytes of each on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape

from fedkeep.cli.text import plain_table, say
from fedkeep.display import duration
from fedkeep.errors import FedKeepError
from fedkeep.experiment.estimate import NotEstimated, estimate
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.runtime import Machine
from fedkeep.reporting.table import human_bytes


def dry_run(
    recipes: dict[str, Recipe],
    machine: Machine,
    console: Console,
    is_done: Callable[[str, str, int], bool] = lambda name, label, seed: False,
) -> int:
    """List the trials of recipes with what each is expected to take; nothing is written.

    ``recipes``: By the name of a column; empty for the only one.
    ``is_done``: Tells of a column, a method's label and a seed whether it was run before.
    """
    heads = [*["column"] * any(recipes), "method", "seeds", "rounds", "time a seed", "memory", "sent in all"]
    table = plain_table(*heads)
    total, unknown = 0.0, list[str]()
    for name, recipe in recipes.items():
        for method in recipe.methods:
            first = [*[name] * bool(name), escape(method.label)]
            seeds = [seed for seed in recipe.seeds if not is_done(name, method.label, seed)]
            if not seeds:
                table.add_row(*first, "-", str(recipe.rounds), "done", "", "")
                continue
            shown, missing = ["?", "?", "?"], False
            try:
                expected = estimate(recipe, method, machine)
            except NotEstimated as reason:
                unknown.append(str(reason))
            except FedKeepError as error:  # such as a data set that is not available
                if not name:
                    raise
                unknown.append(f"{name}: {error}")
                missing = True
            else:
                total += expected.seconds * len(seeds)
                shown = [duration(expected.seconds), f"{expected.memory / 1e9:.1f} GB", human_bytes(expected.sent)]
            table.add_row(*first, _listed(seeds), str(recipe.rounds), *shown)
            if missing:
                break
    console.print(table)
    exception = ", without those that show a ?" if unknown else ""
    say(
        console,
        f"In all about {duration(total)} on one core of this machine, if nothing else runs{exception}. It was measured "
        "in a few steps; teachers that join in later rounds may add to it. sent in all: what server and clients send "
        "each other for a seed. Nothing was run.",
        paragraphs=True,
    )
    for line in dict.fromkeys(unknown):
        say(console, line)
    return 0


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
