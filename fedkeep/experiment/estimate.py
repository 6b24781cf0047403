"""How long a cell will take and how much memory, from two small rounds of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from fedkeep.data import Data, Federation, Tasks
from fedkeep.data.partition import Partition
from fedkeep.engine.embedded import Embedded
from fedkeep.errors import FedKeepError
from fedkeep.experiment.cells import pinned_threads
from fedkeep.experiment.machine import Machine
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.setup import engine_for, federate
from fedkeep.generation.diffusion.generator_config import GeneratorConfig
from fedkeep.interface.values import payload

BASE = 400e6  # bytes of a process with Python and PyTorch before any data, roughly


@dataclass(frozen=True)
class Estimate:
    """What one cell is expected to take: seconds on this machine, and bytes of memory in its process."""

    seconds: float
    memory: float


class NotEstimated(FedKeepError):
    """A method of which small rounds say little about the whole."""


def estimate(recipe: Recipe, method: Method, machine: Machine) -> Estimate:
    """Play two rounds with few clients and one batch each, and scale what the second one took.

    A public set is made smaller by as much as the clients' data. With tasks they are the first's. What a method does
    once a task is left out, as are teachers that only come with later rounds, or that are fewer among few clients: with
    them it is too low. Another machine, or a busy one, makes it anything.

    Raises
    ------
    NotEstimated
        For a method whose server draws images as a task begins.
    """
    if "generator" in method.algorithm.needs:
        raise NotEstimated(
            f"{method.label} is not estimated: most of its time goes into prototypes and images, made as a task begins."
        )
    with pinned_threads(machine.threads):
        return _estimate(recipe, method, machine)


def _estimate(recipe: Recipe, method: Method, machine: Machine) -> Estimate:
    federation = federate(recipe, recipe.seeds[0], machine.data_dir)
    tasks = [federation.at(task) for task in range(1, federation.tasks + 1)]
    held = sum(float(task.partition.sizes.double().mean()) for task in tasks) / len(tasks)
    visited = recipe.run.cohort * held  # examples of a round, once
    small = _shrunk(federation, recipe.training.batch_size, min(recipe.run.cohort, 5))
    shown = sum(map(small.size, small.clients)) or 1
    more = visited * recipe.training.epochs / shown  # examples that a whole round trains on, for each one here
    if recipe.public.name and more:
        share = recipe.run.cohort / (len(small.clients) * more)
        small = replace(small, server=_part(small.server, share))
    plan = replace(
        recipe.run,
        rounds=3,
        cohort=len(small.clients),
        min_clients=1,
        evaluate_every=3,
        evaluate_visits=False,
        served=("last",),
    )
    shortest = replace(recipe.training, epochs=1)
    # A method that draws from a generator is not estimated, and none is left without tasks.
    brief = replace(recipe, methods=(method,), run=plan, tasks=Tasks(), training=shortest, generator=GeneratorConfig())
    engine = engine_for(brief, method, recipe.seeds[0], small, machine.device, machine.data_dir)
    engine.advance()
    finished = engine.advance()
    training = finished.timings["train"] * more
    teaching = finished.timings["teachers"] / shown * visited
    images = sum(len(task.dataset.test["label"]) for task in tasks) / len(tasks)
    evaluations = len(recipe.run.served) / recipe.run.evaluate_every
    if recipe.run.evaluate_visits:
        evaluations += recipe.run.cohort / recipe.run.evaluate_every
    evaluating = _evaluation(engine, min(int(images), 256)) * images * evaluations
    return Estimate(recipe.rounds * (training + teaching + evaluating), _memory(engine, federation, recipe))


def _evaluation(engine: Embedded, images: int) -> float:
    """Return the seconds that evaluating one image takes."""
    test = engine.federation.dataset.test["image"][:images]
    began = time.perf_counter()
    engine.place.networks.logits(engine.server.model, engine.place.normalise(test))
    return (time.perf_counter() - began) / images


def _memory(engine: Embedded, federation: Federation, recipe: Recipe) -> float:
    """Return bytes: data, networks, what a round's clients send, and what server and clients keep."""
    data = sum(
        column.nbytes for split in (federation.dataset.train, federation.dataset.test) for column in split.values()
    )
    model = sum(tensor.nbytes for tensor in engine.server.model.values())
    kept = max((payload(state) for state in engine.states.values()), default=0)
    clients = min(len(federation.clients), recipe.rounds * recipe.run.cohort)
    return BASE + data + model * (6 + recipe.run.cohort) + payload(engine.server.state) + kept * clients


def _part(data: Data, share: float) -> Data:
    """Return the first rows of a data set, as large a share of it, but two at least, for batch norm."""
    count = max(2, round(share * len(data["label"])))
    return {name: column[:count] for name, column in data.items()}


def _shrunk(federation: Federation, rows: int, clients: int) -> Federation:
    """Return a federation of a few of the clients, with at most so many rows each."""
    partition = federation.partition
    largest = torch.argsort(partition.sizes, descending=True, stable=True)[:clients]
    parts = [partition[int(i)][:rows] for i in largest]
    offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    few = Partition(partition.scheme, {}, partition.seed, 1, torch.cat(parts), offsets)
    return Federation(federation.dataset, few, federation.server)
