"""Run every method for a few rounds and digest what comes of it: equal digests show that a change changed nothing.

    python tools/equality.py --out before.json               at one revision, some minutes
    python tools/equality.py --out after.json                at another, on the same machine
    python tools/equality.py --compare before.json after.json

It imports the checkout that it lies in. The comparison ends with code 1 and a list if any digest differs or is missing.
``--only PATTERN`` runs, or compares, only keys that match, such as ``'sfedkd/*'`` or ``'*/tasks/*'``.

What is run: every variant of tests/algorithms/test_conformance.py in each of SITUATIONS and WAYS below, and over the
line to sites of tests/flower; whole runs through `fedkeep.run`, from a recipe to the numbers of its tables; the
training of a generator; the initial weights of the architectures; the values of all recipes.

The output is ``{key: {what: digest}}``; tools/digests.py says what a digest depends on: every bit, and no name in the
code. When the code is renamed, these two files follow: what they call, settings, and FIELDS there. Keys never change: a
variant that gets another name keeps its key by an entry in RENAMED.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import logging
import math
import multiprocessing
import os
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("", "tests", "tests/algorithms", "tests/flower")]

import tiny
import tomli_w
import torch
from digests import Digests, digest, of_model, of_records, of_run, read_records
from local_transport import LocalTransport, node_configs
from matplotlib.figure import Figure
from safetensors.torch import load_file
from test_conformance import VARIANTS, WITH_TASKS
from torch import Tensor
from toys import toy_recipe
from trial import config

import fedkeep
from fedkeep.executors.process_executor import ProcessExecutor, step_handlers
from fedkeep.executors.workers import Worker, serve
from fedkeep.flower.server import serve as serve_sites
from fedkeep.models import get_architecture
from fedkeep.options import as_table
from fedkeep.testing.runs import Stopped, stop_after
from fedkeep.trials.trial import run_trial

RENAMED: dict[str, str] = {}
"""Keys, to what their variants are called now."""
KEYS = {name: name for name in VARIANTS if name not in RENAMED.values()} | RENAMED
"""All keys, to their variants."""
SITUATIONS = ("plain", "tasks", "networks", "networks-tasks")
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"training": tiny.TRAINING, "evaluate_local_models": True},
    "stack": {"stack": 4},
    "workers1": {"workers": 1},
    "workers2": {"workers": 2},
    "stack-workers2": {"stack": 2, "workers": 2},
    "codec": {"through_codec": True},
    "dropout": {"client_dropout": 0.3},
    "lost": {
        "min_clients": 2,
        "fault_injector": lambda number, client, step: "gone" if number == 2 or client == "4" else None,
    },
    "averages": {"evaluation_models": ("last", "round", "moving"), "ema_decay": 0.7},
    "resumed": {"killed": 2, "evaluation_models": ("moving", "last")},
}
FOR_FEW = ("codec", "dropout", "lost", "averages", "resumed")
FEW = "fedavg fedadam fedseq sfedkd scaffold moon fedweit fedskf feddcl target ft-kd"

HELD = {"auxiliary": ["auxiliary.images_per_class=2"], "public": ["public.name=digits", "public.num_images=20"]}
DEMO = "fedavg fedseq sfedkd"
WHOLE: dict[str, tuple[str, Sequence[str]]] = {  # methods and settings of short runs
    "averages": (DEMO, ["run.evaluate_local_models=true", 'run.evaluation_models=["moving","round","last"]']),
    "tasks": (
        "fedavg fedlwf fedskf",
        ["tasks.num_tasks=2", "tasks.absent_clients=1", "partition.classes_per_client=3"],
    ),
    "auxiliary": ("fedcad", HELD["auxiliary"]),
    "public": ("feddf", HELD["public"]),
    "dropout": ("scaffold", ["run.client_dropout=0.3", "run.evaluate_every=2"]),
    "crop-flip-cutout": (
        "moon",
        ["augmentation.crop_padding=1", "augmentation.horizontal_flip=true", "augmentation.cutout=2"],
    ),
    "rotation-brightness": ("moon", ["augmentation.rotation=9.0", "augmentation.brightness=0.2"]),
    "bfloat16": ("fedprox", ["training.precision=bfloat16"]),
    "batch-norm": ("fedavg", ["model.name=resnet32"]),
    "dirichlet": ("fedavg", ["partition.scheme=dirichlet"]),
    "dirichlet-per-client": ("fedavg", ["partition.scheme=dirichlet-per-client"]),
    "hybrid": ("fedavg", ["partition.scheme=hybrid", "partition.iid_parts=2"]),
    "iid": ("fedavg", ["partition.scheme=iid"]),
    "shards": ("fedavg", ["partition.scheme=shards", "partition.shards_per_client=5"]),
}
MODELS = "alexnet8 alexnet8-usfc cnn-ll cnn4 lenet5 mean-cnn mlp resnet18 resnet32 resnet34 resnet50 simple-cnn vgg16"


def built(key: str, situation: str, **changes: Any) -> Any:
    """Return a simulation at round 0."""
    settings: dict[str, Any] = {"cohort_size": 4, "training": tiny.SHORT, **changes}
    tasks = "tasks" in situation
    if "networks" in situation:
        wide, classes = get_architecture("mlp")(hidden=(11, 5)), 1 if tasks else tiny.CLASSES  # type: ignore[call-arg]
        settings["client_factories"] = dict.fromkeys("14", lambda: wide.build(tiny.SHAPE, classes))
    method = VARIANTS[KEYS[key]]
    return tiny.simulation_with_tasks(method, **settings) if tasks else tiny.simulation(method, rounds=3, **settings)


@cache
def hands() -> tuple[Listener, list[Connection]]:
    """Start two worker processes, which serve one simulation after another: a process takes seconds to start."""
    listener, context, orders = Listener(), multiprocessing.get_context("spawn"), []
    for _ in range(2):
        near, far = context.Pipe()
        context.Process(target=work, args=(far, listener.address), daemon=True).start()
        orders.append(near)
    return listener, orders


def hire(simulation: Any, count: int, *job: str) -> ProcessExecutor:
    """Give a simulation workers, which build the same one."""
    listener, orders = hands()
    workers = []
    for line in orders[:count]:
        line.send(job)
        workers.append(Worker(listener.accept()))
    simulation.executor = pool = ProcessExecutor(workers, simulation)
    return pool


def work(orders: Connection, address: str) -> None:
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            simulation = built(*orders.recv())
            with Client(address) as connection:
                serve(connection, step_handlers(simulation))


def in_simulation(key: str, situation: str, way: str) -> Digests:
    changes = dict(WAYS[way])
    workers, killed = changes.pop("workers", 0), changes.pop("killed", 0)
    simulation, found = built(key, situation, **changes), {}
    if killed:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with suppress(Stopped):
                run_trial(simulation, folder, [stop_after(killed)])
            simulation = built(key, situation, **changes)
            run_trial(simulation, folder)
            records, found = read_records(folder), of_model(load_file(folder / "model.safetensors"), "exported weights")
    else:
        pool = hire(simulation, workers, key, situation) if workers else None
        records = tiny.run_rounds(simulation)
        if pool is not None:
            pool.stop()
    for what in changes.get("evaluation_models", ()):
        found |= of_model(simulation.evaluation_model(what), f"{what} weights")
    found |= {"server's state": digest(simulation.server.state), "clients' states": digest(simulation.client_states)}
    return of_model(simulation.server.model) | of_records(records) | found


@cache
def toy() -> str:
    """Return a recipe with a generator, which is trained here, tasks, and clients of three networks."""
    return toy_recipe(Path(os.environ["FEDKEEP_CACHE"]))


def at_sites(key: str, tasks: bool) -> Digests:
    method = VARIANTS[KEYS[key]]
    draws = "generator" in method.needs
    settings = ["run.cohort_size=3", *(setting for need in method.needs for setting in HELD.get(need, ()))]
    settings += ["tasks.num_tasks=2", "tasks.absent_clients=1"] if tasks and not draws else []
    table = tomllib.loads(Path(toy()).read_text() if draws else tiny.RECIPE)
    if method.networks == "one":
        table.pop("client_models", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if hasattr(method, "anchors"):  # of digits
            rows = [[label, *(f"{math.sin(8 * label + i):.3f}" for i in range(8))] for label in range(10)]
            (folder / "anchors.csv").write_text("".join(f"{','.join(map(str, row))}\n" for row in rows))
            method = replace(method, anchors=str(folder / "anchors.csv"))
        table["methods"] = [{"algorithm": method.name(), **as_table(method)}]
        line = LocalTransport(node_configs(folder / "states", 3 if draws else 8))
        recipe = tiny.write_recipe(folder, tomli_w.dumps(table))
        patient = config(recipe, folder / "run", settings, rounds=2, wait=60.0, deadline=600.0)
        found = of_run(serve_sites(line, patient))
    sent: dict[str, list[list[Tensor]]] = {}
    for site, _, parcel in line.sent:
        sent.setdefault(site, []).append(list(parcel.tensors.values()))
    return found | {"tensors sent to sites": digest(sent)}


def whole(methods: str, settings: Sequence[str], machine: Mapping[str, Any], **length: Any) -> Digests:
    recipe = fedkeep.load_recipe("demo", methods=methods.split(), settings=settings, **length)
    with tempfile.TemporaryDirectory() as name:
        return of_run(fedkeep.run(recipe, out=name, machine=fedkeep.Machine(**machine)))


def initial(name: str) -> Digests:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = get_architecture(name)().build((3, 32, 32), 10)
    with torch.no_grad():
        logits = network.eval()(torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32))
    return of_model(network.state_dict()) | {"logits": digest(logits)}


def recipes() -> Digests:
    return {name: digest(tomllib.loads(fedkeep.load_recipe(name).to_toml())) for name in fedkeep.recipe_names()}


def generator() -> Digests:
    files = sorted((Path(toy()).parent / "generator").rglob("*.safetensors"))
    return {f"tensors of file {number}": digest(list(load_file(file).values())) for number, file in enumerate(files)}


def jobs() -> Iterator[tuple[str, Callable[[], Digests]]]:
    """Yield every key with what gives its digests."""
    for key, name in KEYS.items():
        for situation in SITUATIONS:
            tasks, networks = "tasks" in situation, "networks" in situation
            if (tasks and name not in WITH_TASKS) or (networks and VARIANTS[name].networks == "one"):
                continue
            for way in WAYS:
                if key in FEW.split() or way not in FOR_FEW:
                    yield f"{key}/{situation}/{way}", partial(in_simulation, key, situation, way)
            if not networks and (tasks or "generator" not in VARIANTS[name].needs):
                yield f"{key}/{situation}/sites", partial(at_sites, key, tasks)
    for workers in (1, 2):
        machine = {"workers": workers, "stack": 2 * workers - 1}
        yield f"run/demo/workers{workers}", partial(whole, DEMO, [], machine, rounds=3, seeds=[0, 1])
    short = ["training.epochs=1", "partition.num_clients=6", "run.cohort_size=4"]
    for key, (methods, settings) in WHOLE.items():
        yield f"run/{key}", partial(whole, methods, [*short, *settings], {"stack": 1}, rounds=2, seeds=[0])
    yield from ((f"model/{name}", partial(initial, name)) for name in MODELS.split())
    yield "recipes", recipes
    yield "generator", generator


def play_all(out: Path, pattern: str) -> int:
    print(f"{len(VARIANTS)} variants, of the package in {Path(fedkeep.__file__).parent}")
    began, found, failed = time.perf_counter(), {}, []
    with tempfile.TemporaryDirectory() as name:
        os.environ["FEDKEEP_CACHE"] = name
        for key, job in jobs():
            if fnmatch.fnmatch(key, pattern):
                try:
                    found[key] = job()
                except Exception:
                    traceback.print_exc()
                    failed.append(key)
                print(f"{time.perf_counter() - began:5.0f} s  {key}", flush=True)
    out.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} keys with {sum(map(len, found.values()))} digests in {out}; {len(failed)} failed", *failed)
    return 1 if failed or not found else 0


def compare(files: Sequence[Path], pattern: str) -> int:
    one, two = (json.loads(file.read_text()) for file in files)
    differ, keys = 0, [key for key in one | two if fnmatch.fnmatch(key, pattern)]
    for key in keys:
        a, b = one.get(key), two.get(key)
        if a is None or b is None:
            print(f"{key}: only in {files[a is None]}")
        elif a != b:
            print(f"{key}: {', '.join(what for what in a | b if a.get(what) != b.get(what))}")
        differ += a != b
    print(f"{len(keys)} keys compared, {differ} differ")
    return 1 if differ or not keys else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="play, and write the digests to this file")
    what.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="compare two such files")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only keys that match, such as 'sfedkd/*'")
    given = parser.parse_args()
    if given.compare:
        return compare(given.compare, given.only)
    torch.set_num_threads(1)
    logging.disable()
    os.fsync = lambda file: None  # nothing here need outlive a power cut
    Figure.savefig = lambda self, file, **_: file.write('<svg viewBox="0 0 1 1"></svg>')  # drawing is slow
    return play_all(given.out, given.only)


if __name__ == "__main__":
    sys.exit(main())
