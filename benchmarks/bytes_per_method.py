"""What each method sends: bytes to and from a client in a round, from the engine's own account.

    python benchmarks/bytes_per_method.py

Small federations of digits are enough: what travels depends on the model, the cohort and the method, not on the data.
Writes a Markdown table, in sizes of the model, of the last of four rounds, and of the first where that differs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import fedkeep
from fedkeep.experiment.recipe import load_recipe
from fedkeep.interface import algorithms
from fedkeep.interface.values import payload
from fedkeep.models.weights import weights_of

COHORT = 10
FILES = {"lander"}  # cannot run without a file of the user's
SETTINGS = (f"run.cohort={COHORT}", "training.epochs=1", "auxiliary.per_class=2", "run.evaluate_every=4")


def row(name: str) -> str:
    """Return a method's row of the table."""
    recipe = load_recipe("demo", settings=SETTINGS, methods=[name], seeds=[0], rounds=4)
    with tempfile.TemporaryDirectory() as folder:
        (cell,) = fedkeep.run(recipe, out=Path(folder) / "run").cells
    model = payload(weights_of(recipe.model.build((1, 8, 8), 10)))
    counts = [cell.rounds[place][way] / COHORT / model for place in (-1, 0) for way in ("down", "up")]
    return f"| {cell.label} | {cell.schedule} | " + " | ".join(f"{count:.2f}" for count in counts) + " |"


if __name__ == "__main__":
    print("| method | schedule | down | up | round 1: down | up |\n|:--|:--|--:|--:|--:|--:|")
    print("\n".join(row(name) for name in algorithms() if name not in FILES))
