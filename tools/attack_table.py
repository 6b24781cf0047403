"""A table of attacks: every method of a recipe against every kind of malicious client, with and without defences.

    python tools/attack_table.py --seeds 0,1,2 --defenses default,none --out results/attacks.csv

With the same --out it goes on, and runs only what the table lacks; a table of another recipe, or of other settings, is
refused.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean
from typing import get_args

from fedkeep._utils.files import atomic_write
from fedkeep._utils.torch_state import plain_torch
from fedkeep.cli.main import add_arguments, names, numbers
from fedkeep.cli.main import settings as changes_of
from fedkeep.cli.main import share as share_of
from fedkeep.errors import ConfigError, FedKeepError, RunError, did_you_mean, in_one_line
from fedkeep.experiment.experiment import Experiment
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.rounds.run_settings import Attack, AttackKind

DEFENSES: Mapping[str, Sequence[str]] = {
    "none": ["defense.check_replies=false"],
    "default": [],
    "loss_check": ["defense.loss_check=server"],
    "median": ["defense.robust_aggregation=median"],
    "trimmed_mean": ["defense.robust_aggregation=trimmed_mean"],
    "norm_clipping": ["defense.robust_aggregation=norm_clipping"],
    "krum": ["defense.robust_aggregation=krum"],
    "multi_krum": ["defense.robust_aggregation=multi_krum"],
}
"""Settings of each defence of the table, on top of the recipe; ``none`` is what an attack does to a bare method."""

KINDS: tuple[str, ...] = tuple(kind for kind in get_args(AttackKind) if kind != "none")
LAST_ROUNDS = 5
"""Number of last rounds over which the accuracy is averaged."""
HASH_DIGITS = 12


@dataclass(frozen=True)
class AttackTrial:
    """One trial of the table.

    ``method``: The method's label.
    ``kind``: The attack; ``none`` for honest clients.
    ``share``: Share of malicious clients.
    ``defense``: One of `DEFENSES`.
    ``accuracy``: Mean accuracy over the last rounds.
    ``backdoor``: How often the trigger works at the end; None for other attacks.
    ``asked_honest``, ``refused_honest``: Number of times that honest clients took part in a round, and of these that
        their reply was refused. Who did not answer was not refused.
    ``asked_malicious``, ``refused_malicious``: The same for malicious clients. Those that are set aside are not drawn
        any more, and so count in neither.
    ``seconds``: Processor time of the rounds.
    ``recipe_hash``: Of the recipe and of the settings that hold for the whole table; empty in a table from before it
        was noted.
    """

    method: str
    kind: str
    share: float
    defense: str
    seed: int
    accuracy: float
    backdoor: float | None
    asked_honest: int
    refused_honest: int
    asked_malicious: int
    refused_malicious: int
    seconds: float
    recipe_hash: str

    @property
    def key(self) -> tuple[str, str, float, str, int]:
        """What tells trials apart."""
        return self.method, self.kind, self.share, self.defense, self.seed


COLUMNS = [field.name for field in fields(AttackTrial)]
"""The columns of a table's file."""


def run_attacks(
    recipe: str,
    file: Path,
    *,
    kinds: Iterable[str] = KINDS,
    shares: Iterable[float] = (0.1, 0.2, 0.3),
    defenses: Sequence[str] = ("none", "loss_check"),
    seeds: Sequence[int] = (0, 1, 2),
    methods: Sequence[str] = (),
    settings: Sequence[str] = (),
    on_trial: Callable[[AttackTrial], None] = lambda trial: None,
) -> list[AttackTrial]:
    """Run the trials of a table that its file lacks, and add them to it one by one.

    ``file``: The table's CSV file; it may have trials from earlier.
    ``kinds``: The attacks. Honest clients are always part of the table.
    ``seeds``: The seeds; all of the table's trials are run with the first before the next.
    ``methods``: Labels of the recipe's methods, or their names; empty for all.
    ``on_trial``: Called after every trial.
    """
    kinds = list(kinds)
    for name, known in (*((kind, KINDS) for kind in kinds), *((defense, DEFENSES) for defense in defenses)):
        if name not in known:
            raise ConfigError(f"there is no attack or defence {name!r}.{did_you_mean(name, known)}")
    labels = _labels(recipe, methods)
    recipe_hash = _hash_recipe(recipe, settings)
    done = _begun(file, recipe, settings, recipe_hash)
    finished = {trial.key for trial in done}
    cells = [("none", 0.0), *((kind, share) for share in shares for kind in kinds)]
    for seed in seeds:
        for kind, share in cells:
            for defense in defenses:
                changes = [*settings, *DEFENSES[defense], f"attack.kind={kind}", f"attack.share={share}"]
                loaded = load_recipe(recipe, settings=changes, seeds=[seed])
                experiment = Experiment(loaded)
                for label in labels:
                    if (label, kind, share, defense, seed) not in finished:
                        trial = _run(experiment, label, kind, share, defense, seed, recipe_hash)
                        with file.open("a", encoding="utf-8", newline="") as lines:
                            lines.write(_csv_line(vars(trial).values()))
                        done.append(trial)
                        on_trial(trial)
    return done


def _labels(recipe: str, methods: Sequence[str]) -> list[str]:
    """Return the labels of the methods that are run, in the recipe's order: those that are named, or all."""
    known = [method.label for method in load_recipe(recipe).methods]
    if not methods:
        return known
    named = [method.label for method in load_recipe(recipe, methods=methods).methods]
    for label in named:
        if label not in known:  # its options are not part of the hash that all trials of a table share
            raise ConfigError(f"{recipe} has no method {label!r}. Its methods are {', '.join(known)}.")
    return [label for label in known if label in named]


def _hash_recipe(recipe: str, settings: Sequence[str]) -> str:
    """Return a hash of all options that decide on results, apart from the attack, the seed and the table's defence."""
    loaded = load_recipe(recipe, settings=settings, seeds=[0])
    text = replace(loaded, title="", paper={}, log=(), attack=Attack()).to_toml()
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def _begun(file: Path, recipe: str, settings: Sequence[str], recipe_hash: str) -> list[AttackTrial]:
    """Return the trials that the file has, and write it anew where it lacks something, so that lines can be added."""
    done = read_attacks(file)
    if not all(trial.recipe_hash for trial in done):
        default = _hash_recipe(recipe, ())
        done = [replace(trial, recipe_hash=trial.recipe_hash or default) for trial in done]
    others = [trial for trial in done if trial.recipe_hash != recipe_hash]
    if others:
        here = f"{recipe} with {', '.join(settings)}" if settings else f"{recipe} without settings"
        raise RunError(
            f"{len(others)} of the {len(done)} trials in {file} are of another recipe or of other settings than {here} "
            f"(recipe_hash {others[0].recipe_hash}, not {recipe_hash}), or of a version of FedKeep with other options. "
            "Give this table a file of its own with --out, or repeat the recipe and the settings of that one."
        )
    content = "".join(map(_csv_line, [COLUMNS, *(vars(trial).values() for trial in done)])).encode()
    if not file.is_file() or file.read_bytes() != content:
        atomic_write(file, content)
    return done


def _run(
    experiment: Experiment, label: str, kind: str, share: float, defense: str, seed: int, recipe_hash: str
) -> AttackTrial:
    simulation = experiment.simulation(experiment.recipe.method(label), seed)
    attackers = simulation.settings.attack.attackers(simulation.federation.clients, seed)
    began = time.process_time()
    records = [simulation.run_round().record for _ in range(simulation.rounds)]
    seconds = time.process_time() - began
    total = len(simulation.federation.dataset.test["label"])
    evaluated = [sum(record["correct"]) / total for record in records if "correct" in record]
    cohort = [
        (client in attackers, client in record.get("refused", ())) for record in records for client in record["cohort"]
    ]
    return AttackTrial(
        label,
        kind,
        share,
        defense,
        seed,
        round(mean(evaluated[-LAST_ROUNDS:]), 5),
        round(records[-1]["backdoor"], 5) if "backdoor" in records[-1] else None,
        sum(not bad for bad, _ in cohort),
        sum(refused and not bad for bad, refused in cohort),
        sum(bad for bad, _ in cohort),
        sum(refused and bad for bad, refused in cohort),
        round(seconds, 3),
        recipe_hash,
    )


def read_attacks(file: Path) -> list[AttackTrial]:
    """Read the trials of a table.

    ``file``: The CSV file. A last line without its end was cut off when the command was killed, and does not count.
    Returns: The trials; none if there is no file.
    """
    content = file.read_bytes() if file.is_file() else b""
    text = content[: content.rfind(b"\n") + 1].decode("utf-8", errors="replace")
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(lines, [])
        if header not in (COLUMNS, COLUMNS[:-1]) and not _csv_line(COLUMNS).encode().startswith(content):
            raise RunError(f"{file} is no table of attacks, whose columns are {', '.join(COLUMNS)}. Name another file.")
        return [_read_trial(line, len(header)) for line in lines if line]
    except (ValueError, csv.Error) as error:
        raise RunError(
            f"{file} is damaged in line {lines.line_num}: {in_one_line(error)}. Delete the line, so that its trial is "
            "run again."
        ) from error


def _read_trial(values: list[str], columns: int) -> AttackTrial:
    if len(values) != columns:
        raise ValueError(f"it has {len(values)} values, not {columns}")
    if any("\N{REPLACEMENT CHARACTER}" in value for value in values):
        raise ValueError("it is not UTF-8")
    row = dict(zip(COLUMNS, values, strict=False))  # of an older table the hash is missing
    return AttackTrial(
        row["method"],
        row["kind"],
        float(row["share"]),
        row["defense"],
        int(row["seed"]),
        float(row["accuracy"]),
        float(row["backdoor"]) if row["backdoor"] else None,
        int(row["asked_honest"]),
        int(row["refused_honest"]),
        int(row["asked_malicious"]),
        int(row["refused_malicious"]),
        float(row["seconds"]),
        row.get("recipe_hash", ""),
    )


def _csv_line(values: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()


def attack_table(trials: Sequence[AttackTrial], defense: str) -> str:
    """Return a table in Markdown: accuracy in % by attack and method, mean over seeds, for one defence.

    Returns: The table. A cell has one number for each share of malicious clients. All numbers of a method are of the
        same seeds, those that have all of its attacks; if no seed has, of all seeds.
    """
    chosen = [trial for trial in trials if trial.defense == defense]
    methods = list(dict.fromkeys(trial.method for trial in chosen))
    chosen = [trial for method in methods for trial in _with_all_attacks(chosen, method)]
    shares = sorted({trial.share for trial in chosen if trial.share})
    honest = [_mean(chosen, method, "none", 0.0) for method in methods]
    lines = [
        "| attack | " + " | ".join(methods) + " |",
        "|:--|" + "--:|" * len(methods),
        "| none | " + " | ".join(honest) + " |",
    ]
    for kind in dict.fromkeys(trial.kind for trial in chosen if trial.share):
        cells = [" / ".join(_mean(chosen, method, kind, share) for share in shares) for method in methods]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _with_all_attacks(trials: Sequence[AttackTrial], method: str) -> list[AttackTrial]:
    """Return the trials of a method whose seeds have each of its attacks; all of its trials if no seed has."""
    own = [trial for trial in trials if trial.method == method]
    seeds: dict[tuple[str, float], set[int]] = {}
    for trial in own:
        seeds.setdefault((trial.kind, trial.share), set()).add(trial.seed)
    common = set.intersection(*seeds.values())
    return [trial for trial in own if trial.seed in common] or own


def _mean(trials: Sequence[AttackTrial], method: str, kind: str, share: float) -> str:
    found = [trial.accuracy for trial in trials if (trial.method, trial.kind, trial.share) == (method, kind, share)]
    return f"{100 * mean(found):.0f}" if found else "–"


def false_alarms(trials: Sequence[AttackTrial], defense: str) -> tuple[int, int]:
    """Return how many replies of honest clients were refused, and how many there were, in trials without attackers."""
    chosen = [trial for trial in trials if trial.defense == defense and trial.kind == "none"]
    return sum(trial.refused_honest for trial in chosen), sum(trial.asked_honest for trial in chosen)


def _shares(text: str) -> list[float]:
    return [share_of(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trials that the table lacks, and print the table of each defence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="fedkeep/attacks", help="a recipe's name, or a path")
    parser.add_argument("--kinds", type=names, default=KINDS, metavar="A,B", help="attacks (default: all)")
    parser.add_argument("--shares", type=_shares, default=[0.1, 0.2, 0.3], metavar="A,B")
    parser.add_argument("--defenses", type=names, default=["none", "loss_check"], metavar="A,B")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2], metavar="0,1")
    parser.add_argument("--methods", type=names, default=(), metavar="A,B", help="default: all")
    add_arguments(parser, [changes_of("run.rounds=10")])
    parser.add_argument("--out", type=Path, default="attacks.csv", metavar="FILE", help="the table")
    options = vars(parser.parse_args(arguments))
    recipe, out, defenses = options.pop("recipe"), options.pop("out"), options["defenses"]

    def show(trial: AttackTrial) -> None:
        who = f"{trial.method}, {trial.kind} {trial.share:.0%}, defence {trial.defense}, seed {trial.seed}"
        print(f"{who}: {trial.accuracy:.1%}", flush=True)

    try:
        with plain_torch(1):
            trials = run_attacks(recipe, out, **options, on_trial=show)
    except FedKeepError as error:
        sys.exit(f"error: {error}")
    for defense in defenses:
        refused, asked = false_alarms(trials, defense)
        print(f"\nDefence {defense}: accuracy in %, by share of malicious clients\n\n{attack_table(trials, defense)}")
        print(f"\nHonest replies refused without attackers: {refused} of {asked}.")


if __name__ == "__main__":
    main()
