"""Many rounds with worker processes: memory, open files, threads and the run folder must stay as they were.

``python tools/soak.py --rounds 1000 --write`` writes the numbers into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

from crash import PAGE, RECIPE, replace_part

import fedkeep
from fedkeep.experiment import trial_runner
from fedkeep.experiment.recipe_loader import load_recipe

BEGIN, END = "<!-- soak:begin (written by make soak) -->", "<!-- soak:end -->"
MAX_GROWTH_MB = 10.0  # of all processes, from the second tenth of the rounds to the last


def children(process: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def usage(run: Path) -> dict[str, float]:
    """Return what this process and its workers use, and the files in the run folder."""
    processes = [os.getpid(), *children(os.getpid())]
    private = files = threads = 0.0
    for process in processes:
        status = Path(f"/proc/{process}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        private += int(fields["RssAnon"].split()[0]) / 1024
        threads += int(fields["Threads"])
        files += len(os.listdir(f"/proc/{process}/fd"))
    in_folder = sum(path.is_file() for path in run.rglob("*"))
    return {"memory": private, "files": files, "threads": threads, "folder": in_folder, "processes": len(processes)}


class Watch(fedkeep.Callback):
    """Measures every few rounds, once the workers carry out the steps."""

    def __init__(self, run: Path, every: int) -> None:
        self.run, self.every, self.found = run, every, list[tuple[int, dict[str, float]]]()

    def on_round_end(self, state: Any, result: Any) -> None:
        if state.finished % self.every == 0 and state.executor is not state.serial:
            self.found.append((state.finished, usage(self.run)))


def main() -> int:
    """Run, compare, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    trial_runner.MIN_SECONDS_LEFT = 0.0  # workers share the cohorts from the first rounds
    with tempfile.TemporaryDirectory(prefix="fedkeep-soak-") as folder:
        recipe = Path(folder) / "recipe.toml"
        recipe.write_text(RECIPE)
        run = Path(folder) / "run"
        watch = Watch(run, max(1, options.rounds // 50))
        began = time.monotonic()
        machine = fedkeep.Machine(workers=options.workers)
        fedkeep.run(load_recipe(str(recipe), rounds=options.rounds), out=run, machine=machine, callbacks=[watch])
        seconds = time.monotonic() - began
    tenth = max(1, len(watch.found) // 10)
    most = max(number["processes"] for _, number in watch.found)
    settled = [entry for entry in watch.found if entry[1]["processes"] == most]  # workers end with the last round
    first, last = settled[tenth : 2 * tenth], settled[-tenth:]
    names = {
        "memory": "private memory of all processes, MB",
        "files": "open files",
        "threads": "threads",
        "folder": "files in the run folder",
        "processes": "processes",
    }
    rows, failed = [], []
    for name, heading in names.items():
        before, after = (max(number[name] for _, number in part) for part in (first, last))
        rows.append(f"| {heading} | {before:.0f} | {after:.0f} |")
        if after - before > (MAX_GROWTH_MB if name == "memory" else 2 if name in ("files", "folder") else 0):
            failed.append(f"{heading}: {before:.0f} -> {after:.0f}")
    table = "\n".join(
        [
            f"| measured | rounds {first[0][0]} to {first[-1][0]} | rounds {last[0][0]} to {last[-1][0]} |",
            "|:--|--:|--:|",
            *rows,
        ]
    )
    text = f"{table}\n\nMeasured by `make soak`: {options.rounds:,} rounds, {options.workers} workers, {seconds:.0f} s."
    print(text)
    if failed:
        print("GROWN:", "; ".join(failed))
    if options.write:
        replace_part(PAGE, BEGIN, END, text)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
