"""A round's time by the size of its cohort and the number of workers: ``python benchmarks/peers/cohorts.py``.

FedAvg with the clients of W1 (1,000 with 50 examples), cohorts of 10 to 1,000, one worker and two, as the command line
runs them. All runs of one network are alive and play a round in turn, the others idle (`driver.alternate`).

    python benchmarks/peers/cohorts.py [--cycles 10] [--seconds 10] [--cache DIR]

writes its result beside itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import prepare
import report
from driver import Measured, Schedule, Turns, alternate
from workloads import RECIPES, Places, fedkeep

from fedkeep import load_recipe

NETWORKS = {"w1-mlp": "MLP, 51 k weights", "w1-lenet5": "LeNet-5, 62 k weights"}
WORKERS = (1, 2)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 30, 100, 300, 1000])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--cycles", type=int, default=10, help="most rounds that count, of each run (10)")
    parser.add_argument("--seconds", type=float, default=10, help="that they may take; the slow play fewer (10)")
    parser.add_argument("--cache", type=Path, default=Path(__file__).parents[2] / ".venv-peers", help="data")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--note", default="", help="a sentence for the result, such as what else ran")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nobody who was started outlives this
    cache = options.cache.resolve()
    os.environ.setdefault("FEDKEEP_CACHE", str(cache / "decoded"))
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    schedule = Schedule(options.cycles, options.seconds)
    tables = {name: measured(name, options.cohorts, schedule, cache) for name in options.networks}
    text = page(tables, options)
    options.out.write_text(text)
    print(text)


def measured(name: str, cohorts: Sequence[int], schedule: Schedule, cache: Path) -> dict[tuple[int, int], Measured]:
    """Measure one network, and return what was found by cohort and workers."""
    recipe = RECIPES / f"{name}.toml"
    data, _ = prepare.data_for(recipe, None, cache)
    folder = cache / "work" / f"cohorts-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    cases = {f"{cohort} clients, {workers} workers": (cohort, workers) for cohort in cohorts for workers in WORKERS}
    found = alternate(
        {label: partial(started, label, recipe, *case, data, folder) for label, case in cases.items()},
        schedule,
        folder,
        tell=lambda line: print(line, flush=True),
    )
    return {cases[label]: one for label, one in found.items()}


def started(label: str, recipe: Path, cohort: int, workers: int, data: Path, folder: Path) -> Turns:
    """Start a run."""
    scratch = folder / f"{cohort}-{workers}"
    scratch.mkdir()
    changed = scratch / recipe.name
    changed.write_text(load_recipe(str(recipe), settings=[f"run.cohort_size={cohort}"]).to_toml())
    command = fedkeep(changed, "fedavg", workers)(Places(Path(sys.executable), folder, data, scratch))
    return Turns(label, command, folder / f"{cohort}-{workers}.log", scratch)


def page(tables: Mapping[str, Mapping[tuple[int, int], Measured]], options: argparse.Namespace) -> str:
    """Return the result as Markdown."""
    machine = report.here()
    networks = "" if len(tables) == len(NETWORKS) else f" --networks {' '.join(tables)}"
    command = f"cohorts.py{networks} --cycles {options.cycles} --seconds {options.seconds:g}"
    versions = next(one.about for table in tables.values() for one in table.values() if one.about)
    lines = [
        "# A round's time by cohort and workers",
        "",
        f"`python benchmarks/peers/{command}`, {machine['date']};",
        f"FedKeep {versions.get('fedkeep')}, PyTorch {versions.get('torch')}, Python {machine['python']};",
        f"{machine['machine']}; load {os.getloadavg()[0]:.1f} at the end.{' ' * bool(options.note)}{options.note}",
        "",
    ]
    for name, table in tables.items():
        lines += [
            f"## {NETWORKS[name]}",
            "",
            "| cohort | 1 worker, s a round | 2 workers, s a round | times as fast | 2 workers, ms a client |",
            "|--:|--:|--:|--:|--:|",
            *(row(cohort, table) for cohort in dict.fromkeys(cohort for cohort, _ in table)),
            "",
        ]
    return "\n".join(
        [*lines, "Medians of the rounds that count, with the middle half in brackets; ratios are of medians.", ""]
    )


def row(cohort: int, table: Mapping[tuple[int, int], Measured]) -> str:
    """Return the row of a cohort."""
    one, two = (table[cohort, workers].seconds for workers in WORKERS)
    if not one or not two:
        return f"| {cohort:,} | failed | failed | | |"
    alone, together = statistics.median(one), statistics.median(two)
    each = 1000 * together / cohort
    return f"| {cohort:,} | {spread(one)} | {spread(two)} | {alone / together:.2f} | {each:.1f} |"


def spread(seconds: Sequence[float]) -> str:
    """Return the median and the middle half."""
    ordered, quarter = sorted(seconds), len(seconds) // 4
    return f"{statistics.median(ordered):.3f} ({ordered[quarter]:.3f} to {ordered[-1 - quarter]:.3f})"


if __name__ == "__main__":
    main()
