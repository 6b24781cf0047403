"""What the loss check finds, what it costs, and whom it refuses by mistake.

Four federations: digits, Fashion-MNIST with one and with two classes a client (from scratch, and after one pass of
pooled training), FEMNIST by writers. Without attackers, the refused replies are false alarms. On digits, 20 % of the
clients attack. `silent` is what attackers cost whose every reply is refused.

    python benchmarks/loss_check.py [--seeds 0,1,2] [--parts alarms,kinds,forgetting]

adds the trials that are lacking to loss_check.csv and writes the tables into loss_check.md, both beside itself.
FEDKEEP_DATA is the folder of Fashion-MNIST and FEMNIST. The runs are short: all of it takes half an hour on one core.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean

import torch
from telling import arguments, beginning

from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe

SHORT = ("run.rounds=4", "run.cohort_size=5", "run.evaluate_every=4", "auxiliary.images_per_class=8")
FASHION = ("sfedkd/table1/fashion-mnist-2-0.5", *SHORT)
ONE, TWO = "partition.classes_per_client=1", "partition.num_clients=200"
LATE = "model.pretraining={passes=1}"
FEDERATIONS: Mapping[str, Sequence[str]] = {
    "digits": ("fedkeep/attacks", "run.rounds=12", "sfedkd.tau=1", "sfedkd.kd_scale=none"),
    "Fashion-MNIST, ExDir(1), from scratch": (*FASHION, ONE),
    "Fashion-MNIST, ExDir(1), warm start": (*FASHION, ONE, LATE),
    "Fashion-MNIST, ExDir(2), from scratch": (*FASHION, TWO),
    "Fashion-MNIST, ExDir(2), warm start": (*FASHION, TWO, LATE),
    "FEMNIST by writers": ("fedkeep/averaged-sequences/femnist-writers", *SHORT),
}
"""A recipe and its settings each."""
METHODS = ("FedAvg", "FedSeq", "SFedKD")
CHECKS = {"off": (), "on": ("defense.loss_check=server",)}
LAST_ROUNDS = 3
KINDS = (
    "scaled_update",
    "sign_flip",
    "reversed_update",
    "random_weights",
    "label_flip",
    "backdoor",
    "lying_teacher",
    "replay",
    "false_counts",
)
PARTS = ("alarms", "kinds", "forgetting")
STRENGTHS = (1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Trial:
    """One trial: clients' replies and those of them that were refused, and seconds of processor time."""

    federation: str
    method: str
    kind: str
    strength: float
    check: str
    seed: int
    accuracy: float
    honest: int
    refused_honest: int
    malicious: int
    refused_malicious: int
    seconds: float

    @property
    def key(self) -> tuple[object, ...]:
        """What tells trials apart."""
        return tuple(vars(self).values())[:6]


NAMES = [field.name for field in fields(Trial)]


def main() -> None:
    """Run what is lacking, print and write the tables."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="default: 0,1,2")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"default: {','.join(PARTS)}")
    parser.add_argument("--out", default="loss_check", help="name of the two files; default: loss_check")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = Path(__file__).with_name(f"{options.out}.csv")
    trials = read(file)
    done = {trial.key for trial in trials}
    for seed in map(int, options.seeds.split(",")):
        for one in wanted(options.parts.split(",")):
            if (*one, seed) not in done:
                trials.append(run(*one, seed))
                done.add(trials[-1].key)
                write(file, trials)
                print(*vars(trials[-1]).values(), flush=True)
    command = f"loss_check.py --seeds {options.seeds}"
    text = "\n".join([*beginning("The loss check", command, options.note), *tables(trials)])
    print(text)
    file.with_suffix(".md").write_text(text)


def wanted(parts: Sequence[str]) -> Iterable[tuple[str, str, str, float, str]]:
    """Yield the trials of one seed."""
    for part in parts:
        for method in METHODS:
            for check in CHECKS:
                yield "digits", method, "none", 0.0, check
                if check == "off":
                    yield "digits", method, "silent", 0.0, check
                for strength in STRENGTHS if part == "forgetting" else ():
                    yield "digits", method, "exaggerated_forgetting", strength, check
                for kind in KINDS if part == "kinds" else ():
                    yield "digits", method, kind, 0.0, check
            for federation in list(FEDERATIONS)[1:] if part == "alarms" else ():
                yield federation, method, "none", 0.0, "on"


def run(federation: str, method: str, kind: str, strength: float, check: str, seed: int) -> Trial:
    """Run a trial."""
    recipe, *settings = FEDERATIONS[federation]
    settings += [*CHECKS[check], f"attack.kind={kind}", "attack.share=0.2", f"attack.strength={strength}"]
    settings += ['run.evaluation_models=["last"]']
    loaded = load_recipe(recipe, settings=settings, seeds=[seed])
    chosen = next(one for one in loaded.methods if one.label.startswith(method))
    simulation = Experiment(loaded).simulation(chosen, seed)
    attackers = simulation.settings.attack.attackers(simulation.federation.clients, seed)
    began = time.process_time()
    records = [simulation.run_round().record for _ in range(simulation.rounds)]
    seconds = time.process_time() - began
    total = len(simulation.federation.dataset.test["label"])
    accuracy = [sum(record["correct"]) / total for record in records if "correct" in record]
    asked = [
        (client in attackers, client in record.get("refused", ())) for record in records for client in record["cohort"]
    ]
    return Trial(
        federation,
        method,
        kind,
        strength,
        check,
        seed,
        round(mean(accuracy[-LAST_ROUNDS:]), 4),
        sum(not bad for bad, _ in asked),
        sum(refused and not bad for bad, refused in asked),
        sum(bad for bad, _ in asked),
        sum(refused and bad for bad, refused in asked),
        round(seconds, 2),
    )


def read(file: Path) -> list[Trial]:
    """Read the trials that there are."""
    if not file.is_file():
        return []
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    kinds = {"str": str, "int": int, "float": float}
    return [Trial(*(kinds[str(field.type)](row[field.name]) for field in fields(Trial))) for row in rows]


def write(file: Path, trials: Sequence[Trial]) -> None:
    """Write all trials."""
    with file.open("w", newline="") as lines:
        rows = csv.writer(lines, lineterminator="\n")
        rows.writerow(NAMES)
        rows.writerows(vars(trial).values() for trial in trials)


def tables(trials: Sequence[Trial]) -> list[str]:
    """Return the tables."""
    lines = [
        "## False alarms: replies without attackers, and refused ones",
        "",
        header("federation"),
        "|:--|--:|--:|--:|",
    ]
    for federation in FEDERATIONS:
        found = select(trials, federation=federation, kind="none", check="on")
        cells = [select(found, method=method) for method in METHODS]
        told = (f"{sum(t.refused_honest for t in c)} of {sum(t.honest for t in c)}" if c else "–" for c in cells)
        lines.append(row(federation, told))
    lines += [
        "",
        "## Digits, 20 % of the clients attack: points below honest clients, without the check and with it",
        "",
    ]
    lines += [header("attack"), "|:--|--:|--:|--:|"]
    for kind, strength in dict.fromkeys((trial.kind, trial.strength) for trial in trials if trial.kind != "none"):
        name = f"{kind}, {strength:g}" if strength else kind
        lines.append(row(name, (lost(trials, method, kind, strength) for method in METHODS)))
    lines += [
        "",
        "In brackets: the seed that lost most, and of the replies of attackers, then of honest clients, those",
    ]
    lines += ["that were refused.", "", "## Seconds of digits without attackers, with the check over without", ""]
    lines += [header("cost"), "|:--|--:|--:|--:|"]
    off, on = (select(trials, federation="digits", kind="none", check=check) for check in CHECKS)
    ratios = (seconds(select(on, method=one)) / max(seconds(select(off, method=one)), 1e-9) for one in METHODS)
    return [*lines, row("ratio", (f"{ratio:.2f}" for ratio in ratios)), ""]


def lost(trials: Sequence[Trial], method: str, kind: str, strength: float) -> str:
    """Return a cell of the table of attacks."""
    cells = []
    for check in CHECKS:
        found = select(trials, federation="digits", method=method, kind=kind, strength=strength, check=check)
        honest = {
            t.seed: t.accuracy for t in select(trials, federation="digits", method=method, kind="none", check="off")
        }
        points = [100 * (honest[trial.seed] - trial.accuracy) for trial in found]
        cell = f"{mean(points):.1f}" if points else "–"
        if points and check == "on":
            refused, sent = sum(t.refused_malicious for t in found), sum(t.malicious for t in found)
            wrong, right = sum(t.refused_honest for t in found), sum(t.honest for t in found)
            cell += f" ({max(points):.1f}; {refused} of {sent}; {wrong} of {right})"
        cells.append(cell)
    return " → ".join(cells)


def select(trials: Sequence[Trial], **wanted: object) -> list[Trial]:
    """Return the trials with such values."""
    return [trial for trial in trials if all(getattr(trial, name) == value for name, value in wanted.items())]


def seconds(trials: Sequence[Trial]) -> float:
    """Return the seconds of trials."""
    return sum(trial.seconds for trial in trials)


def header(first: str) -> str:
    """Return the header of a table with a column for each method."""
    return row(first, METHODS)


def row(first: str, cells: Iterable[str]) -> str:
    """Return a row of a table."""
    return f"| {first} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
