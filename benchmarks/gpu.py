"""What a GPU makes of a sequence: FedSeq and SFedKD, which take turns round by round; ratios are taken within a round.

    python benchmarks/gpu.py [--rounds 10] [--device cuda] [--recipe sfedkd/table1/cifar10-2-0.5] [--data-dir DIR]

writes its result beside itself, with date, versions and hardware.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from engine_overhead import measure, ratio
from telling import arguments, beginning

from fedkeep.experiment.build import build_federation, build_simulation
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.trials.simulation import Simulation


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__, note=False)
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds, after two to warm up (10)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipe", default="sfedkd/table1/cifar10-2-0.5", help="one with FedSeq and SFedKD")
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    engines = engines_of(options)
    seconds = measure({label: engine.run_round for label, engine in engines.items()}, options.rounds)
    where = "no GPU" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    lines = [
        *beginning("On a GPU", f"gpu.py --rounds {options.rounds}", f"{options.recipe}.", where=where),
        "| what | median seconds per round | 1,000 rounds, minutes | times FedSeq, same steps (middle half) |",
        "|:--|--:|--:|--:|",
    ]
    for label, found in seconds.items():
        median = statistics.median(found)
        lines.append(f"| {label} | {median:.3f} | {median * 1000 / 60:.1f} | {ratio(seconds, label, 'FedSeq')} |")
    text = "\n".join([*lines, ""])
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


def engines_of(options: argparse.Namespace) -> dict[str, Simulation]:
    """Return what is measured, by label."""
    settings = [f"run.rounds={options.rounds + 10}", "run.evaluate_every=1000000"]
    recipe = load_recipe(options.recipe, settings=settings)
    federation = build_federation(recipe, 0, options.data_dir)
    methods = {method.algorithm.name(): method for method in recipe.methods}
    return {
        label: build_simulation(recipe, methods[name], 0, federation, options.device, options.data_dir)
        for name, label in {"fedseq": "FedSeq", "sfedkd": "SFedKD"}.items()
    }


if __name__ == "__main__":
    main()
