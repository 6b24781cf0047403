"""What a GPU makes of a sequence: FedSeq and SFedKD, with steps launched one kernel at a time and as CUDA graphs.

All take turns round by round, and ratios are taken within a round. At the end the losses are compared: graphs must take
the same steps.

    python benchmarks/gpu.py [--rounds 10] [--device cuda] [--recipe sfedkd/table1/cifar10-2-0.5] [--data-dir DIR]

writes its result beside itself, with date, versions and hardware. On a CPU there are no graphs; that only shows that
the script runs.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from engine_overhead import measure, ratio
from telling import arguments, beginning

from fedkeep.engine.embedded import Embedded
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.experiment.setup import engine_for, federate


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__, note=False)
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds, after two to warm up (10)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipe", default="sfedkd/table1/cifar10-2-0.5", help="one with FedSeq and SFedKD")
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    engines = engines_of(options)
    losses: dict[str, list[float]] = {label: [] for label in engines}

    def play(label: str) -> None:
        losses[label].append(engines[label].advance().record["loss"])

    seconds = measure({label: lambda label=label: play(label) for label in engines}, options.rounds)  # type: ignore[misc]
    where = "no GPU" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    lines = [
        *beginning("On a GPU", f"gpu.py --rounds {options.rounds}", f"{options.recipe}.", where=where),
        "| what | median seconds per round | 1,000 rounds, minutes | times FedSeq, same steps (middle half) |",
        "|:--|--:|--:|--:|",
    ]
    for label, found in seconds.items():
        fedseq = "FedSeq" + label.removeprefix("FedSeq").removeprefix("SFedKD")
        median = statistics.median(found)
        lines.append(f"| {label} | {median:.3f} | {median * 1000 / 60:.1f} | {ratio(seconds, label, fedseq)} |")
    for name in ("FedSeq", "SFedKD"):
        if (graphs := f"{name}, CUDA graphs") in losses:
            pairs = zip(losses[name], losses[graphs], strict=True)
            gap = max(abs(one - other) / one for one, other in pairs)
            lines += ["", f"{name}: the losses of the rounds differ by up to {gap:.1e} of themselves with graphs."]
    text = "\n".join([*lines, ""])
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


def engines_of(options: argparse.Namespace) -> dict[str, Embedded]:
    """Return what is measured, by label."""
    settings = [f"run.rounds={options.rounds + 10}", "run.evaluate_every=1000000"]
    recipe = load_recipe(options.recipe, settings=settings)
    federation = federate(recipe, 0, options.data_dir)
    methods = {method.algorithm.name(): method for method in recipe.methods}
    engines = {}
    for graphs in (False, True)[: 1 if options.device == "cpu" else 2]:
        for name, label in {"fedseq": "FedSeq", "sfedkd": "SFedKD"}.items():
            engine = engine_for(recipe, methods[name], 0, federation, options.device, options.data_dir, graphs=graphs)
            engines[label + ", CUDA graphs" * graphs] = engine
    return engines


if __name__ == "__main__":
    main()
