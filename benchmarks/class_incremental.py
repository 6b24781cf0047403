"""What FedSKF costs beside FedLwF: rounds of both, taking turns, in a task with old classes.

FedSKF has a second teacher, a term on the classifier and the projection of the mean onto one client's neurons more.
Old models are asked in a task's first round and what they said is kept (nothing is augmented), so that round is told
apart. Random images, as many for each client; one thread, CPU time, so that what else the machine does counts little.
Rounds are shorter here than a paper's, in which what is done once a round, the projection, counts for less.

    python benchmarks/class_incremental.py [--rounds 6] [--resnet] [--note "what else ran on the machine"]

writes its result beside itself, with date, versions and hardware.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from telling import arguments, beginning

from fedkeep import FedLwF, FedSKF
from fedkeep.data import DataSet, Federation, Tasks
from fedkeep.data.partition import IID
from fedkeep.interface import Algorithm, Training
from fedkeep.models import Architecture, Shape
from fedkeep.models.networks import CNN4, LeNet5, ResNet18
from fedkeep.rounds.run_settings import RunSettings
from fedkeep.rounds.state import Settings
from fedkeep.trials.simulation import Simulation

CLIENTS, CLASSES, TASKS, TARGET = 5, 10, 2, 1.25
METHODS: tuple[Algorithm[Any, Any], ...] = (FedLwF(), FedSKF())


@dataclass(frozen=True)
class Case:
    """A network, a client's examples in each task, and epochs over them in batches of 50."""

    label: str
    architecture: Architecture
    shape: Shape
    examples: int
    epochs: int


CASES = (
    Case("LeNet-5", LeNet5(), (1, 28, 28), 400, 5),
    Case("CNN-4", CNN4(), (3, 32, 32), 200, 2),
    Case("ResNet-18, batch norm", ResNet18(), (3, 32, 32), 50, 2),
)


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="of each of two tasks (default: 6)")
    parser.add_argument("--resnet", action="store_true", help="ResNet-18 too: many minutes")
    options = parser.parse_args()
    if options.rounds < 2:
        arguments.error("a task needs at least two rounds: in the first of them old models are asked.")
    torch.set_num_threads(1)
    rows = [row(case, options.rounds) for case in CASES if options.resnet or case.architecture.name != "resnet18"]
    text = report(rows, options)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


def engine(case: Case, method: Algorithm[Any, Any], rounds: int) -> Simulation:
    """Return a run on random images, at its beginning."""
    noise, count = torch.Generator().manual_seed(0), CLIENTS * TASKS * case.examples
    images = torch.randint(256, (count, *case.shape), generator=noise, dtype=torch.uint8)
    train = {"input": images, "label": torch.arange(count) % CLASSES}
    test = {name: column[:CLASSES] for name, column in train.items()}
    middle = (0.5,) * case.shape[0]
    data = DataSet("noise", train, test, tuple(map(str, range(CLASSES))), middle, middle)
    return Simulation(
        method,
        Federation.from_stream(Tasks(num_tasks=TASKS).stream(data, IID(num_clients=CLIENTS), 0), 1),
        lambda: case.architecture.build(case.shape, CLASSES // TASKS),
        Settings(
            Training(epochs=case.epochs, batch_size=50, lr=0.01, momentum=0.9),
            RunSettings(rounds=rounds, cohort_size=CLIENTS, evaluation_models=("last",)),
        ),
    )


def row(case: Case, rounds: int) -> str:
    """Play both methods, a round each in turn, and return the row of the table: the last task's rounds."""
    engines = [engine(case, method, rounds) for method in METHODS]
    seconds: list[list[float]] = [[] for _ in engines]
    asked: list[list[float]] = [[] for _ in engines]
    for number in range(TASKS * rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            began = time.process_time()
            timings = engines[place].run_round().timings
            if number >= (TASKS - 1) * rounds:
                seconds[place].append(time.process_time() - began)
                asked[place].append(timings["teachers"])
    assert all(max(later) < 0.1 * first for first, *later in asked), "old models are asked in the first round only"
    first, *ratios = (ours / theirs for theirs, ours in zip(*seconds, strict=True))
    lwf, skf = (f"{statistics.median(one[1:]):.2f}" for one in seconds)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    steps = CLIENTS * case.epochs * -(-case.examples // 50)
    return f"| {case.label} | {steps} | {lwf} | {skf} | {spread} | {first:.2f} |"


def report(rows: list[str], options: argparse.Namespace) -> str:
    """Return the result as Markdown."""
    lines = [
        *beginning(
            "FedSKF beside FedLwF",
            f"class_incremental.py --rounds {options.rounds}{' --resnet' if options.resnet else ''}",
            options.note,
        ),
        "| network | steps a round | FedLwF, s a round | FedSKF, s a round | FedSKF / FedLwF | the same in the first |",
        "|:--|--:|--:|--:|--:|--:|",
        *rows,
        "",
        f"The target is at most {TARGET} (both without augmentation). Seconds are of CPU time; they and the ratios are",
        "medians over a task's rounds but the first (lowest to highest). In the first old models are asked, one for",
        "FedLwF and two for FedSKF, and in no later one.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
