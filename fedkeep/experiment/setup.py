"""From a recipe to an engine: data set, partition, network, and one method with one seed."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from fedkeep.data import Data, DataSet, Federation, load
from fedkeep.data.known import data_folder
from fedkeep.engine.embedded import Embedded
from fedkeep.engine.networks import Factory
from fedkeep.errors import ConfigError
from fedkeep.experiment.networks import located, own_models
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.models import Architecture, Pretrained
from fedkeep.options import as_table
from fedkeep.synthesis.diffusion.generator import REGIMES


def load_data(name: str, data_dir: str | Path | None = None) -> DataSet:
    """Load a data set, or return it again if it was one of the last two."""
    return _load(name, data_folder(data_dir))


@lru_cache(maxsize=2)  # a recipe may name a public set too
def _load(name: str, folder: Path | None) -> DataSet:
    return load(name, data_dir=folder)


def federate(recipe: Recipe, seed: int, data_dir: str | Path | None = None) -> Federation:
    """Load a recipe's data set and split it over the server and the clients, as this seed has it.

    With tasks it is the first task's.
    """
    return shared_out(recipe, seed, *held_by_server(recipe, seed, load_data(recipe.data, data_dir), data_dir))


def held_by_server(
    recipe: Recipe, seed: int, dataset: DataSet, data_dir: str | Path | None = None
) -> tuple[DataSet, Data]:
    """Return a data set without what the server takes for itself, and what the server holds."""
    dataset, server = recipe.auxiliary.split(dataset, seed)
    if recipe.public.name:
        server = recipe.public.draw(load_data(recipe.public.name, data_dir), dataset, seed)
    return dataset, server


def shared_out(recipe: Recipe, seed: int, dataset: DataSet, server: Data) -> Federation:
    """Split what the server has left of a data set over the clients, as this seed has it; see `federate`."""
    if recipe.has_tasks:
        return recipe.tasks.stream(dataset, recipe.partition, seed).federation(1, server)
    return Federation(dataset, recipe.partition.split(dataset.train, dataset.classes, seed), server)


def engine_for(
    recipe: Recipe,
    method: Method,
    seed: int,
    federation: Federation,
    device: str = "cpu",
    data_dir: str | Path | None = None,
) -> Embedded:
    """Return the embedded engine of one method with one seed, at round 0; in ``data_dir`` its generator may be."""
    dataset = federation.dataset
    checked_cohort(recipe, federation)
    model = located(recipe.model, data_dir)
    return Embedded(
        algorithm=method.algorithm,
        federation=federation,
        factory=lambda: model.build(dataset.shape, federation.seen[0]),
        training=recipe.training,
        plan=recipe.run,
        augmentation=recipe.augmentation,
        seed=seed,
        device=checked_device(device),
        load_generator=cache(lambda: recipe.generator.load(dataset.shape[-1], torch.device(device), data_dir)),
        own=own_factories(recipe, federation, data_dir),
    )


def own_factories(recipe: Recipe, federation: Federation, data_dir: str | Path | None = None) -> dict[str, Factory]:
    """Return what builds the networks of clients that have their own; one object for each network."""

    def factory(model: Architecture) -> Factory:
        return lambda: model.build(federation.dataset.shape, federation.seen[0])

    own = own_models(recipe.client_models, federation.clients)
    factories = {model: factory(located(model, data_dir)) for model in own.values()}
    return {client: factories[model] for client, model in own.items()}


def checked_cohort(recipe: Recipe, federation: Federation) -> None:
    """Raise `ConfigError` if there are fewer clients than a round draws, which a natural partition shows only now."""
    if recipe.run.cohort > len(federation.clients):
        raise ConfigError(
            f"a cohort of {recipe.run.cohort} cannot be drawn from {len(federation.clients)} clients. "
            "Change run.cohort."
        )


def checked_device(name: str) -> torch.device:
    """Return a device by name; raise `ConfigError` if this machine does not have it."""
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):  # others lack float64 or generators that can be lent
            raise RuntimeError(f"devices of type {device.type} are not supported")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        has = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        raise ConfigError(f"cannot use device {name!r} here. This machine offers: {', '.join(has)}.") from error
    return device


def describe_cell(
    recipe: Recipe, method: Method, seed: int, federation: Federation, data_dir: str | Path | None = None
) -> dict[str, Any]:
    """Return what a report needs to know about one method with one seed."""
    dataset, final = federation.dataset, federation.at(federation.tasks)
    classes = final.seen[-1]  # those that arrive
    described = {
        "label": method.label,
        "algorithm": method.algorithm.name(),
        "options": as_table(method.algorithm),
        "seed": seed,
        "rounds": recipe.rounds,
        "served": list(recipe.run.served),
        "schedule": method.algorithm.schedule,
        "paper": method.algorithm.paper,
        "clients": len(federation.clients),
        "cohort": recipe.run.cohort,
        "classes": classes,
        "label_names": list(dataset.label_names[:classes]),
        "dataset": dataset.name,
        "dataset_note": dataset.note,
        "test_total": torch.bincount(final.dataset.test["label"], minlength=classes).tolist(),
    }
    if recipe.has_tasks:
        described["tasks"] = [task.seen - task.old for task in final.stream.tasks] if final.stream else []
    model = located(recipe.model, data_dir)
    if isinstance(model, Pretrained):
        described["extractor"] = model.about
    if "generator" in method.algorithm.needs:
        regime = recipe.generator.regime(data_dir)
        described["generator"] = f"{recipe.generator.name} ({regime}): {REGIMES[regime]}"
    return described


def describe_partition(federation: Federation) -> dict[str, Any]:
    """Return who holds what, and with tasks when: a manifest and the examples by client and class."""
    if federation.stream is None:
        partition = federation.partition
        counts = partition.counts(federation.dataset.train["label"], federation.dataset.classes)
        return partition.manifest() | {"counts": counts.tolist()}
    stream = federation.stream
    label, classes = stream.dataset.train["label"], stream.tasks[-1].seen
    each = [task.partition.counts(label, stream.dataset.classes)[:, :classes] for task in stream.tasks]
    counts = torch.stack(each).sum(0)  # a class belongs to one task
    return stream.tasks[0].partition.manifest() | {"counts": counts.tolist(), "tasks": stream.manifest()}
