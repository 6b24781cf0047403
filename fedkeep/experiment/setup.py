"""From a recipe to an engine: data set, partition, network, and one method with one seed."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from fedkeep.data import Data, DataSet, Federation, load
from fedkeep.data.fingerprints import without
from fedkeep.data.holdout import validated
from fedkeep.data.known import data_folder
from fedkeep.engine.embedded import Embedded
from fedkeep.engine.networks import Factory
from fedkeep.errors import ConfigError, DataError
from fedkeep.experiment.networks import about_extractor, located, own_models, pretrained
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.generation.diffusion._libraries import check_installed
from fedkeep.generation.diffusion.generator import Generator
from fedkeep.generation.diffusion.generator_config import GeneratorConfig
from fedkeep.models import Architecture
from fedkeep.models.weights import digest
from fedkeep.options import as_table

TOLD = 100_000  # clients of whom a run says who holds what; of a million it would be 30 MB in every cell


def load_data(name: str, data_dir: str | Path | None = None, validation: float = 0.0) -> DataSet:
    """Load a data set, or return it again if it was one of the last two.

    With a share for ``validation``, that part of its training images stands for its test images.
    """
    return _load(name, data_folder(data_dir), validation)


@lru_cache(maxsize=2)  # a recipe may name a public set too
def _load(name: str, folder: Path | None, validation: float) -> DataSet:
    loaded = load(name, data_dir=folder)
    return validated(loaded, validation) if validation else loaded


def federate(recipe: Recipe, seed: int, data_dir: str | Path | None = None) -> Federation:
    """Load a recipe's data set and split it over the server and the clients, as this seed has it.

    With tasks it is the first task's.

    Raises
    ------
    DataError
        If its generator learned from a part of the clients' classes, as it says, and none of their images is here.
    """
    dataset = load_data(recipe.data, data_dir, recipe.validation)
    for one in _there(recipe, data_dir):
        rest = _without(dataset, one, data_dir)
        if rest is not dataset and len(rest.train["label"]) == len(dataset.train["label"]):
            raise DataError(
                f"the generator {one.name} says that it learned from a part of the clients' classes, and none of those "
                f"images is in {dataset.name}. Use one that was trained on these data, or whose regime is disjoint."
            )
        dataset = rest
    return shared_out(recipe, seed, *held_by_server(recipe, seed, dataset, data_dir))


def without_seen(recipe: Recipe, dataset: DataSet, data_dir: str | Path | None = None) -> DataSet:
    """Return a data set without the images that nobody but the recipe's generators may have.

    They are left out for methods that need no generator too, so that all can be compared; but such methods run without
    the generator's folder.
    """
    for one in _there(recipe, data_dir):
        dataset = _without(dataset, one, data_dir)
    return dataset


def _without(dataset: DataSet, generator: GeneratorConfig, data_dir: str | Path | None) -> DataSet:
    seen = generator.fingerprints(data_dir)
    return without(dataset, seen) if len(seen) else dataset


def generator_hash(recipe: Recipe, data_dir: str | Path | None = None) -> str:
    """Return the hash of the recipe's generator, or those of each task's, which is the same at all parties.

    It is empty if none is needed, or there.
    """
    return " ".join(one.hash(data_dir) for one in _there(recipe, data_dir))


def _there(recipe: Recipe, data_dir: str | Path | None) -> tuple[GeneratorConfig, ...]:
    """Return the recipe's generators; none where no method needs them, and not all of their folders are here."""
    each = recipe.generator.per_task
    return each if _draws(recipe) or all(one.exists(data_dir) for one in each) else ()


def _draws(recipe: Recipe) -> bool:
    return any("generator" in method.algorithm.needs for method in recipe.methods)


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
    *,
    graphs: bool = False,
) -> Embedded:
    """Return the embedded engine of one method with one seed, at round 0; in ``data_dir`` its generator may be."""
    dataset = federation.dataset
    checked_cohort(recipe, federation)
    checked_augmentation(recipe, federation)
    checked_generator(recipe, federation, data_dir)
    model = located(recipe.model, data_dir)

    @cache
    def load_generator(choice: GeneratorConfig) -> Generator:
        return choice.load(dataset.shape[-1], torch.device(device), data_dir)

    return Embedded(
        algorithm=method.algorithm,
        federation=federation,
        factory=lambda: model.build(dataset.shape, federation.seen[0]),
        training=recipe.training,
        plan=recipe.run,
        augmentation=recipe.augmentation,
        seed=seed,
        device=checked_device(device),
        graphs=graphs,
        load_generator=lambda task: load_generator(recipe.generator.for_task(task)),
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


def checked_augmentation(recipe: Recipe, federation: Federation) -> None:
    """Raise `ConfigError` if images are too small for what the recipe does to them."""
    _, height, width = federation.dataset.shape
    recipe.augmentation.check_fits(height, width)


def checked_generator(recipe: Recipe, federation: Federation, data_dir: str | Path | None = None) -> None:
    """Raise `ConfigError` for a generator of images of another shape, or one that knows other classes than it should.

    Without the packages that generators need it is `MissingExtra`.
    """
    if _draws(recipe):
        check_installed()
        names, seen = _arriving(federation), (0, *federation.at(federation.tasks).seen)
        for task, one in enumerate(recipe.generator.per_task, start=1):
            one.check_shape(federation.dataset.shape, data_dir)
            one.check_classes(names, data_dir)
            if recipe.generator.by_task:
                one.check_task(task, names[seen[task - 1] : seen[task]], data_dir)


def _arriving(federation: Federation) -> tuple[str, ...]:
    """Return the names of the classes that a run has, over all tasks."""
    return federation.dataset.label_names[: federation.at(federation.tasks).seen[-1]]


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
    rests_on = {
        "training data": digest(dataset.train["label"])
    }  # others where a generator's images are left out or not
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
        "label_names": list(_arriving(federation)),
        "rests_on": rests_on,
        "dataset": dataset.name,
        "dataset_note": dataset.note,
        "test_total": torch.bincount(final.dataset.test["label"], minlength=classes).tolist(),
    }
    if recipe.has_tasks:
        described["tasks"] = [task.seen - task.old for task in final.stream.tasks] if final.stream else []
    said = []
    for whose, extractor in pretrained(recipe.model, recipe.client_models, data_dir).items():
        said.append((f"{whose}: " if whose else "") + about_extractor(extractor, _arriving(federation)))
        rests_on[f"extractor of {whose}" if whose else "extractor"] = extractor.hash()
    if said:
        described["extractor"] = "; ".join(said)
    if "generator" in method.algorithm.needs:
        described["generator"] = recipe.generator.describe(data_dir)
        rests_on["generator"] = generator_hash(recipe, data_dir)
    return described


def describe_partition(federation: Federation, visits: bool = False) -> dict[str, Any]:
    """Return who holds what, and with tasks when: a manifest and the examples by client and class.

    A population beyond `TOLD` is described by its manifest alone, and its report has no heat map; unless clients' own
    models are evaluated (``visits``), which takes what they hold.
    """
    stream = federation.stream
    manifest = federation.partition.manifest() if stream is None else stream.tasks[0].partition.manifest()
    tasks = {} if stream is None else {"tasks": stream.manifest()}
    return manifest | (_counts(federation) if visits or len(federation.clients) <= TOLD else {}) | tasks


def _counts(federation: Federation) -> dict[str, Any]:
    if federation.stream is None:
        counts = federation.partition.counts(federation.dataset.train["label"], federation.dataset.classes)
        return {"counts": counts.tolist()}
    stream = federation.stream
    label, classes = stream.dataset.train["label"], stream.tasks[-1].seen
    each = [task.partition.counts(label, stream.dataset.classes)[:, :classes] for task in stream.tasks]
    return {"counts": torch.stack(each).sum(0).tolist()}  # a class belongs to one task
