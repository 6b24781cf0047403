"""Run folders without a run: small ones with given counts, and one that looks like the demo's.

Tests may change their files: `seal` gives them new digests, and `read_run` here does it before it reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep._utils import digests
from fedkeep.reporting import run_folder
from fedkeep.reporting.run_folder import Run

RECIPE = """\
title = "Digits: SFedKD against FedAvg"
seeds = [0, 1]

[data]
name = "digits"

[partition]
scheme = "exdir"
alpha = 0.5

[model]
name = "mlp"

[training]
lr = 0.1

[run]
rounds = 4
evaluate_local_models = false

[[methods]]
label = "FedAvg"
algorithm = "fedavg"

[[methods]]
label = "FedSeq"
algorithm = "fedseq"

[[methods]]
label = "SFedKD"
algorithm = "sfedkd"
teachers = 5
"""


def write_json(path: Path, value: Any) -> None:
    digests.write_json(path, value)


def seal(run: Path) -> Path:
    """Give the files of a run folder the digests of what they hold now; return it."""
    for path in [run / "run.json", *run.glob("trials/*/*.json")]:
        if path.name not in ("manifest.json", "result.json"):
            with suppress(ValueError, AttributeError):  # a test may have damaged it
                digests.write_json(path, {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"})
    recipe = run / "recipe.toml"
    digests.write_toml(recipe, recipe.read_text().partition("\n# sha256 of the lines above: ")[0])
    for result in run.glob("trials/*/result.json"):
        files = [file for file in sorted(result.parent.glob("*.json*")) if file.name != "manifest.json"]
        digests.write_manifest(
            result.with_name("manifest.json"), {file.name: digests.digest_of(file.read_bytes()) for file in files}
        )
    return run


def read_run(path: str | Path) -> Run:
    """Read a run whose files may have been changed."""
    path = Path(path)
    return run_folder.read_run(seal(path) if (path / "run.json").is_file() else path)


def write_run(path: Path, *, recipe: str = RECIPE, **info: Any) -> Path:
    """Write what a run folder has before its first trial."""
    write_json(
        path / "run.json",
        {
            "fedkeep": "0.1.0",
            "versions": {"torch": "2.13.0", "python": "3.12.4"},
            "command": ["/home/me/.venv/bin/fedkeep", "run", "demo", "--seeds", "0,1"],
            "started": "2026-03-04T05:06:07+00:00",
            "device": "cpu",
            "threads": 1,
            "title": "Digits: what is kept",
            "recipe": "demo",
            "git": None,
        }
        | info,
    )
    (path / "recipe.toml").write_text(recipe)
    return seal(path)


def write_trial(
    run: Path,
    label: str,
    seed: int,
    corrects: Sequence[Sequence[int] | None],
    *,
    total: Sequence[int] = (10, 10),
    finished: bool = True,
    planned: int | None = None,
    rows: Mapping[int, Mapping[str, Any]] | None = None,
    timings: Iterable[Mapping[str, Any]] | None = None,
    cut: str = "",
    counts: Sequence[Sequence[int]] = ((8, 2), (0, 10)),
    **info: Any,
) -> Path:
    """Write a trial: a round per entry of `corrects`, where None was not evaluated; `rows` replaces parts by round."""
    folder = run / "trials" / f"{''.join(c for c in label.lower() if c.isalnum())}-seed{seed}"
    classes = len(total)
    trial = {
        "label": label, "algorithm": label.lower(), "options": {}, "seed": seed, "sequential": False,
        "rounds": planned or len(corrects), "paper": "", "num_clients": len(counts), "cohort_size": 2, "num_classes":
        classes, "label_names": [str(i) for i in range(classes)], "dataset": "digits", "dataset_note": "", "test_total":
        list(total),
    }  # fmt: skip
    write_json(folder / "trial.json", trial | info)
    partition = {"scheme": "exdir", "settings": {"C": 2, "alpha": 0.5}, "seed": seed, "attempts": 1, "hash": f"h{seed}"}
    write_json(folder / "partition.json", partition | {"counts": [list(map(int, row)) for row in counts]})
    lines = []
    for number, correct in enumerate(corrects, start=1):
        row: dict[str, Any] = {"task": 1, "round": number, "cohort": ["3", "7"], "lost": {}, "rolled_back": False}
        row |= {"loss": 1.0, "examples": 20, "down": 2000, "up": 1000, "log": {}}
        if correct is not None:
            row |= {"correct": [int(c) for c in correct], "test_loss": 1.0}
        lines.append(json.dumps(row | dict((rows or {}).get(number, {}))) + "\n")
    (folder / "rounds.jsonl").write_text("".join(lines) + cut)
    if timings is None:
        timings = [{"round": n + 1, "train": 2.0, "teachers": 0.5, "evaluate": 0.25} for n in range(len(corrects))]
    (folder / "timings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timings))
    if finished:
        (folder / "result.json").write_text(json.dumps({"rounds": len(corrects), "seconds": 1.0}))
    seal(run)
    return folder


def write_demo(path: Path, *, classes: int = 10, rounds: int = 40, labels: Mapping[str, float] | None = None) -> Path:
    """Write a run like the demo: three methods and seeds, losses, a round rolled back, one seed killed half-way."""
    write_run(path, recipe=RECIPE.replace("rounds = 4", f"rounds = {rounds}"))
    labels = labels or {"FedAvg": 0.86, "FedSeq": 0.88, "SFedKD": 0.93}
    names = [f"class {i}" for i in range(classes)] if classes > 10 else [str(i) for i in range(classes)]
    papers = {
        "FedAvg": "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017",
        "FedSeq": "Li & Lyu, Convergence Analysis of Sequential Federated Learning on Heterogeneous Data, 2023",
        "SFedKD": "Xu et al., SFedKD: Sequential Federated Learning with Discrepancy-Aware Multi-Teacher KD, 2025",
    }
    total = np.full(classes, 36)
    for location, (label, level) in enumerate(labels.items()):
        for seed in range(3):
            random = np.random.default_rng([location, seed])
            stop = rounds // 2 if (location, seed) == (2, 2) else rounds
            counts = [[0] * classes for _ in range(20)]
            for held in counts:
                for c in random.choice(classes, 2, replace=False):
                    held[c] = int(random.integers(5, 90))
            swing = 0.03 if location == 0 else 0.10
            corrects: list[list[int] | None] = []
            for r in range(1, stop + 1):
                wave = level * (1 - np.exp(-r / (0.2 * rounds))) + swing * random.normal(size=classes)
                evaluated = r % 2 == 0 or r == 1
                corrects.append([int(v) for v in np.clip(wave, 0, 1) * total] if evaluated else None)
            rows: dict[int, dict[str, Any]] = {5: {"lost": {"3": "dropped out"}, "up": 500}}
            if seed == 1:
                rows[9] = {"lost": {"3": "too late", "7": "not finite: classifier.weight"}, "rolled_back": True}
            seconds = 0.8 + 0.5 * (location == 2) + 0.05 * random.random()
            write_trial(
                path, label, seed, corrects, total=total.tolist(), finished=stop == rounds, planned=rounds,
                rows=rows if location else None, cut='{"task": 1, "rou' if stop < rounds else "", counts=counts,
                timings=[{"round": r + 1, "train": seconds, "teachers": 0.3 * (location == 2), "evaluate": 0.02}
                         for r in range(stop)],
                label_names=names, paper=papers.get(label, ""), cohort_size=10,
                sequential=bool(location),
                options={"teachers": 5, "temperature": 4.0, "selection": "greedy"} if location == 2 else {},
            )  # fmt: skip
    return path
