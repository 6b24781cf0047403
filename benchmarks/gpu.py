"""What a GPU makes of a round: steps captured as CUDA graphs, each layer called, bfloat16, and stacks of clients.

    python benchmarks/gpu.py [--rounds 10] [--device cuda] [--networks lenet5,alexnet8] [--data-dir DIR]

prints a table with date, versions and hardware; gpu.md is what was last measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from engine_overhead import measure, ratio
from telling import arguments, beginning

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.algorithms.sequential.sfedkd import SFedKD
from fedkeep.experiment.build import build_federation, build_simulation
from fedkeep.experiment.recipe import Method
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import Algorithm
from fedkeep.training import local_training
from fedkeep.training.cuda_graph import capture_on
from fedkeep.trials.simulation import Simulation

RECIPE = "fedkeep/late-sfedkd/cifar10-2-0.5"


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__, note=False)
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds, after two to warm up (10)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--networks", default="lenet5,alexnet8", help="networks of the recipe's CIFAR-10 column")
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    where = "no GPU" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    print("\n".join(beginning("On a GPU", f"gpu.py --rounds {options.rounds}", f"{RECIPE}.", where=where)))
    print("| network, method, steps | median seconds a round | 1,000 rounds, minutes | times FedSeq, captured |")
    print("|:--|--:|--:|--:|")
    for network in options.networks.split(","):
        seconds = measure(dict(engines_of(network, options)), options.rounds)
        for label, found in seconds.items():
            median = statistics.median(found)
            against = ratio(seconds, label, "FedSeq, captured")
            print(f"| {network}, {label} | {median:.3f} | {median * 1000 / 60:.1f} | {against} |", flush=True)


@dataclass(frozen=True)
class How:
    """One way to train: the method, how its steps are taken, and in which precision."""

    algorithm: Algorithm[Any, Any]
    captured: bool = True
    precision: str = "float32"
    stack: int = 1


WAYS = {
    "FedSeq, captured": How(FedSeq()),
    "FedSeq, each layer called": How(FedSeq(), captured=False),
    "FedSeq, captured, bfloat16": How(FedSeq(), precision="bfloat16"),
    "SFedKD, captured": How(SFedKD()),
    "SFedKD, each layer called": How(SFedKD(), captured=False),
    "SFedKD, captured, bfloat16": How(SFedKD(), precision="bfloat16"),
    "FedAvg, captured": How(FedAvg()),
    "FedAvg, each layer called": How(FedAvg(), captured=False),
    "FedAvg, stacks of 10": How(FedAvg(), captured=False, stack=10),
}


def engines_of(network: str, options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield what is measured, by label; a CPU captures no steps."""
    settings = [f"model.name={network}", f"run.rounds={options.rounds + 10}", "run.evaluate_every=1000000"]
    federation = None
    for label, how in WAYS.items():
        recipe = load_recipe(RECIPE, settings=[*settings, f"training.precision={how.precision}"])
        federation = federation or build_federation(recipe, 0, options.data_dir)
        engine = build_simulation(recipe, Method("", how.algorithm), 0, federation, options.device, options.data_dir)
        engine.settings.stack = how.stack
        yield label, runner(engine, how.captured)


def runner(engine: Simulation, captured: bool) -> Callable[[], None]:
    """Return what plays a round, and waits for the device."""

    def play() -> None:
        with mock.patch.object(local_training, "capture_on", capture_on if captured else lambda device: None):
            engine.run_round()
        engine.context.synchronize()

    return play


if __name__ == "__main__":
    main()
