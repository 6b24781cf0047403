"""Which average of a sequence is best evaluated? Many of them at once, of one and the same FedSeq run.

    python benchmarks/which_average.py [--recipe R] [--rounds N] [--seeds S ...] [--lr LR] [--every E] [--data-dir DIR]

Averages change nothing that is trained, so one run tells about all: the round's mean, all alike, by examples, or with
the classifier's rows by examples of their class; moving averages of the round's mean with several decays, constant
or growing; moving averages over local trainings instead of rounds; the mean of all rounds so far, or of the later half.
Seeds are none of those that docs/averaged-sequences.md reports, and accuracy is measured on a tenth of the training
images that no client has. Writes which_average.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor

from fedkeep.aggregation.mean import ema
from fedkeep.experiment.build import build_federation, build_simulation
from fedkeep.experiment.recipe import Method
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.interface.algorithm import send_label_counts
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.models.weights import mean
from fedkeep.trials.simulation import Simulation

DECAYS = (0.5, 0.7, 0.8, 0.9, 0.95)
LIMITS = (0.9, 0.95, 0.98)
VISITS = (0.9, 0.98)
caught: list[tuple[Weights, Tensor]] = []
SETTINGS = ("data.validation=0.1",)


@dataclass
class KnownCounts:
    """What the server keeps: each client's number of examples of each class."""

    counts: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Watched(Algorithm[KnownCounts]):
    """FedSeq that lets this script see the model of every client, and its examples of each class."""

    title = "watched"
    sequential = True

    send_label_counts = send_label_counts

    def round(self, server: Server[KnownCounts], cohort: Cohort) -> None:
        caught.clear()
        server.state.counts |= cohort.without(server.state.counts).ask(self.send_label_counts)
        for client in cohort:
            if reply := client.ask(self.train, server.model):
                server.model = reply.model
                caught.append((reply.model, server.state.counts[client.id]))

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        return client.fit(model, CrossEntropy())


def by_class(models: Sequence[Weights], counts: Sequence[Tensor]) -> Weights:
    """Return the mean of models in which each row of the classifier is weighted by the examples of its class.

    A class that no client has counts all alike, as do all tensors before the classifier, the last weight and bias.
    """
    found = dict(mean(models))
    shares = torch.stack(list(counts))  # [models, classes]
    shares = torch.where(shares.sum(0) > 0, shares, 1.0)
    shares = shares / shares.sum(0)
    for name in list(found)[-2:]:
        rows = torch.stack([model[name] for model in models])
        found[name] = (shares.view(*shares.shape, *[1] * (rows.dim() - 2)) * rows).sum(0)
    return found


def averages(before: Mapping[str, Weights], last: Weights, round_means: list[Weights]) -> dict[str, Weights]:
    """Return all averages after a round, from those before it; the round's mean joins those of the rounds before."""
    models, counts = zip(*caught, strict=True)
    alike, rows = mean(models), by_class(models, counts)
    round_means.append(alike)
    number = len(round_means)
    found: dict[str, Weights] = {"last model": last, "mean of the round": alike}
    found["mean of the round, by examples"] = mean(models, [float(count.sum()) for count in counts])
    found["mean of the round, classifier by class"] = rows
    found["mean of the round's second half"] = mean(models[len(models) // 2 :])
    for decay in DECAYS:
        name = f"moving average, {decay:g} a round"
        found[name] = ema(before.get(name, {}), alike, decay)
    for limit in LIMITS:
        name = f"moving average, growing to {limit:g}"
        found[name] = ema(before.get(name, {}), alike, min(limit, (1 + number) / (10 + number)))
    name = "moving average, 0.9 a round, classifier by class"
    found[name] = ema(before.get(name, {}), rows, 0.9)
    found["mean of all rounds so far"] = mean(round_means)
    found["mean of the later half of the rounds so far"] = mean(round_means[number // 2 :])
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = (*SETTINGS, f"training.lr={options.lr}")
    recipe = load_recipe(options.recipe, rounds=options.rounds, settings=settings)
    scores: dict[str, dict[tuple[int, int], float]] = {}
    for seed in options.seeds:
        federation = build_federation(recipe, seed, options.data_dir)
        engine = build_simulation(recipe, Method("watched", Watched()), seed, federation)
        kept: dict[str, Weights] = {}
        round_means: list[Weights] = []
        while engine.finished < options.rounds:
            engine.run_round()
            kept = averages(kept, engine.server.model, round_means)
            if engine.finished % options.every == 0:
                for name, model in kept.items():
                    scores.setdefault(name, {})[seed, engine.finished] = accuracy(engine, model)
                print(seed, engine.finished, f"{scores['moving average, 0.9 a round'][seed, engine.finished]:.3f}")
    write(options, scores)


def accuracy(engine: Simulation, model: Weights) -> float:
    """Return a model's accuracy on the test set."""
    counts = engine.evaluate(model)
    return sum(counts.correct) / sum(counts.total)


def write(options: argparse.Namespace, scores: Mapping[str, Mapping[tuple[int, int], float]]) -> None:
    """Write the result beside this file."""
    rounds = range(options.every, options.rounds + 1, options.every)
    early, late = rounds[: len(rounds) // 5], rounds[-len(rounds) // 2 :]
    seeds = ", ".join(map(str, options.seeds))
    command = f"python benchmarks/which_average.py --recipe {options.recipe} --rounds {options.rounds}"
    command += f" --seeds {' '.join(map(str, options.seeds))} --lr {options.lr}"
    lines = [
        "# Which average of a sequence is best evaluated?",
        "",
        f"`{command}`,",
        f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores.",
        f"FedSeq, seeds {seeds}. Accuracy in % on a tenth of the training images that no client has, mean over the",
        f"evaluated rounds {early[0]} to {early[-1]} and {late[0]} to {late[-1]}, in brackets by seed; swing: standard",
        "deviation over the latter rounds of a seed, mean over seeds. Growing to L: round t decays by the smaller of",
        "(1 + t) / (10 + t) and L.",
        "",
        "| evaluated | early | late | swing |",
        "|:--|--:|--:|--:|",
    ]
    for name, values in scores.items():
        cells = [name]
        for window in (early, late):
            means = [100 * fmean(values[seed, number] for number in window) for seed in options.seeds]
            cells.append(f"{fmean(means):.1f} ({', '.join(f'{value:.1f}' for value in means)})")
        swings = [100 * stdev(values[seed, number] for number in late) for seed in options.seeds]
        lines.append(f"| {' | '.join(cells)} | {fmean(swings):.1f} |")
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
