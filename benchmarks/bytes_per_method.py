"""What each method sends: bytes to and from a client in a round, from the engine's own account.

    python benchmarks/bytes_per_method.py

Small federations of digits are enough: what travels depends on the model, the cohort and the method, not on the data.
Writes two Markdown tables, in sizes of the model. Of methods that know nothing of tasks: the last of four rounds, and
the first. Of methods for classes that arrive in tasks: a round within the second task, and for every client, asked or
not, what the task's end adds. Left out are methods that send a model each way, or predictions, or images that the
server makes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fedkeep
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import algorithms, get_algorithm
from fedkeep.interface.pytree import num_bytes
from fedkeep.models.weights import state_dict_copy

COHORT = 10
IMAGES = {"lander", "target"}  # send images that the server makes, as many as an option says
SETTINGS = (f"run.cohort_size={COHORT}", 'run.evaluation_models=["last"]', "training.epochs=1")
WAYS = ("down", "up")
ONE_MODEL = ("| 1.00 | 1.00 | 1.00 | 1.00 |", "| 1.00 | 1.00 | 1.00 | 0.00 |")


def row(name: str) -> str:
    """Return a method's row of its table."""
    return _with_tasks(name) if get_algorithm(name).handles_tasks else _without_tasks(name)


def _without_tasks(name: str) -> str:
    public = "public" in get_algorithm(name).needs
    settings = (*SETTINGS, "public.name=digits" if public else "auxiliary.images_per_class=2", "run.evaluate_every=4")
    recipe = load_recipe("demo", settings=settings, methods=[name], seeds=[0], rounds=4)
    cell, model = _played(recipe)
    return _row(cell, (cell.rounds[place][way] / COHORT / model for place in (-1, 0) for way in WAYS))


def _with_tasks(name: str) -> str:
    settings = (*SETTINGS, "tasks.num_tasks=2", "run.evaluate_every=3")
    recipe = load_recipe("demo", settings=settings, methods=[name], seeds=[0], rounds=3)
    cell, model = _played(recipe)
    *_, within, last = cell.rounds
    ends = ((last[way] - within[way]) / recipe.partition.num_clients / model for way in WAYS)
    return _row(cell, (*(within[way] / COHORT / model for way in WAYS), *ends))


def _played(recipe: Recipe) -> tuple[Any, int]:
    """Return the one cell of a recipe, and the bytes of its model with all classes."""
    with tempfile.TemporaryDirectory() as folder:
        (cell,) = fedkeep.run(recipe, out=Path(folder) / "run").trials
    return cell, num_bytes(state_dict_copy(recipe.model.build((1, 8, 8), 10)))


def _row(cell: Any, counts: Iterable[float]) -> str:
    return (
        f"| {cell.label} | {'sequential' if cell.sequential else 'parallel'} | "
        + " | ".join(f"{count:.2f}" for count in counts)
        + " |"
    )


def _print_table(last: str, names: Iterable[str]) -> None:
    print(f"| method | clients train | down | up | {last}: down | up |\n|:--|:--|--:|--:|--:|--:|")
    print("\n".join(found for found in map(row, names) if not found.endswith(ONE_MODEL)))


if __name__ == "__main__":
    known = {name: cls for name, cls in algorithms().items() if cls.networks == "one" and name not in IMAGES}
    _print_table("round 1", (name for name, cls in known.items() if not cls.handles_tasks))
    print()
    _print_table("task's end", (name for name, cls in known.items() if cls.handles_tasks))
