"""What the engine and the teachers cost: FedSeq against a bare PyTorch loop, and SFedKD against FedSeq, side by side.

The bare loop is what one would write by hand: a plain LeNet-5, images normalised beforehand, torch.optim.SGD, the same
clients, batches and order. One thread each; the order of the three alternates from round to round, and the ratios are
taken within a round, so that what else the machine does hits all of them. At the end the weights of both are compared:
they did the same steps.

    python benchmarks/engine_overhead.py [--rounds 20] [--data-dir DIR]

writes its result beside itself, with date, versions and hardware. Without Fashion-MNIST at hand it makes random images
of the same size and number, on which steps cost the same.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path

import torch
from torch import Tensor, nn

import fedkeep
from fedkeep import seeds
from fedkeep.data import DataSet, Federation
from fedkeep.engine.embedded import Embedded
from fedkeep.errors import DataError
from fedkeep.experiment.reading import load_recipe
from fedkeep.experiment.setup import engine_for

RECIPE = "sfedkd/table1/fashion-mnist-2-0.5"


def main() -> None:
    """Measure, print and write the result."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=20, help="measured rounds, after one to warm up (default: 20)")
    arguments.add_argument("--data-dir")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPE, rounds=options.rounds + 10, settings=["run.evaluate_every=1000"])  # nobody evaluates
    dataset = load_images(options.data_dir)
    federation = Federation(dataset, recipe.partition.split(dataset.train, dataset.classes, seed=0))
    method = {m.algorithm.name(): m for m in recipe.methods}
    fedseq = engine_for(recipe, method["fedseq"], 0, federation)
    sfedkd = engine_for(recipe, method["sfedkd"], 0, federation)
    bare = BareLoop(fedseq)
    runners: dict[str, Callable[[], object]] = {"bare": bare.round, "fedseq": fedseq.advance, "sfedkd": sfedkd.advance}
    seconds = measure(runners, options.rounds)
    gap = max((bare.weights()[name] - weight).abs().max().item() for name, weight in fedseq.server.model.items())
    text = report(seconds, gap, dataset.name, options.rounds)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


def load_images(data_dir: str | None) -> DataSet:
    """Return Fashion-MNIST, or noise of its size."""
    try:
        return fedkeep.load("fashion-mnist", data_dir=data_dir)
    except (DataError, ImportError):
        noise = torch.Generator().manual_seed(0)
        train = {"image": torch.randint(256, (60_000, 1, 28, 28), generator=noise, dtype=torch.uint8)}
        train["label"] = torch.arange(60_000) % 10
        test = {name: column[:10_000] for name, column in train.items()}
        return DataSet("random images", train, test, tuple("0123456789"), (0.5,), (0.29,))


class BareLoop:
    """FedSeq as a hand-written loop over the same clients, batches and order."""

    def __init__(self, engine: Embedded) -> None:
        self.engine = engine
        self.finished = 0
        self.network = nn.Sequential(
            *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )
        self.names = list(engine.place.networks.initial)
        with torch.no_grad():
            for own, given in zip(self.network.parameters(), engine.place.networks.initial.values(), strict=True):
                own.copy_(given)
        dataset = engine.federation.dataset
        self.images, self.labels = dataset.normalise(dataset.train["image"]), dataset.train["label"]

    def round(self) -> None:
        """Train the next round's clients one after another."""
        self.finished += 1
        engine, training = self.engine, self.engine.training
        loss_of = nn.CrossEntropyLoss()
        for client in engine.draw_cohort(self.finished):
            rows = engine.federation.partition[int(client)]
            images, labels = self.images[rows], self.labels[rows]
            optimiser = torch.optim.SGD(self.network.parameters(), training.lr, weight_decay=training.weight_decay)
            order_of = seeds.generator(engine.seed, "batches", task=1, round=self.finished, client=client)
            for _ in range(training.epochs):
                order = torch.randperm(len(rows), generator=order_of)
                for batch in order.split(training.batch_size):
                    optimiser.zero_grad()
                    loss_of(self.network(images[batch]), labels[batch]).backward()
                    optimiser.step()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under the engine's names."""
        return {name: p.detach() for name, p in zip(self.names, self.network.parameters(), strict=True)}


def measure(runners: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return seconds per round of each runner, orders alternated, without the first two rounds (warm-up, no
    teachers)."""
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    orders = list(permutations(runners))
    for number in range(rounds + 2):
        for name in orders[number % len(orders)]:
            began = time.perf_counter()
            runners[name]()
            if number >= 2:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def report(seconds: dict[str, list[float]], gap: float, dataset: str, rounds: int) -> str:
    """Return the result as Markdown."""

    def ratio(a: str, b: str) -> str:
        values = sorted(x / y for x, y in zip(seconds[a], seconds[b], strict=True))
        quarter = len(values) // 4
        return f"{statistics.median(values):.2f} ({values[quarter]:.2f} to {values[-1 - quarter]:.2f})"

    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, one thread"
    lines = [
        "# Engine overhead",
        "",
        f"`python benchmarks/engine_overhead.py --rounds {rounds}`, {datetime.now(UTC):%Y-%m-%d}; {dataset};",
        f"recipe `{RECIPE}`;",
        f"FedKeep {fedkeep.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}; {machine}.",
        "",
        "| what | median seconds per round |",
        "|:--|--:|",
        *(f"| {label} | {statistics.median(seconds[name]):.2f} |" for name, label in LABELS.items()),
        "",
        "| ratio, median over rounds (middle half) | measured | target |",
        "|:--|--:|--:|",
        f"| FedSeq / bare loop | {ratio('fedseq', 'bare')} | at most 1.03 |",
        f"| SFedKD / FedSeq | {ratio('sfedkd', 'fedseq')} | at most 1.35 |",
        "",
        f"Largest difference between the weights of FedSeq and of the bare loop after all rounds: {gap:.1e}.",
        "",
    ]
    return "\n".join(lines)


LABELS = {"bare": "bare PyTorch loop", "fedseq": "FedSeq", "sfedkd": "SFedKD, 5 teachers"}


if __name__ == "__main__":
    main()
