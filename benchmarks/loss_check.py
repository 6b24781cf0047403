"""What the checks of replies cost: processor seconds of rounds with them, over those of the same rounds without.

Three simulations of a method take turns, round by round, in one process and on one thread; no client is malicious:

- without any check that can be turned off (`defense.check_replies=false`),
- as it comes (`default`: counts, norms, similarities, replays),
- with `defense.loss_check=server` too, which measures every returned model on examples of the server.

By default the recipe is `fedkeep/attacks` (digits, cohorts of 10, about 72 examples a client, a network of two layers).
So small a network and so few examples are the hardest case: the checks cost the same whatever a client trains on.

    python benchmarks/loss_check.py [--rounds 40] [--methods fedseq,sfedkd] [--note "what else ran on the machine"]
    python benchmarks/loss_check.py --recipe sfedkd/table1/fashion-mnist-2-0.5 --rounds 8 --out fashion_mnist_checks.md

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
from fedkeep.trials.simulation import Simulation

WARM_UP = 3
"""Rounds before the first that is measured: teachers come with the second."""
WAYS = ("defense.check_replies=false", "defense.check_replies=true", "defense.loss_check=server")


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--recipe", default="fedkeep/attacks", help="default: fedkeep/attacks")
    parser.add_argument("--rounds", type=int, default=40, help="after three to warm up (default: 40)")
    parser.add_argument("--methods", default="fedseq,sfedkd,fedavg", help="default: fedseq,sfedkd,fedavg")
    parser.add_argument("--out", default="loss_check.md", help="file of the result, in this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = f"loss_check.py --recipe {options.recipe} --rounds {options.rounds} --methods {options.methods}"
    lines = [
        *beginning("The checks of replies", command, options.note),
        "| method | ms a round without | ratio with the default checks | middle half | all rounds "
        "| ratio with the loss check | middle half | all rounds |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|",
        *(row(method, *measure(options.recipe, method, options.rounds)) for method in options.methods.split(",")),
        "",
        "Processor time of whole rounds, evaluation included. A ratio is that of the same round with and without:",
        "the same clients and batches, one right after the other, in alternating order. Shown are the median over the",
        "rounds, the middle half of them, and the ratio of the seconds of all rounds together, in which re-runs of",
        "trainings weigh as much as they take.",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    Path(__file__).with_name(options.out).write_text(text)


def measure(recipe: str, method: str, rounds: int) -> list[list[float]]:
    """Return milliseconds of each round, for each of the ways."""
    simulations = [simulation(recipe, method, way) for way in WAYS]
    taken: list[list[float]] = [[] for _ in WAYS]
    for number in range(rounds + WARM_UP):
        for turn in range(len(WAYS)):
            which = (number + turn) % len(WAYS)
            began = time.process_time()
            simulations[which].run_round()
            if number >= WARM_UP:
                taken[which].append(1e3 * (time.process_time() - began))
    return taken


def simulation(recipe: str, method: str, way: str) -> Simulation:
    """Return a simulation of the recipe, whose server has examples."""
    settings = [way, "run.rounds=1000", "auxiliary.images_per_class=8"]
    loaded = load_recipe(recipe, methods=[method], settings=settings, seeds=[0])
    return Experiment(loaded).simulation(loaded.methods[0], 0)


def row(method: str, without: list[float], *others: list[float]) -> str:
    """Return the row of the table."""
    cells = [method, f"{statistics.median(without):.1f}"]
    for taken in others:
        low, middle, high = statistics.quantiles((a / b for a, b in zip(taken, without, strict=True)), n=4)
        cells += [f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{sum(taken) / sum(without):.3f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
