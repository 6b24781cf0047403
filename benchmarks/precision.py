"""What bfloat16 costs in accuracy: a recipe run in float32 and in bfloat16, with the same seeds.

    python benchmarks/precision.py [--recipe demo] [--models mlp,cnn4] [--rounds N] [--seeds 0,1,2] [--data-dir DIR]

Differences are paired by seed: partition, initial weights and the order of batches are the same. Writes its result
beside itself, with date, versions and hardware. How much quicker it is: steps.py.
"""

from __future__ import annotations

import statistics
import tempfile
from itertools import product
from pathlib import Path

from telling import arguments, beginning

import fedkeep
from fedkeep.experiment.run import Machine
from fedkeep.reporting.trial import TrialResult

Found = dict[tuple[str, int], TrialResult]


def main() -> None:
    """Run, print and write the result."""
    parser = arguments(__doc__, note=False)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--models", default="mlp,cnn4")
    parser.add_argument("--rounds", type=int, help="instead of the recipe's")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    seeds, models = [int(seed) for seed in options.seeds.split(",")], options.models.split(",")
    found: dict[tuple[str, str], Found] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, precision in product(models, ("float32", "bfloat16")):
            settings = [f"model.name={model}", f"training.precision={precision}"]
            run = fedkeep.run(
                fedkeep.load_recipe(options.recipe, settings=settings),
                seeds=seeds,
                rounds=options.rounds,
                out=Path(folder) / model / precision,
                machine=Machine(workers=0, stack=1, data_dir=options.data_dir),
            )
            found[model, precision] = {(cell.label, cell.seed): cell for cell in run.trials}
    text = report(found, options.recipe, models, seeds)
    print(text)
    Path(__file__).with_suffix(".md").write_text(text)


def report(found: dict[tuple[str, str], Found], recipe: str, models: list[str], seeds: list[int]) -> str:
    """Return the result as Markdown."""
    rounds = next(iter(found[models[0], "float32"].values())).rounds_planned
    words = f"--models {','.join(models)} --rounds {rounds} --seeds {','.join(map(str, seeds))}"
    command = f"precision.py --recipe {recipe} {words}"
    lines = [
        *beginning("Accuracy in bfloat16", command, where=""),
        "| network | method | float32, mean of last 10 | bfloat16 | difference, paired by seed |",
        "|:--|:--|--:|--:|--:|",
    ]
    for model in models:
        fine, coarse = found[model, "float32"], found[model, "bfloat16"]
        for label in dict.fromkeys(label for label, _ in fine):
            before, after = ([_last_ten(trials[label, seed]) for seed in seeds] for trials in (fine, coarse))
            gaps = [b - a for a, b in zip(before, after, strict=True)]
            lines.append(f"| {model} | {label} | {_told(before)} | {_told(after)} | {_told(gaps, signed=True)} |")
    return "\n".join([*lines, "", "Accuracy in %, mean ± standard deviation over seeds.", ""])


def _last_ten(trial: TrialResult) -> float:
    return 100 * float(trial.accuracies[-10:].mean())


def _told(values: list[float], signed: bool = False) -> str:
    spread = f" ±{statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{'+' if signed else ''}.2f}{spread}"


if __name__ == "__main__":
    main()
