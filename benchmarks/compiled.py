"""What compiled steps gain: local training with `torch.compile` against the loop, and against stacks, side by side.

FedKeep measures this itself before a long run (fedkeep/trials/autotune.py). Here, for several networks and batch
sizes, are the seconds per client of a round of 16 clients with five batches each, one epoch. One thread; the order
alternates, and ratios are taken within a repetition. The seconds of compiling are those of the first round, with an
empty cache of PyTorch's. At the end the weights are compared.

    python benchmarks/compiled.py [--repetitions 9] [--note "what else ran on the machine"]

writes its result beside itself, with date, versions and hardware.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from telling import arguments, beginning, gain

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.data import DataSet, Federation
from fedkeep.data.partition import Partition
from fedkeep.interface import Algorithm, Training
from fedkeep.models import MLP, Architecture, LeNet5, Shape
from fedkeep.rounds.run_settings import RunSettings
from fedkeep.rounds.state import Settings
from fedkeep.trials.simulation import Simulation

CLIENTS, STEPS = 16, 5
CASES: dict[str, tuple[type[Algorithm], Architecture, Shape, int]] = {
    "FedAvg, MLP of 51 k weights, batches of 10": (FedAvg, MLP(hidden=(64,)), (1, 28, 28), 10),
    "SFedKD, MLP of 51 k weights, batches of 10": (SFedKD, MLP(hidden=(64,)), (1, 28, 28), 10),
    "FedAvg, LeNet-5, batches of 10": (FedAvg, LeNet5(), (1, 28, 28), 10),
    "FedAvg, LeNet-5, batches of 64": (FedAvg, LeNet5(), (1, 28, 28), 64),
}
WAYS = ("loop", "stacks of 16", "compiled")


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=9, help="after one to warm up (default: 9)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        rows = [measure(name, *case, options.repetitions) for name, case in CASES.items()]
    text = report(rows, options.repetitions, options.note)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


def simulation(method: type[Algorithm], architecture: Architecture, shape: Shape, batch: int, way: str) -> Simulation:
    """Return a method with everybody in the cohort, on random images."""
    generator, rows = torch.Generator().manual_seed(0), CLIENTS * STEPS * batch
    train = {
        "input": torch.randint(256, (rows, *shape), generator=generator).to(torch.uint8),
        "label": torch.randint(10, (rows,), generator=generator),
    }
    test = {name: column[:1] for name, column in train.items()}
    dataset = DataSet("random", train, test, tuple("abcdefghij"), (0.5,) * shape[0], (0.3,) * shape[0])
    parts = Partition("equal", {}, 0, 1, torch.arange(rows), torch.arange(0, rows + 1, STEPS * batch))
    training = Training(epochs=1, batch_size=batch, lr=0.05)
    plan = RunSettings(rounds=10_000, cohort_size=CLIENTS, evaluate_every=10_000, evaluation_models=("last",))
    stack = CLIENTS if way.startswith("stacks") else 1
    factory = lambda: architecture.build(shape, 10)  # noqa: E731
    made = Simulation(method(), Federation(dataset, parts), factory, Settings(training, plan, stack=stack))
    made.compile_steps(STEPS if way == "compiled" else 0)
    return made


def measure(
    name: str, method: type[Algorithm], architecture: Architecture, shape: Shape, batch: int, repetitions: int
) -> str:
    """Run rounds in every way, orders alternated, after two rounds each to warm up; return a row."""
    ways = [way for way in WAYS if method is FedAvg or not way.startswith("stacks")]
    ran = {way: simulation(method, architecture, shape, batch, way) for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    began = time.perf_counter()
    ran["compiled"].run_round()
    ran["compiled"].run_round()  # the first with teachers
    compiling = time.perf_counter() - began
    for way in ways[:-1]:
        ran[way].run_round()
        ran[way].run_round()
    loop, compiled = ran["loop"].server.model, ran["compiled"].server.model
    gap = max((compiled[key] - weight).abs().max().item() for key, weight in loop.items())
    for number in range(repetitions):
        for way in ways if number % 2 else reversed(ways):
            began = time.perf_counter()
            ran[way].run_round()
            seconds[way].append(time.perf_counter() - began)
    cells = [f"{1000 * statistics.median(seconds['loop']) / CLIENTS:.1f}"]
    for way in WAYS[1:]:
        cells.append(gain(seconds["loop"], seconds[way]) if way in seconds else "–")
    return f"| {name} | {' | '.join(cells)} | {compiling:.0f} | {gap:.0e} |"


def report(rows: list[str], repetitions: int, note: str | None) -> str:
    """Return the result as Markdown."""
    lines = [
        *beginning("Compiled steps", f"compiled.py --repetitions {repetitions}", note),
        "| method, network | loop, ms a client | stacks of 16 | compiled | compiling, s | gap |",
        "|:--|--:|--:|--:|--:|--:|",
        *rows,
        "",
        f"Rounds of {CLIENTS} clients with {STEPS} batches each. Times as fast as the loop, for whole rounds: the",
        "median of the ratios within a repetition (middle half). compiling: the first two rounds. gap: the largest",
        "difference between any two weights after two rounds.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
