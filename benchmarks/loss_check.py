"""What the check of losses costs: processor seconds of a run with it, over those without.

`defense.loss_check=server` measures every returned model on examples of the server before it is used. Here the methods
of the recipe `fedkeep/attacks` (digits, cohorts of 10, about 72 examples a client, a network of two layers) train with
and without it, round by round and alternately, in one process and on one thread; no client is malicious. So small a
network and so few examples are the hardest case: the check costs the same whatever a client trains on.

    python benchmarks/loss_check.py [--rounds 40] [--methods fedseq,sfedkd] [--note "what else ran on the machine"]

writes its result beside itself, with date, versions and hardware.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from telling import arguments, beginning

from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.simulation.simulation import Simulation

WARM_UP = 3
"""Rounds before the first that is measured: teachers come with the second."""


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="after three to warm up (default: 40)")
    parser.add_argument("--methods", default="fedseq,sfedkd,fedavg", help="default: fedseq,sfedkd,fedavg")
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = f"loss_check.py --rounds {options.rounds} --methods {options.methods}"
    lines = [
        *beginning("The check of losses", command, options.note),
        "| method | ms a round without | with | times as long, median | middle half of the rounds |",
        "|:--|--:|--:|--:|--:|",
        *(row(method, *measure(method, options.rounds)) for method in options.methods.split(",")),
        "",
        "Processor time of whole rounds, evaluation included. The ratio is that of the same round with and without:",
        "the same clients and batches, one right after the other, in alternating order.",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


def measure(method: str, rounds: int) -> tuple[list[float], list[float]]:
    """Return milliseconds of each round without and with the check."""
    pair = simulation(method, "off"), simulation(method, "server")
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + WARM_UP):
        for which in (0, 1) if number % 2 else (1, 0):
            began = time.process_time()
            pair[which].run_round()
            if number >= WARM_UP:
                taken[which].append(1e3 * (time.process_time() - began))
    return taken


def simulation(method: str, check: str) -> Simulation:
    """Return a simulation of the recipe."""
    settings = [f"defense.loss_check={check}", "run.rounds=1000"]
    recipe = load_recipe("fedkeep/attacks", methods=[method], settings=settings, seeds=[0])
    return Experiment(recipe).simulation(recipe.methods[0], 0)


def row(method: str, without: list[float], with_check: list[float]) -> str:
    """Return the row of the table."""
    ratios = [slow / fast for slow, fast in zip(with_check, without, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    shown = f"{statistics.median(without):.1f} | {statistics.median(with_check):.1f}"
    return f"| {method} | {shown} | {middle:.3f} | {low:.3f} to {high:.3f} |"


if __name__ == "__main__":
    main()
