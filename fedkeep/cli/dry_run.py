"""What a run would take: its trials, with an estimate of the time, memory and bytes of each on this machine."""

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

import torch
from rich.console import Console

from fedkeep._utils.torch_state import plain_torch
from fedkeep.cli.text import say
from fedkeep.data import Federation, Tasks
from fedkeep.data.partition import Partition
from fedkeep.display import Display, duration
from fedkeep.errors import FedKeepError
from fedkeep.experiment.build import build_federation, build_simulation, check_federation
from fedkeep.experiment.recipe import Method, Recipe, resolve_pretrained
from fedkeep.experiment.runtime import Machine
from fedkeep.generation.generator_config import GeneratorConfig
from fedkeep.interface.algorithm import returns_model
from fedkeep.interface.pytree import num_bytes
from fedkeep.reporting.table import TextTable, human_bytes
from fedkeep.rounds.run_settings import Attack, RunSettings, distinct_models
from fedkeep.training.per_example import gradient_bytes
from fedkeep.trials.simulation import Simulation

LARGE = 80e6  # bytes of a network whose steps take seconds, so that two clients must do
PROCESS_MEMORY = 400e6  # bytes of a process with Python and PyTorch before any data, roughly


@dataclass(frozen=True)
class Estimate:
    """The expected time, memory and messages of one trial.

    ``seconds``: Time on this machine, in seconds.
    ``memory``: Memory of the process, in bytes.
    ``sent``: What the server and all clients send each other, in bytes.
    """

    seconds: float
    memory: float
    sent: float


class NotEstimated(FedKeepError):
    """Raised for a method whose time small rounds do not predict."""


def estimate(recipe: Recipe, method: Method, machine: Machine) -> Estimate:
    """Run two rounds with few clients and one batch each, and scale the time of the second one.

    A public set is reduced in proportion to the clients' data. With tasks, the rounds are those of the first task. The
    estimate is too low for a method that works once a task, or whose teachers join in later rounds or with more
    clients. It is valid for this machine, as busy as it is now.

    ``machine``: The device, threads and data folder.
    """
    if "generator" in method.algorithm.needs:
        raise NotEstimated(
            f"{method.label} is not estimated: most of its time goes into prototypes and images, which it generates "
            "when a task begins."
        )
    federation = build_federation(recipe, recipe.seeds[0], machine.data_dir)
    check_federation(recipe, federation, machine.data_dir)
    tasks = [federation.for_task(task) for task in range(1, federation.num_tasks + 1)]
    per_client = sum(float(task.partition.sizes.double().mean()) for task in tasks) / len(tasks)
    per_round = recipe.run.cohort_size * per_client  # examples of a cohort
    training = recipe.training_of(method)
    network = resolve_pretrained(recipe.model, machine.data_dir).build(
        federation.dataset.shape, federation.cumulative_classes[0]
    )
    few_clients = 2 if sum(tensor.nbytes for tensor in network.parameters()) > LARGE else 5
    small = _subset_federation(federation, training.batch_size, min(recipe.run.cohort_size, few_clients))
    measured = sum(map(small.num_examples, small.clients)) or 1
    scale = per_round * training.epochs / measured  # examples of a whole round per example of a small one
    rows_cut = 1.0
    if recipe.public.name and scale:
        share = recipe.run.cohort_size / (len(small.clients) * scale)
        rows = max(2, round(share * len(small.server_data["label"])))  # batch norm needs two
        rows_cut = len(small.server_data["label"]) / rows
        small = replace(small, server_data={name: column[:rows] for name, column in small.server_data.items()})
    few = RunSettings(rounds=3, cohort_size=len(small.clients), evaluate_every=3, evaluation_models=("last",))
    one_epoch = replace(method, training={**method.training, "epochs": 1})
    # Methods with a generator are not estimated.
    short = replace(recipe, methods=(one_epoch,), run=few, tasks=Tasks(), generator=GeneratorConfig(), attack=Attack())
    simulation = build_simulation(short, one_epoch, recipe.seeds[0], small, machine.device, machine.data_dir)
    _, result = simulation.run_round(), simulation.run_round()
    local = result.timings["train"] * scale + result.timings["teachers"] / measured * per_round
    images = sum(len(task.dataset.test["label"]) for task in tasks) / len(tasks)
    models = distinct_models(recipe.run.evaluation_models, method.algorithm)
    evaluated = len(models) + recipe.run.cohort_size * recipe.run.evaluate_local_models
    evaluations = evaluated / recipe.run.evaluate_every
    evaluation = _evaluation_time(simulation, min(int(images), 256)) * images * evaluations
    sent = (result.record["down"] + result.record["up"]) * recipe.run.cohort_size / len(small.clients)
    if not returns_model(type(method.algorithm)):  # but predictions on the public set
        sent *= rows_cut
    pooled = recipe.pretraining.passes * int(federation.partition.sizes.sum()) * result.timings["train"] / measured
    seconds = pooled + recipe.rounds * (local + evaluation)
    return Estimate(seconds, _memory(simulation, federation, recipe), recipe.rounds * sent)


def _evaluation_time(simulation: Simulation, images: int) -> float:
    """Return the seconds that the evaluation of one image takes."""
    test = simulation.federation.dataset.test["input"][:images]
    began = time.perf_counter()
    simulation.context.runner.logits(simulation.server.model, simulation.context.normalise(test))
    return (time.perf_counter() - began) / images


def _memory(simulation: Simulation, federation: Federation, recipe: Recipe) -> float:
    """Return the bytes of data, networks, a round's replies, states of server and clients, and gradients by example."""
    splits = (federation.dataset.train, federation.dataset.test)
    data = sum(column.nbytes for split in splits for column in split.values())
    model = sum(tensor.nbytes for tensor in simulation.server.model.values())
    client_state = max((num_bytes(state) for state in simulation.client_states.values()), default=0)
    clients = min(len(federation.clients), recipe.rounds * recipe.run.cohort_size)
    trained = {name: simulation.server.model[name] for name in simulation.context.runner.parameters}
    by_example = simulation.context.timer.by_example or recipe.privacy.noise_multiplier > 0
    states = num_bytes(simulation.server.state) + client_state * clients
    return PROCESS_MEMORY + data + model * (6 + recipe.run.cohort_size) + states + gradient_bytes(trained) * by_example


def _subset_federation(federation: Federation, rows: int, clients: int) -> Federation:
    """Return a federation of the largest clients, with at most ``rows`` examples each."""
    partition = federation.partition
    largest = torch.argsort(partition.sizes, descending=True, stable=True)[:clients]
    parts = [partition[int(i)][:rows] for i in largest]
    offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    few = Partition(partition.scheme, {}, partition.seed, 1, torch.cat(parts), offsets)
    return Federation(federation.dataset, few, federation.server_data)


def dry_run(
    recipes: Mapping[str, Recipe], machine: Machine, console: Console, done: Container[tuple[str, str, int]] = ()
) -> int:
    """List the trials of recipes with what each is expected to take; nothing is written.

    ``recipes``: By the name of a column; empty for the only one.
    ``done``: What was run before: column, label of a method, and seed.
    Returns: The exit code: 1 if no column has data that can be read.
    """
    heads = [*["column"] * any(recipes), "method", "seeds", "rounds", "time a seed", "memory", "sent in all"]
    lines = list[list[str]]()
    times, unknown, failed = list[float](), list[str](), dict[str, list[str]]()
    total = sum(len(recipe.methods) for recipe in recipes.values())
    with Display(Console(stderr=True), {}, unit="method", quiet=total < 4) as display:
        for name, recipe in recipes.items():
            for method in recipe.methods:
                display.count(len(lines), total, f"{name} {method.label}".strip())
                first = [*[name] * bool(name), method.label]
                seeds = [seed for seed in recipe.seeds if (name, method.label, seed) not in done]
                if not seeds:
                    lines.append([*first, "-", str(recipe.rounds), "done", "", ""])
                    continue
                shown, missing = ["?", "?", "?"], False
                try:
                    with plain_torch(machine.threads):
                        expected = estimate(recipe, method, machine)
                except NotEstimated as reason:
                    unknown.append(str(reason))
                except FedKeepError as error:  # such as a data set that is not available
                    if not name:
                        raise
                    failed.setdefault(str(error), []).append(name)
                    missing = True
                else:
                    times.append(expected.seconds * len(seeds))
                    shown = [duration(expected.seconds), f"{expected.memory / 1e9:.1f} GB", human_bytes(expected.sent)]
                lines.append([*first, ", ".join(map(str, seeds)), str(recipe.rounds), *shown])
                if missing:
                    break
    console.print(TextTable(heads, lines).terminal())
    unknown += [f"{', '.join(names)}: {error}" for error, names in failed.items()]
    exception = ", without those that show a ?" if unknown else ""
    in_all = (
        f"In all about {duration(sum(times))} on one core of this machine, if nothing else runs{exception}. It was "
        "measured in a few steps; teachers that join in later rounds may add to it. sent in all: what server and "
        "clients send each other for a seed. "
        + "What is sent and computed once a task is not in it. "
        * any(recipe.has_tasks for recipe in recipes.values())
    )
    say(console, f"{in_all if times else ''}Nothing was run.", paragraphs=True)
    for line in dict.fromkeys(unknown):
        say(console, line)
    return int(bool(failed) and not times)
