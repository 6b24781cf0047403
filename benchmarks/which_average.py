"""Which average of a sequence is best evaluated? Many of them at once, of one and the same FedSeq run.

    python benchmarks/which_average.py [--recipe R] [--rounds N] [--seed S] [--every E] [--data-dir DIR]

Averages change nothing that is trained, so one run tells about all: the round's mean, all alike or by examples, moving
averages of it with several decays, and moving averages over local trainings instead of rounds. The seed is not one of
those that docs/averaged-sequences.md reports. Writes which_average.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from fedkeep.aggregation.mean import ema
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.experiment.build import build_federation, build_simulation
from fedkeep.experiment.recipe import Method
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import Cohort, Server
from fedkeep.models import Weights
from fedkeep.models.weights import mean
from fedkeep.simulation.simulation import Simulation

DECAYS = (0.5, 0.7, 0.8, 0.9, 0.95)
VISITS = (0.9, 0.98)
caught: list[tuple[Weights, int]] = []


@dataclass(frozen=True)
class Watched(FedSeq):
    """FedSeq that lets this script see every graduate."""

    title = "watched"

    def round(self, server: Server, cohort: Cohort) -> None:
        caught.clear()
        for client in cohort:
            if reply := client.ask(self.train, server.model):
                server.model = reply.model
                caught.append((reply.model, reply.num_examples))


def averages(before: Mapping[str, Weights], last: Weights) -> dict[str, Weights]:
    """Return all averages after a round, from those before it."""
    models, examples = zip(*caught, strict=True)
    alike = mean(models)
    found: dict[str, Weights] = {"last model": last, "mean of the round": alike}
    found["mean of the round, by examples"] = mean(models, [float(count) for count in examples])
    found["mean of the round's second half"] = mean(models[len(models) // 2 :])
    for decay in DECAYS:
        name = f"moving average, {decay:g} a round"
        found[name] = ema(before.get(name, {}), alike, decay)
    for decay in VISITS:
        name = f"moving average, {decay:g} a visit"
        found[name] = before.get(name, {})
        for model in models:
            found[name] = ema(found[name], model, decay)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="fedkeep/averaged-sequences/fashion-mnist-exdir-2-0.5")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(options.recipe, rounds=options.rounds)
    federation = build_federation(recipe, options.seed, options.data_dir)
    engine = build_simulation(recipe, Method("watched", Watched()), options.seed, federation)
    scores: dict[str, dict[int, float]] = {}
    kept: dict[str, Weights] = {}
    while engine.finished < options.rounds:
        engine.run_round()
        kept = averages(kept, engine.server.model)
        if engine.finished % options.every == 0:
            for name, model in kept.items():
                scores.setdefault(name, {})[engine.finished] = accuracy(engine, model)
            print(engine.finished, {name: round(100 * values[engine.finished], 1) for name, values in scores.items()})
    write(options, recipe.title, scores)


def accuracy(engine: Simulation, model: Weights) -> float:
    """Return a model's accuracy on the test set."""
    counts = engine.evaluate(model)
    return sum(counts.correct) / sum(counts.total)


def write(options: argparse.Namespace, title: str, scores: Mapping[str, Mapping[int, float]]) -> None:
    """Write the result beside this file."""
    rounds = list(next(iter(scores.values())))
    early, late = rounds[: len(rounds) // 5], rounds[-len(rounds) // 2 :]
    command = "python benchmarks/which_average.py"
    command += f" --recipe {options.recipe} --rounds {options.rounds} --seed {options.seed}"
    lines = [
        "# Which average of a sequence is best evaluated?",
        "",
        f"`{command}`,",
        f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores.",
        f"{title}, FedSeq, one seed. Accuracy in %, mean over the evaluated rounds {early[0]} to {early[-1]} and",
        f"{late[0]} to {late[-1]}; swing: standard deviation over the latter.",
        "",
        "| evaluated | early | late | swing |",
        "|:--|--:|--:|--:|",
    ]
    for name, values in scores.items():
        few = torch.tensor([values[r] for r in early]).mean().item()
        many = torch.tensor([values[r] for r in late])
        lines.append(f"| {name} | {100 * few:.1f} | {100 * many.mean().item():.1f} | {100 * many.std().item():.1f} |")
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
