"""FedKeep beside other engines, on the same work, taking turns: ``python benchmarks/peers``.

Each peer is set up in an environment of its own and runs in processes of its own; all are alive and play a round when
it is their turn, the others idle, in an order that changes from cycle to cycle. Data, clients, cohorts, the order of
examples and initial weights are the same, and everybody's weights are compared with those of a bare loop.
A peer that cannot be set up, or fails, is named and left out.

    python benchmarks/peers [--workloads w1-mlp,w2-fedavg] [--peers fedkeep,pfl] [--cycles 20] [--data-dir DIR]

writes results.json, results.md and results.png beside itself. ``--out`` writes them elsewhere. ``--parts`` adds where
the rounds go; ``--pages`` writes the pages again, and the table of ``benchmarks/README.md``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import parts
import prepare
import report
from driver import Measured, Schedule, Turns, alternate
from environments import STEPS, CannotInstall, python_of
from workloads import HERE, WORKLOADS, Contestant, Places, Workload

REPOSITORY = HERE.parent.parent
# A gap after a few rounds that rounding does not explain. It grows from step to step, most in a sequence: the bare loop
# with another number of threads is 0.02 away there, and one whose steps come in another order about 1.
OTHER_WORK = 0.2
PROFILER = "py-spy"
LOOKED_AT = ("fedkeep", "pfl", "fedjax")


def main() -> None:
    """Set up, measure, and write the results."""
    options = parsed()
    if options.pages:
        report.rewrite(options.out, HERE.parent / "README.md")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nobody who was started outlives this
    os.environ.setdefault("FEDKEEP_CACHE", str(options.cache / "decoded"))
    os.environ["PYTHONPATH"] = str(REPOSITORY)  # FedKeep's runners measure this checkout
    pythons, missing = environments([*options.peers, *[PROFILER] * options.parts], options.cache)
    results = report.read(options.out) if options.keep else {}
    for name in options.workloads:
        results[name] = measured(WORKLOADS[name], pythons, missing, options)
        in_order = {name: results[name] for name in WORKLOADS if name in results}
        report.write(in_order, options.out, options.note)
    print((options.out / "results.md").read_text())


def parsed() -> argparse.Namespace:
    """Return the command line's options."""
    arguments = argparse.ArgumentParser(
        prog="python benchmarks/peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(known: object) -> object:
        def split(text: str) -> list[str]:
            wanted = text.split(",")
            for name in wanted:
                if name not in known:  # type: ignore[operator]
                    raise argparse.ArgumentTypeError(f"{name!r} is none of: {', '.join(known)}")  # type: ignore[arg-type]
            return wanted

        return split

    peers = ["fedkeep", *(name for name in STEPS if name != PROFILER)]
    arguments.add_argument("--workloads", type=names(list(WORKLOADS)), default=list(WORKLOADS))
    arguments.add_argument("--peers", type=names(peers), default=peers, help=f"some of: {', '.join(peers)}")
    arguments.add_argument("--cycles", type=int, default=20, help="most rounds that count, of each contestant (20)")
    arguments.add_argument("--seconds", type=float, default=20, help="that they may take; the slow play fewer (20)")
    arguments.add_argument("--settle", type=float, default=10.0, help="pause after the first round, in seconds (10)")
    arguments.add_argument("--data-dir", default=os.environ.get("FEDKEEP_DATA"), help="Fashion-MNIST and CIFAR-10")
    arguments.add_argument("--cache", type=Path, default=REPOSITORY / ".venv-peers", help="environments and data")
    arguments.add_argument("--parts", action="store_true", help="also where rounds go, of FedKeep, pfl, FedJAX")
    arguments.add_argument("--out", type=Path, default=HERE, help="folder of the results")
    arguments.add_argument(
        "--pages", action="store_true", help="measure nothing: write the pages of results.json again"
    )
    arguments.add_argument("--keep", action="store_true", help="keep the earlier results of other workloads")
    arguments.add_argument("--note", default="", help="a sentence for the result, such as what else ran")
    options = arguments.parse_args()
    options.cache, options.out = options.cache.resolve(), options.out.resolve()
    return options


def environments(peers: list[str], cache: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the interpreter of each peer, and why there is none for the others."""
    pythons, missing = {}, {}
    for peer in peers:
        try:
            pythons[peer] = python_of(peer, cache)
        except CannotInstall as error:
            print(f"cannot set up {error}\nGoing on without {peer}.", flush=True)
            missing[peer] = str(error)
    return pythons, missing


def measured(
    workload: Workload, pythons: dict[str, Path], missing: dict[str, str], options: argparse.Namespace
) -> dict[str, object]:
    """Measure one workload."""
    print(f"\n{workload.title}", flush=True)
    schedule = Schedule(options.cycles, options.seconds, settle=options.settle)
    folder = options.cache / "work" / workload.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    data, note, steps = options.cache, "synthetic images", None
    if workload.recipe is not None:
        data, note = prepare.data_for(workload.recipe, options.data_dir, options.cache)
        steps = prepare.write(
            workload.recipe, workload.method, data, schedule.cycles + 10 + parts.MOST * options.parts, folder
        )
    playing = [contestant for contestant in workload.contestants if contestant.peer in pythons]
    looked_at = [one.label for one in playing if one.peer in LOOKED_AT and not one.label.startswith("bare")]

    def look(turns: Turns) -> parts.Parts:
        spy = pythons[PROFILER].with_name(PROFILER) if PROFILER in pythons else None
        return parts.sampled(turns, spy, folder) if spy and turns.label in looked_at else {}

    found = alternate(
        {one.label: partial(started, one, pythons[one.peer], folder, data) for one in playing},
        schedule,
        folder,
        tell=lambda line: print(line, flush=True),
        look=look,
    )
    compare(found, {one.label: one.slug for one in playing}, folder)
    for one in workload.contestants:
        if one.peer in missing:
            found[one.label] = Measured(one.label, failed=missing[one.peer])
    for array in folder.glob("*.npy"):  # large; the logs stay
        array.unlink()
    about = {"title": workload.title, "data": note, "steps": steps, "load": os.getloadavg()[0], **report.here()}
    return {**about, "found": {label: asdict(one) for label, one in found.items()}}


def started(contestant: Contestant, python: Path, work: Path, data: Path) -> Turns:
    """Start a contestant."""
    scratch = work / contestant.slug
    scratch.mkdir()
    command = contestant.command(Places(python, work, data, scratch))
    return Turns(contestant.label, command, work / f"{contestant.slug}.log", scratch)


def compare(found: dict[str, Measured], slugs: dict[str, str], folder: Path) -> None:
    """Note how far everybody's weights are from the bare loop's, as a share of how far these have moved.

    One that is far off has done other work, so its times count for nothing.
    """
    for label, one in found.items():
        theirs, bare = folder / f"{slugs[label]}.npz", folder / f"bare-{one.rounds}.npz"
        if theirs.is_file() and bare.is_file():
            with np.load(theirs) as weights, np.load(bare) as expected, np.load(folder / "initial.npz") as initial:
                gap = max(np.abs(weights[name] - expected[name]).max() for name in expected)
                moved = max(np.abs(expected[name] - initial[name]).max() for name in expected)
            one.gap = float(gap / moved)
            if one.gap > OTHER_WORK:
                one.seconds, one.failed = [], f"its weights are not those of the bare loop (gap {one.gap:.0e})"
                print(f"{label}: {one.failed}; see {folder / f'{slugs[label]}.log'}", flush=True)


if __name__ == "__main__":
    main()
