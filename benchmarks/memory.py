"""The memory of a round by the size of its cohort: a model of 45 MB, which each client trains for one step.

Each case runs in a process of its own: FedAvg, whose clients train side by side, and FedSeq, which sees one reply after
another. Counted is the largest resident memory of each process during two rounds, less what it had before the first:
with the data, the network, and PyTorch warmed up by another, tiny run. Linux only. Replies for which memory has no room
lie in a temporary file (TMPDIR), whose size is counted too.

    python benchmarks/memory.py [--cohorts 10 50 200] [--workers 1 2] [--methods fedavg fedseq] [--layers 5]

writes its result beside itself.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from telling import arguments, beginning
from torch import nn

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.sequential.fedseq import FedSeq
from fedkeep.executors.process_executor import ProcessExecutor, StepHandler
from fedkeep.executors.workers import DONE, Handler, kill_workers, run_worker, start_workers
from fedkeep.interface import Algorithm, Training
from fedkeep.models import get_architecture
from fedkeep.testing.runs import CLASSES, SHAPE, federation, simulation
from fedkeep.trials.simulation import Simulation

METHODS: dict[str, Callable[[], Algorithm[Any, Any]]] = {"fedavg": FedAvg, "fedseq": FedSeq}
AVERAGED = "+averages"
"""Ends the name of a method whose averages are evaluated too, as runs do unless they say otherwise."""
METHODS |= {f"{name}{AVERAGED}": method for name, method in METHODS.items()}
WIDTH = 1_600
"""Units of a hidden layer: ten megabytes between two of them, about as much as ResNet-18's largest layers have."""


def network(layers: int) -> nn.Module:
    """Return a network whose step costs little for its size."""
    return get_architecture("mlp")(hidden=(WIDTH,) * layers).build(SHAPE, CLASSES)  # type: ignore[call-arg]


def build(method: str, cohort: int, layers: int) -> Simulation:
    """Return a federation of as many clients as the cohort has, each with one batch; and warm PyTorch up."""
    settings: dict[str, Any] = {"rounds": 2, "training": Training(epochs=1, batch_size=2, lr=0.01)}
    simulation(METHODS[method](), federation=federation((2,) * 4), cohort_size=4, **settings).run_round()
    settings |= {"federation": federation((2,) * cohort), "factory": partial(network, layers)}
    if method.endswith(AVERAGED):
        settings["evaluation_models"] = ("last", "round", "moving")
    made = simulation(METHODS[method](), cohort_size=cohort, **settings)
    made.callbacks = []
    return made


def work(connection: Connection, method: str, cohort: int, layers: int) -> None:
    """Serve as a worker process, which tells how much memory it has when it is asked to."""
    torch.set_num_threads(1)
    handlers: dict[str, Handler] = {"steps": StepHandler(build(method, cohort, layers))}
    run_worker(connection, handlers | {"memory": lambda content, tensors: (now(), {})})


def now() -> float:
    """Return the resident memory of this process, in MB, and begin to look for the largest anew."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status("self", "VmRSS")


def status(process: int | str, name: str) -> float:
    """Return the resident memory of a process (VmRSS), or the largest since it was looked at (VmHWM), in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e6


def measure(method: str, cohort: int, workers: int, layers: int) -> dict[str, Any]:
    """Run two rounds in this process, which also trains if there is one worker."""
    torch.set_num_threads(1)
    state = build(method, cohort, layers)
    model = sum(tensor.nbytes for tensor in state.server.model.values()) / 1e6
    started = start_workers(workers, work, method, cohort, layers) if workers > 1 else []
    before = []
    for worker in started:
        worker.send("memory", None)
        kind, found, _ = worker.receive()
        assert kind == DONE, found
        before.append(found)
    if started:
        state.executor = ProcessExecutor(started, state)
    before.insert(0, now())
    began = time.perf_counter()
    for _ in range(2):
        state.run_round()
    seconds = time.perf_counter() - began
    peaks = [
        status(pid, "VmHWM") for pid in ("self", *(worker.process.pid or 0 for worker in started if worker.process))
    ]
    kill_workers(started)
    more = [peak - first for peak, first in zip(peaks, before, strict=True)]
    file = state.weights_file.largest / 1e6
    return {"model": model, "before": sum(before), "more": more, "file": file, "seconds": seconds / 2}


def main() -> None:
    """Measure, print and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--layers", type=int, default=5, help="hidden layers; the model has about 10 MB less than ten a layer"
    )
    parser.add_argument("--one", nargs=4, metavar=("METHOD", "COHORT", "WORKERS", "LAYERS"), help="measure one here")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one[0], *map(int, options.one[1:]))))
        return
    cases = [
        (method, workers, cohort)
        for method in options.methods
        for workers in options.workers
        for cohort in options.cohorts
        if workers == 1 or not METHODS[method]().sequential  # a second worker would have nothing to do
    ]
    rows, model = [], 0.0
    for method, workers, cohort in cases:
        command = [sys.executable, __file__, "--one", method, *map(str, (cohort, workers, options.layers))]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found = json.loads(said.stdout.splitlines()[-1])
        model, (server, *others) = found["model"], found["more"]
        total = sum(found["more"])
        label = METHODS[method].__name__ + AVERAGED * method.endswith(AVERAGED)
        rows.append(
            f"| {label} | {workers} | {cohort} | {found['before']:.0f} | {server:.0f} | "
            f"{', '.join(f'{one:.0f}' for one in others) or '-'} | {total:.0f} | {total / model:.1f} | {workers + 2} | "
            f"{found['file']:.0f} | {found['seconds']:.1f} |"
        )
        print(rows[-1], flush=True)
    text = "\n".join(
        [
            *beginning(
                "The memory of a round by the size of its cohort",
                f"memory.py --cohorts {' '.join(map(str, options.cohorts))} --layers {options.layers}",
                options.note,
                where="one thread a process",
            ),
            f"A model of {model:.1f} MB, one step a client, two rounds; MB. Of one worker, the process itself trains.",
            "",
            "| method | workers | cohort | before | more: server | each worker | together | in models | workers + 2 | "
            "temporary file | s a round |",
            "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
            *rows,
            "",
        ]
    )
    options.out.write_text(text)


if __name__ == "__main__":
    main()
