"""Why is the moving average of a sequence so much better than its last model, and what else could make it better?

    python benchmarks/why_averages.py why [--rows FILE] [--data-dir DIR]
    python benchmarks/why_averages.py variants [--rows FILE] [--data-dir DIR] [--only NAME ...] [--seeds S ...]

``why`` looks at the models of one FedSeq run: how far they are apart, and how accurate what lies between them is.
``variants`` tries other sequences: parallel chains, and clients in the order of their label counts. Each variant is a
subclass of a method, a few lines long. Accuracy is measured on a tenth of the training images that no client has. Every
result is a line of FILE, and what is there is not run again. Both write why_averages.md beside this file, from all
lines of FILE; its part "What they say" is written by hand and kept.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import fedkeep
from fedkeep.aggregation.mean import ema
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.experiment.build import build_federation, build_simulation
from fedkeep.experiment.recipe import Method
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, each, on_client
from fedkeep.interface.algorithm import send_label_counts
from fedkeep.losses import CrossEntropy
from fedkeep.models import Weights
from fedkeep.models.weights import mean, subtract
from fedkeep.options import option
from fedkeep.trials.simulation import Simulation

RECIPE = "fedkeep/averaged-sequences/fashion-mnist-exdir-2-0.5"
DECAY = 0.9
SETTINGS = (
    "data.validation=0.1",
    "training.lr=0.03",
    f"run.ema_decay={DECAY}",
    'run.evaluation_models=["last", "round", "moving"]',
    "run.evaluate_every=1000",  # this script evaluates
)
FEDSEQ = "1 chain of 10 (FedSeq)"
BUDGETS = (40, 100, 240, 500)
WHY_ROUNDS, VARIANT_ROUNDS = 60, 50
SEEDS = (100, 101)
WINDOWS = (20, 40, 60)
COUNTS = (1, 2, 5, 10, 20)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
ROWS = Path("/tmp/why_averages.jsonl")
RESULT = Path(__file__).with_suffix(".md")
READING = "## What they say"

Models = dict[str, list[Weights]]


@dataclass(frozen=True)
class Chains(FedSeq):
    """Several sequences at the same time, all from the server's model; their last models are averaged.

    One chain is FedSeq. As many chains as clients are FedAvg with equal weights.
    """

    title = "Chains"
    chains: int = option(2, "number of chains, between which the clients of a round are shared out", low=1)

    def round(self, server: Server, cohort: Cohort) -> None:
        clients = [client.id for client in cohort]
        chains = [clients[number :: self.chains] for number in range(self.chains)]
        models = [server.model for _ in chains]
        for place in range(max(map(len, chains))):
            turn = {chain[place]: number for number, chain in enumerate(chains) if place < len(chain)}
            replies = cohort.ask(self.train, each({client: models[number] for client, number in turn.items()}))
            for client, reply in replies.items():
                models[turn[client]] = reply.model
        server.model = mean(models)


@dataclass
class KnownCounts:
    """What the server keeps: each client's number of examples of each class."""

    counts: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Ordered(Algorithm[KnownCounts]):
    """FedSeq in the order of label counts: the next client is the most different one, or the most similar one."""

    title = "Ordered"
    sequential = True
    similar_first: bool = option(False, "whether the next client is the most similar one")

    send_label_counts = send_label_counts

    def round(self, server: Server[KnownCounts], cohort: Cohort) -> None:
        counts = server.state.counts
        counts |= cohort.without(counts).ask(self.send_label_counts)
        waiting = [client for client in cohort if client.id in counts]
        sign, client = -1 if self.similar_first else 1, waiting[0]
        while waiting:
            waiting.remove(client)
            if reply := client.ask(self.train, server.model):
                server.model = reply.model
            before = counts[client.id]
            near = {other.id: sign * float(cosine_similarity(before, counts[other.id], 0)) for other in waiting}
            client = min(waiting, key=lambda other: near[other.id], default=client)

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        return client.fit(model, CrossEntropy())


def variants() -> dict[str, tuple[Algorithm[Any, Any], int]]:
    """Return the methods to try by name, with the number of trainings in a row that a round of each takes."""
    return {
        FEDSEQ: (FedSeq(), 10),
        "2 chains of 5": (Chains(chains=2), 5),
        "5 chains of 2": (Chains(chains=5), 2),
        "most different client next": (Ordered(), 10),
        "most similar client next": (Ordered(similar_first=True), 10),
    }


def run(algorithm: Algorithm[Any, Any], seed: int, rounds: int, data_dir: str | None) -> tuple[Simulation, Models]:
    """Carry out a run, and return it with its models of every round, by kind."""
    recipe = load_recipe(RECIPE, rounds=rounds, settings=SETTINGS)
    engine = build_simulation(recipe, Method("tried", algorithm), seed, build_federation(recipe, seed, data_dir))
    models: Models = {"last": [], "mean": [], "moving": [], "moving, of last": []}
    of_last: Weights = {}
    while engine.finished < rounds:
        engine.run_round()
        of_last = ema(of_last, engine.server.model, DECAY)
        found = (engine.server.model, engine.averages["round"], engine.averages["moving"], of_last)
        for kept, model in zip(models.values(), found, strict=True):
            kept.append(model)
    return engine, models


def accuracy(engine: Simulation, model: Weights) -> float:
    """Return a model's accuracy on the held-out images, in %."""
    counts = engine.evaluate(model)
    return 100 * sum(counts.correct) / sum(counts.total)


def curves(engine: Simulation, models: Models) -> dict[str, dict[int, float]]:
    """Return the accuracies of every second round of a variant's run, by the kind of model."""
    rounds = range(2, VARIANT_ROUNDS + 1, 2)
    kinds = ("last", "moving", "moving, of last")
    return {kind: {r: accuracy(engine, models[kind][r - 1]) for r in rounds} for kind in kinds}


def length(difference: Weights) -> float:
    """Return the L2 norm of a difference of two models."""
    return float(torch.cat([tensor.flatten() for tensor in difference.values()]).norm())


def look_at(engine: Simulation, models: Models, end: int) -> dict[str, dict[str, float]]:
    """Return distances and accuracies of the ten rounds that end with this one.

    Distances are means over the ten rounds, accuracies over every second of them.
    """
    lasts, means, averages = models["last"], models["mean"], models["moving"]
    kinds = {"last model": lasts, "round mean": means, "moving average": averages}
    rounds, measured = range(end - 10, end), range(end - 9, end, 2)  # as positions: round 1 is at 0
    centre = mean(means[end - 10 : end])
    found: dict[str, dict[str, float]] = {"step": {}, "from centre": {}}
    for name, kind in kinds.items():
        found["step"][name] = average(length(subtract(kind[r], kind[r - 1])) for r in rounds)
        found["from centre"][name] = average(length(subtract(kind[r], centre)) for r in rounds)
    found["step"]["centre"] = length(subtract(centre, mean(means[end - 20 : end - 10])))
    lines = {
        "last model to the next": (lasts, lasts, 1),
        "round mean to the next": (means, means, 1),
        "last model to moving average": (lasts, averages, 0),
    }
    for name, (first, second, lag) in lines.items():
        found[name] = {}
        for share in SHARES:
            between = (mean([first[r - lag], second[r]], [1 - share, share]) for r in measured)
            found[name][str(share)] = average(accuracy(engine, model) for model in between)
    for name, kind in {"round means": means, "last models": lasts}.items():
        found[f"mean of {name}"] = {}
        for count in COUNTS:
            latest = (mean(kind[max(0, r + 1 - count) : r + 1]) for r in measured)
            found[f"mean of {name}"][str(count)] = average(accuracy(engine, model) for model in latest)
    return found


def average(values: Any) -> float:
    """Return the mean of numbers."""
    listed = list(values)
    return sum(listed) / len(listed)


def table(head: Sequence[str], rows: Sequence[Sequence[str | float]], digits: int = 1) -> list[str]:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|:--|" + "--:|" * (len(head) - 1)]
    for row in rows:
        lines.append("| " + " | ".join(cell if isinstance(cell, str) else f"{cell:.{digits}f}" for cell in row) + " |")
    return [*lines, ""]


def why_tables(row: Mapping[str, Any]) -> list[str]:
    """Return the tables of the first part."""
    windows = row["windows"]
    ends = [f"rounds {int(end) - 9} to {end}" for end in windows]
    lines = ["## Why", ""]
    lines += [
        f"FedSeq, seed {SEEDS[0]}, {WHY_ROUNDS} rounds. L2 distances, mean over ten rounds; the centre is the mean of",
        "these ten rounds' means (they are part of it, so that they are a little too near to it).",
        "",
    ]
    distances: list[list[str | float]] = []
    for kind, label in (("step", "from one round to the next"), ("from centre", "from the centre")):
        for name in ("last model", "round mean", "moving average"):
            distances.append([f"{name}, {label}", *(found[kind][name] for found in windows.values())])
    moved = [found["step"]["centre"] for found in windows.values()]
    distances.append(["centre, from that of the ten rounds before", *moved])
    lines += table(["distance", *ends], distances, 2)
    lines += ["Accuracy in % on the straight line between two models, mean over every second of the ten rounds:", ""]
    rows: list[list[str | float]] = []
    for name in ("last model to the next", "round mean to the next", "last model to moving average"):
        for end, found in zip(ends, windows.values(), strict=True):
            rows.append([f"{name}, {end}", *found[name].values()])
    lines += table(["line", "its beginning", "1/4", "middle", "3/4", "its end"], rows)
    lines += ["Accuracy in % of the mean of the last K models, over the same rounds (fewer than K before round K):", ""]
    rows = []
    for name in ("last models", "round means"):
        for end, found in zip(ends, windows.values(), strict=True):
            rows.append([f"{name}, {end}", *found[f"mean of {name}"].values()])
    return lines + table(["mean of", *(f"K = {count}" for count in COUNTS)], rows)


def variant_tables(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of the second part: means over the second half of the rounds, by seed and over seeds."""
    seeds = sorted({row["seed"] for row in rows})
    late = {(row["name"], row["seed"]): late_means(row["curves"]) for row in rows}
    names = [name for name in variants() if any((name, seed) in late for seed in seeds)]
    lines = [
        "## Variants",
        "",
        f"Accuracy in %, mean over rounds {VARIANT_ROUNDS // 2 + 1} to {VARIANT_ROUNDS} (every second one); seeds",
        f"run: {', '.join(map(str, seeds))}. With more than one: mean (by seed). Difference: of the moving average to",
        "FedSeq's, paired by seed. In a row: trainings one after another in a round.",
        "The moving average is of the means of all models that clients sent, the last column's of the server's models.",
        "",
    ]
    cells: list[list[str | float]] = []
    for name in names:
        found = [late[name, seed] for seed in seeds if (name, seed) in late]
        paired = [seed for seed in seeds if (name, seed) in late and (names[0], seed) in late]
        gains = [late[name, seed]["moving"] - late[names[0], seed]["moving"] for seed in paired]
        row = next(row for row in rows if row["name"] == name)
        only = "" if len(found) == len(seeds) else f", seed {next(s for s in seeds if (name, s) in late)} only"
        cells.append([name + only, str(row["in_a_row"]), several([one["last"] for one in found])])
        cells[-1] += [several([one["moving"] for one in found]), "" if name == names[0] else several(gains, "+")]
        cells[-1] += [several([one["moving, of last"] for one in found])]
    head = [
        "variant",
        "in a row",
        "last model",
        "moving average",
        "difference",
        "moving average of the server's models",
    ]
    lines += table(head, cells)
    lines += ["Moving average in % after so many trainings in a row, which is what a round's duration is made of:", ""]
    cells = []
    for name in names:
        found = [row for row in rows if row["name"] == name]
        cells.append([name])
        for budget in BUDGETS:
            key = str(budget // found[0]["in_a_row"])  # the round
            reached = [row["curves"]["moving"][key] for row in found if key in row["curves"]["moving"]]
            cells[-1].append(several(reached) if reached else "")
    return lines + table(["variant", *map(str, BUDGETS)], cells)


def late_means(curves: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each curve over the second half of the rounds."""
    late = VARIANT_ROUNDS // 2
    return {kind: average(value for r, value in curve.items() if int(r) > late) for kind, curve in curves.items()}


def several(values: Sequence[float], sign: str = "") -> str:
    """Return the mean of numbers, and the numbers if there are several."""
    each_one = f" ({', '.join(f'{value:{sign}.1f}' for value in values)})" if len(values) > 1 else ""
    return f"{average(values):{sign}.1f}{each_one}"


def write(rows: Sequence[Mapping[str, Any]], date: str) -> None:
    """Write the result beside this file."""
    versions = f"FedKeep {fedkeep.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    lines = [
        "# Why averages of a sequence are better, and variants that were tried",
        "",
        "`python benchmarks/why_averages.py why` and `python benchmarks/why_averages.py variants`,",
        f"{date}; {versions}; {platform.system()} {platform.machine()}, one thread.",
        f"Recipe {RECIPE}, {', '.join(SETTINGS[:3])};",
        "accuracy on a tenth of the training images that no client has.",
        "",
    ]
    old = RESULT.read_text().partition(READING)[2] if RESULT.exists() else ""
    if old:
        lines += [(READING + old.partition("\n## ")[0]).rstrip(), ""]
    for row in rows:
        if row["part"] == "why":
            lines += why_tables(row)
    if tried := [row for row in rows if row["part"] == "variants"]:
        lines += variant_tables(tried)
    RESULT.write_text("\n".join(lines).rstrip() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["why", "variants"])
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--only", nargs="*", help="variants to run, by the beginning of their names")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, help="of the variants")
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows.exists() else []

    def add(row: dict[str, Any]) -> None:
        row["date"] = time.strftime("%Y-%m-%d", time.gmtime())
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(json.loads(json.dumps(row)))

    def add_variant(name: str, in_a_row: int, seed: int, engine: Simulation, models: Models) -> None:
        found = curves(engine, models)
        print(name, seed, late_means(found), flush=True)
        add({"part": "variants", "name": name, "in_a_row": in_a_row, "seed": seed, "curves": found})

    def known(name: str, seed: int) -> bool:
        return any(row.get("name") == name and row["seed"] == seed for row in rows)

    if options.part == "why" and not any(row["part"] == "why" for row in rows):
        engine, models = run(FedSeq(), SEEDS[0], WHY_ROUNDS, options.data_dir)
        if not known(FEDSEQ, SEEDS[0]):  # the first 50 of these 60 rounds
            add_variant(FEDSEQ, 10, SEEDS[0], engine, models)
        add({"part": "why", "windows": {end: look_at(engine, models, end) for end in WINDOWS}})
    for name, (algorithm, in_a_row) in variants().items() if options.part == "variants" else ():
        for seed in options.seeds:
            if not known(name, seed) and (options.only is None or name.startswith(tuple(options.only))):
                add_variant(name, in_a_row, seed, *run(algorithm, seed, VARIANT_ROUNDS, options.data_dir))
    write(rows, max(row["date"] for row in rows))


if __name__ == "__main__":
    main()
