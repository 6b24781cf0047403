"""What stacking gains: clients of a cohort trained as one stacked model against one after another, side by side.

FedKeep measures this itself before a run's first round (fedkeep/trials/autotune.py). Here, for several networks and
sizes of stack, are the seconds per client of a round of 32 clients with 50 examples each, batches of 10, one epoch. One
thread; the order alternates, and ratios are taken within a repetition. At the end the weights are compared.

    python benchmarks/stacks.py [--repetitions 9] [--note "what else ran on the machine"]

writes its result beside itself, with date, versions and hardware.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from telling import arguments, beginning, gain

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.data import DataSet, Federation
from fedkeep.data.partition import Partition
from fedkeep.interface import Training
from fedkeep.models import Architecture, Shape
from fedkeep.models.networks import CNN4, MLP, LeNet5
from fedkeep.rounds.run_settings import RunSettings
from fedkeep.rounds.state import Settings
from fedkeep.trials.simulation import Simulation

SIZES = (1, 4, 8, 16, 32)
CLIENTS, EXAMPLES = 32, 50
CASES: dict[str, tuple[Architecture, Shape]] = {
    "MLP, 51 k weights": (MLP(hidden=(64,)), (1, 28, 28)),
    "LeNet-5": (LeNet5(), (1, 28, 28)),
    "CNN-4": (CNN4(), (3, 32, 32)),
}


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=9, help="after one to warm up (default: 9)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, *case, options.repetitions) for name, case in CASES.items()]
    text = report(rows, options.repetitions, options.note)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


def engine(architecture: Architecture, shape: Shape, stack: int) -> Simulation:
    """Return FedAvg with everybody in the cohort, on random images."""
    generator, rows = torch.Generator().manual_seed(0), CLIENTS * EXAMPLES
    train = {
        "input": torch.randint(256, (rows, *shape), generator=generator).to(torch.uint8),
        "label": torch.randint(10, (rows,), generator=generator),
    }
    test = {name: column[:1] for name, column in train.items()}
    dataset = DataSet("random", train, test, tuple("abcdefghij"), (0.5,) * shape[0], (0.3,) * shape[0])
    parts = Partition("equal", {}, 0, 1, torch.arange(rows), torch.arange(0, rows + 1, EXAMPLES))
    training = Training(epochs=1, batch_size=10, lr=0.1)
    plan = RunSettings(rounds=10_000, cohort_size=CLIENTS, evaluate_every=10_000, evaluation_models=("last",))
    federation = Federation(dataset, parts)
    return Simulation(
        FedAvg(), federation, lambda: architecture.build(shape, 10), Settings(training, plan, stack=stack)
    )


def measure(name: str, architecture: Architecture, shape: Shape, repetitions: int) -> str:
    """Play rounds with every size of stack, orders alternated, after one round each to warm up; return a row."""
    engines = {size: engine(architecture, shape, size) for size in SIZES}
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    for one in engines.values():
        one.run_round()
    gap = max(
        (other.server.model[key] - weight).abs().max().item()
        for other in engines.values()
        for key, weight in engines[1].server.model.items()
    )
    for number in range(repetitions):
        for size in SIZES if number % 2 else reversed(SIZES):
            began = time.perf_counter()
            engines[size].run_round()
            seconds[size].append(time.perf_counter() - began)
    cells = [f"{1e3 * statistics.median(seconds[1]) / CLIENTS:.2f}"]
    for size in SIZES[1:]:
        cells.append(gain(seconds[1], seconds[size]))
    return f"| {name} | {' | '.join(cells)} | {gap:.0e} |"


def report(rows: list[str], repetitions: int, note: str | None) -> str:
    """Return the result as Markdown."""
    lines = [
        *beginning("Stacked cohorts", f"stacks.py --repetitions {repetitions}", note),
        f"| network | one by one, ms a client | {' | '.join(f'{size} as one' for size in SIZES[1:])} | gap |",
        f"|:--|{'--:|' * (len(SIZES) + 1)}",
        *rows,
        "",
        "Times as fast as one by one, for whole rounds: the median of the ratios within a repetition (middle half).",
        "gap: the largest difference between any two weights after the first round.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
