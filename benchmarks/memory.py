"""The memory of a round by the size of its cohort: FedAvg with a model of 45 MB, which each client trains for one step.

Each cohort runs in a process of its own, without workers and with two. Counted is the largest resident memory of each
process of the run (VmHWM), which contains pages that processes share; Linux only. Replies for which memory has no room
lie in a temporary file (TMPDIR): its size is counted too.

    python benchmarks/memory.py [--cohorts 10 50 200] [--workers 0 2]

writes its result beside itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from telling import arguments, beginning
from torch import nn

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.interface import Training
from fedkeep.models import get_architecture
from fedkeep.simulation.process_executor import ProcessExecutor, step_handlers
from fedkeep.simulation.simulation import Simulation
from fedkeep.simulation.workers import kill_workers, run_worker, start_workers
from fedkeep.testing.federation import CLASSES, SHAPE, federation, simulation

HIDDEN = (3_300, 3_300)


def network() -> nn.Module:
    """Return a network of 11 million weights whose step costs little."""
    return get_architecture("mlp")(hidden=HIDDEN).build(SHAPE, CLASSES)  # type: ignore[call-arg]


def build(cohort: int) -> Simulation:
    """Return a federation of as many clients as the cohort has, each with one batch."""
    settings: dict[str, Any] = {"federation": federation((2,) * cohort), "factory": network}
    settings["training"] = Training(epochs=1, batch_size=2, lr=0.01)
    return simulation(FedAvg(), rounds=2, cohort_size=cohort, callbacks=[], **settings)


def work(connection: Connection, cohort: int) -> None:
    """Serve as a worker process."""
    torch.set_num_threads(1)
    run_worker(connection, step_handlers(build(cohort)))


def peak(process: int | str) -> float:
    """Return the largest resident memory of a process so far, in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def measure(cohort: int, workers: int) -> dict[str, Any]:
    """Run two rounds in this process."""
    torch.set_num_threads(1)
    state = build(cohort)
    started = start_workers(workers, work, cohort)
    if started:
        state.executor = ProcessExecutor(started, state)
    model = sum(tensor.nbytes for tensor in state.server.model.values()) / 1e6
    began = time.perf_counter()
    for _ in range(2):
        state.run_round()
    seconds = time.perf_counter() - began
    peaks = [peak("self"), *(peak(worker.process.pid or 0) for worker in started if worker.process)]
    kill_workers(started)
    largest = state.weights_file.largest / 1e6
    return {"model": model, "server": peaks[0], "workers": peaks[1:], "file": largest, "seconds": seconds / 2}


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--one", type=int, nargs=2, metavar=("COHORT", "WORKERS"), help="measure here, and print it")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    rows, model = [], 0.0
    for workers in options.workers:
        for cohort in options.cohorts:
            command = [sys.executable, __file__, "--one", str(cohort), str(workers)]
            said = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            found = json.loads(said.stdout.splitlines()[-1])
            model, total = found["model"], found["server"] + sum(found["workers"])
            rows.append(
                f"| {workers or 'none'} | {cohort} | {found['server']:.0f} | "
                f"{', '.join(f'{one:.0f}' for one in found['workers']) or '-'} | {total:.0f} | {found['file']:.0f} | "
                f"{found['seconds']:.1f} |"
            )
            print(rows[-1], flush=True)
    cohorts = " ".join(map(str, options.cohorts))
    title = "The memory of a round by the size of its cohort"
    text = "\n".join(
        [
            *beginning(title, f"memory.py --cohorts {cohorts}", options.note),
            f"FedAvg, a model of {model:.1f} MB, one step a client, two rounds; MB.",
            "",
            "| workers | cohort | server | each worker | together | temporary file | s a round |",
            "|:--|--:|--:|--:|--:|--:|--:|",
            *rows,
            "",
        ]
    )
    Path(__file__).with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
