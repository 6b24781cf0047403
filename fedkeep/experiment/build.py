"""Build a recipe's parts: the data set, the federation, the networks, and the simulation of one trial."""

import os
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from fedkeep._utils import seeds
from fedkeep._utils.torch_state import plain_torch
from fedkeep.data import Data, DataOptions, DataSet, Federation, array_store, load
from fedkeep.data.cache import digest
from fedkeep.data.catalog import CATALOG, data_folder
from fedkeep.data.columns import TableColumn
from fedkeep.data.dataset import describe_input
from fedkeep.data.federation import with_client_test
from fedkeep.data.holdout import validated, with_held_out, without_examples, without_images
from fedkeep.data.loading import local_path, local_version
from fedkeep.errors import ConfigError, DataError, in_one_line
from fedkeep.experiment.plugins import find_loss
from fedkeep.experiment.recipe import Method, Recipe, client_architectures, resolve_pretrained
from fedkeep.generation.generator import Generator, check_installed
from fedkeep.interface import Training
from fedkeep.losses.classification import OWN_LOSSES
from fedkeep.models import Architecture, Weights, architectures
from fedkeep.models.custom import Custom
from fedkeep.models.pretrained import Pretrained
from fedkeep.models.trial_step import check_same_function, try_training
from fedkeep.rounds.state import Settings
from fedkeep.training.model_runner import Factory, has_batch_norm
from fedkeep.trials.simulation import Simulation

SEEN_BY_GENERATOR = "The generator learned from the held-out images too."
"""What the note of a data set says where options are chosen with a generator of the regime ``paper``."""
COPIES = 4
"""Least number of copies of a network's weights in training: two networks, the initial weights, and gradients."""


def load_data(
    name: str,
    data_dir: str | Path | None = None,
    validation: float = 0.0,
    options: DataOptions | None = None,
    columns: Sequence[TableColumn] | None = None,
) -> DataSet:
    """Load a data set. The last two are cached.

    ``name``: A known data set, a Hub id or a path.
    ``validation``: The share of the training examples that replaces the test examples; 0: use the test examples.
    ``options``: How files are read that are not known by name.
    ``columns``: How a run has imputed and scaled the columns of a table; given for a site's data, see `load`.
    """
    version = local_version(name, data_dir)
    return _load(
        name,
        data_folder(data_dir),
        validation,
        options or DataOptions(),
        version,
        None if columns is None else tuple(columns),
    )


@lru_cache(maxsize=2)  # a recipe may have a public data set too
def _load(
    name: str,
    folder: Path | None,
    validation: float,
    options: DataOptions,
    version: tuple[object, ...],
    columns: Sequence[TableColumn] | None,
) -> DataSet:
    dataset = load(name, data_dir=folder, options=options, columns=columns)
    # Copies are counted only in a user's own files; the notes of known data sets stay as they were.
    if not validation:
        return dataset
    return validated(dataset, validation, count_copies=bool(version), rescale=not columns)


def data_digest(recipe: Recipe, data_dir: str | Path | None = None) -> str:
    """Return a hash of a recipe's data set, the same for all its seeds; empty if it is known by name, or of the Hub."""
    names = [recipe.data, *(part.strip() for part in recipe.data.split("+"))]
    if not any(name.startswith(array_store.PREFIX) or local_path(name, data_dir) for name in names):
        return ""
    return _digest(load_data(recipe.data, data_dir, recipe.validation, recipe.data_options))


_digest = lru_cache(maxsize=2)(digest)


def build_federation(recipe: Recipe, seed: int, data_dir: str | Path | None = None) -> Federation:
    """Load a recipe's data set and split it over the server and the clients.

    ``data_dir``: The folder of local data sets, generators and extractors.
    """
    return split_clients(recipe, seed, *clients_and_server_data(recipe, seed, data_dir))


def clients_and_server_data(recipe: Recipe, seed: int, data_dir: str | Path | None = None) -> tuple[DataSet, Data]:
    """Load a recipe's data set and split it into the clients' part and the examples that the server holds.

    ``data_dir``: The folder of local data sets and generators.
    Returns: What the server holds; empty for most recipes.
    """
    dataset = load_data(recipe.data, data_dir, recipe.validation, recipe.data_options)
    rest = without_generator_images(recipe, dataset, data_dir)
    is_unchanged = len(rest.train["label"]) == len(dataset.train["label"])
    if is_unchanged and _has_generator(recipe, data_dir) and recipe.generator.regime(data_dir) == "same_classes":
        raise DataError(
            f"the generator {recipe.generator.name} says that it learned from a part of the clients' classes, and none "
            f"of those images is in {dataset.name}. Use one that was trained on this data set, or whose regime is "
            "disjoint."
        )
    return split_server_data(recipe, seed, rest, data_dir)


def without_generator_images(recipe: Recipe, dataset: DataSet, data_dir: str | Path | None = None) -> DataSet:
    """Return a data set without the images from which the recipe's generator learned and that no client may hold.

    These images are left out for methods without a generator too, so that all methods train on the same data. They are
    not among held-out images (``data.validation``) either. If no method needs a generator and its folder is missing,
    nothing is left out.

    Returns: The data set without these images; the same object if there are none.
    """
    if not _has_generator(recipe, data_dir):
        return dataset
    hashes = recipe.generator.image_hashes(data_dir)
    if len(hashes):
        return without_images(dataset, hashes, from_test=bool(recipe.validation))
    if recipe.validation and recipe.generator.regime(data_dir) == "paper":
        return replace(dataset, note=f"{dataset.note} {SEEN_BY_GENERATOR}".strip())
    return dataset


def generator_hash(recipe: Recipe, data_dir: str | Path | None = None) -> str:
    """Return the hash of the recipe's generator, by which parties check that they have the same one; empty without."""
    return recipe.generator.hash(data_dir) if _has_generator(recipe, data_dir) else ""


def _has_generator(recipe: Recipe, data_dir: str | Path | None) -> bool:
    """Tell whether there is a generator; one that no method needs may be missing."""
    return bool(recipe.generator.name) and (_needs_generator(recipe) or recipe.generator.exists(data_dir))


def _needs_generator(recipe: Recipe) -> bool:
    return any("generator" in method.algorithm.needs for method in recipe.methods)


def split_server_data(
    recipe: Recipe, seed: int, dataset: DataSet, data_dir: str | Path | None = None
) -> tuple[DataSet, Data]:
    """Split a data set into the clients' part and the examples that the server holds.

    ``recipe``: The recipe, which may give the server an auxiliary or a public set.
    Returns: What the server holds; empty for most recipes.
    """
    # Not where data are loaded: of a site's own data all examples may be of one of the run's classes.
    if dataset.num_classes < 2:
        raise DataError(
            f"{dataset.name}: a run needs at least 2 classes to tell apart, and there is only "
            f"{dataset.label_names[0]!r}. Is data.label the column of the classes?"
        )
    dataset, server = recipe.auxiliary.split(dataset, seed)
    if recipe.public.name:
        server = recipe.public.draw(_load_public(recipe, dataset, data_dir), dataset, seed)
    return dataset, server


def _load_public(recipe: Recipe, dataset: DataSet, data_dir: str | Path | None) -> DataSet:
    """Load a recipe's public set as its data set was read: a table with its columns, photos with its size."""
    path = local_path(recipe.public.name, data_dir)
    is_own = path is not None and path.suffix.lower() != ".npz"
    options = replace(recipe.data_options, client="", group="", split="") if is_own else None

    def read(columns: Sequence[TableColumn]) -> DataSet:
        return with_held_out(load_data(recipe.public.name, data_dir, options=options, columns=columns or None))

    try:
        found = read(dataset.columns)
        clients, public = (_sources(name, data_dir) for name in (recipe.data, recipe.public.name))
        if clients.isdisjoint(public):
            return found
        # What is evaluated, or held out, is no public example. Rows are known by their numbers before a validation
        # scales them.
        whole = load_data(recipe.data, data_dir, options=recipe.data_options) if recipe.validation else dataset
        # Other files may be those of the tests; in the same ones equal rows are those of two people.
        held_out = [whole.test] if clients != public or whole.test_held_out or recipe.data_options.split else []
        if recipe.validation:
            held_out.append(validated(whole, recipe.validation, rescale=False).test if whole.columns else dataset.test)
        if not held_out:
            return found
        ours = found if whole.columns == dataset.columns else read(whole.columns)
        return without_examples(found, ours.train["input"], torch.cat([one["input"] for one in held_out]))
    except DataError as error:
        if not (is_own and dataset.columns):
            raise
        raise DataError(f"[public] needs the columns of {dataset.name}, and is read with them. {error}") from error


def _sources(name: str, data_dir: str | Path | None) -> set[str]:
    """Return the hashes of a data set's files, or what it is in the catalogue or on the Hub."""
    if "+" in name and local_path(name, data_dir) is None:
        return {source for part in name.split("+") for source in _sources(part.strip(), data_dir)}
    if (entry := CATALOG.get(name)) is not None:
        return {CATALOG[entry.made_from or name].hub or name}
    known = any(entry.hub == name for entry in CATALOG.values())
    return {name} if known else {sha for _, sha in local_version(name, data_dir)} or {name}


def split_clients(recipe: Recipe, seed: int, dataset: DataSet, server: Data) -> Federation:
    """Split the clients' part of a data set over the clients."""
    how = recipe.run.client_test
    if how and how != "own" and not recipe.validation:
        dataset = with_held_out(dataset)  # clients test on what they hold back themselves
    if recipe.has_tasks:
        federation = Federation.from_stream(recipe.tasks.stream(dataset, recipe.partition, seed), 1, server)
    else:
        federation = Federation(dataset, recipe.partition.split(dataset.train, dataset.num_classes, seed), server)
    return with_client_test(federation, how) if how else federation


def build_simulation(
    recipe: Recipe,
    method: Method,
    seed: int,
    federation: Federation,
    device: str = "cpu",
    data_dir: str | Path | None = None,
    initial: Weights | None = None,
) -> Simulation:
    """Build the simulation of one trial, before its first round.

    ``federation``: Which client holds which examples.
    ``data_dir``: The folder of local generators and extractors.
    ``initial``: The initial model; by default the network's own initial weights.
    """
    dataset = federation.dataset
    check_federation(recipe, federation, data_dir)
    training = recipe.training_of(method)
    check_label_loss(training, dataset, check_device(device))
    if training.lr_schedule == "cosine" and not training.lr_rounds:  # it lasts as long as the run, or the task
        training = replace(training, lr_rounds=recipe.run.rounds)
    model = resolve_pretrained(recipe.model, data_dir)

    @cache
    def load_generator() -> Generator:
        return recipe.generator.load(dataset.shape[-1], torch.device(device), data_dir)

    sections = {name: getattr(recipe, name) for name in ("run", "augmentation", "defense", "privacy", "attack")}
    return Simulation(
        method.algorithm,
        federation,
        lambda: model.build(dataset.shape, federation.cumulative_classes[0]),
        Settings(training=training, seed=seed, device=check_device(device), **sections),
        load_generator=load_generator,
        client_factories=client_factories(recipe, federation, data_dir),
        initial=initial,
    )


def check_label_loss(training: Training, dataset: DataSet, device: torch.device) -> None:
    """Find the loss of labels that a recipe names, and check class weights."""
    weights = training.class_weights
    if isinstance(weights, tuple) and len(weights) != dataset.num_classes:
        raise ConfigError(
            f"training.class_weights has {len(weights)} numbers, and {dataset.name} {dataset.num_classes} classes: "
            f"{', '.join(dataset.label_names[:12])}. Give one for each, in this order."
        )
    find_loss(training.loss, device)
    if (own := OWN_LOSSES.get(training.loss)) is not None:  # a module may have no truth value
        try:
            own = deepcopy(own)  # it may count its calls
        except Exception:  # it holds what cannot be copied, such as a lock, and is not tried
            return
        labels = dataset.train["label"][: training.batch_size].to(device)
        logits = torch.zeros(len(labels), dataset.num_classes, device=device, requires_grad=True)
        try:
            with seeds.temporary_seed(0):
                own(logits, labels)
        except Exception as error:  # of the user's code
            raise ConfigError(
                f"training.loss = {training.loss!r} raised {type(error).__name__} for {len(labels)} rows of "
                f"{dataset.num_classes} logits: {in_one_line(error, 300)}."
            ) from error


def client_factories(recipe: Recipe, federation: Federation, data_dir: str | Path | None = None) -> dict[str, Factory]:
    """Return the factories of the networks of clients that do not have the server's.

    ``data_dir``: The folder of local extractors.
    Returns: Factories by client. Clients with equal networks share one object.
    """

    def factory(model: Architecture) -> Factory:
        return lambda: model.build(federation.dataset.shape, federation.cumulative_classes[0])

    models = client_architectures(recipe.client_models, federation.clients)
    factories = {model: factory(resolve_pretrained(model, data_dir)) for model in models.values()}
    return {client: factories[model] for client, model in models.items()}


def check_federation(recipe: Recipe, federation: Federation, data_dir: str | Path | None = None) -> None:
    """Check that a federation is what a recipe needs: cohort, inputs, augmentation, generators.

    The cohort's size is known only now for a partition by a column of the data.
    """
    if recipe.run.cohort_size > len(federation.clients):
        raise ConfigError(
            f"a cohort of {recipe.run.cohort_size} cannot be drawn from {len(federation.clients)} clients. "
            f"Set run.cohort_size={len(federation.clients)} or less."
        )
    if recipe.attack.kind != "none" and recipe.attack.share and not recipe.attack.attackers(federation.clients, 0):
        raise ConfigError(
            f"attack.share={recipe.attack.share:g} of {len(federation.clients)} clients is less than one. Raise it, or "
            "set 0 for an honest run."
        )
    dataset = federation.dataset
    for method in recipe.methods:
        check_label_loss(recipe.training_of(method), dataset, torch.device("cpu"))
    for model in recipe.models:
        check_token_ids(model, dataset)
    for method in recipe.methods:
        rotates = method.algorithm.rows_per_class > 1
        needs_images = (rotates and len(dataset.shape) != 3) or {"images", "generator"} & {*method.algorithm.needs}
        if rotates and len(dataset.shape) == 3 and dataset.shape[1] != dataset.shape[2]:
            raise ConfigError(
                f"{method.label} rotates images, which must be square, and those of {dataset.name} are "
                f"{describe_input(dataset.train['input'])}. Leave the method out, or set data.size."
            )
        if needs_images and not dataset.has_images:
            raise ConfigError(
                f"{method.label} needs images, which it rotates or generates, and the inputs of {dataset.name} are "
                f"{describe_input(dataset.train['input'])}. Leave the method out, or choose uint8 images."
            )
    if recipe.augmentation:
        if not dataset.has_images:
            raise ConfigError(
                f"[augmentation] changes images, and the inputs of {dataset.name} are "
                f"{describe_input(dataset.train['input'])}. Leave [augmentation] out."
            )
        recipe.augmentation.check_image_size(*dataset.shape[1:])
    check_generator(recipe, federation, data_dir)


def check_token_ids(model: Architecture, dataset: DataSet) -> None:
    """Check that a network of this package reads token ids if the inputs are token ids, and only then."""
    found = describe_input(dataset.train["input"])
    if isinstance(model, Custom):
        return  # it has been tried when it was built
    if model.reads_token_ids != (dataset.kind == "token ids"):
        needed = "token ids" if model.reads_token_ids else "images or numbers"
        known = ", ".join(name for name, cls in architectures().items() if cls.reads_token_ids)
        advice = f"Use a model for them, such as {known}." if dataset.kind == "token ids" else "Use another model."
        raise ConfigError(f"{model.name} reads {needed}, and the inputs of {dataset.name} are {found}. {advice}")
    if model.reads_token_ids:
        vocabulary: int = getattr(model, "vocabulary", 0)
        largest = max(int(data["input"].max()) for data in (dataset.train, dataset.test))
        if largest >= vocabulary:
            raise ConfigError(
                f"{dataset.name} has token ids up to {largest}, and model.vocabulary is {vocabulary}. Set it to "
                f"{largest + 1}, or to data.vocabulary."
            )


def check_generator(recipe: Recipe, federation: Federation, data_dir: str | Path | None = None) -> None:
    """Check the recipe's generator, if a method needs it.

    ``federation``: The federation, with the images' shape and the classes.
    """
    if _needs_generator(recipe):
        check_installed()
        recipe.generator.check_shape(federation.dataset.shape, data_dir)
        recipe.generator.check_classes(class_names(federation), data_dir)
        recipe.generator.check_sampler(data_dir)


def check_network(model: Architecture, federation: Federation, data_dir: str | Path | None = None) -> nn.Module:
    """Try whether a network can be built.

    ``federation``: The federation, with the inputs' shape and the classes.
    ``data_dir``: The folder of local extractors.
    Returns: The network, without memory for its weights where that is possible.
    """
    shape, classes = federation.dataset.shape, federation.cumulative_classes[0]
    model = resolve_pretrained(model, data_dir)
    if isinstance(model, Custom | Pretrained):  # it is not known whether they can be built without memory
        with seeds.temporary_seed(0), plain_torch():
            network = model.build(shape, classes)
            if isinstance(model, Custom):
                inputs = _trial_examples(federation.dataset)
                try_training(network, inputs, classes, model.name, batch_norm=has_batch_norm(network))
        if isinstance(model, Custom):
            with seeds.temporary_seed(1), plain_torch():
                check_same_function(network, model.build(shape, classes), inputs, model.name)
        return network
    try:
        with torch.device("meta"):
            network = model.build(shape, classes)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ConfigError(
            f"the network {model.name} cannot be built with these options: {in_one_line(error, 200)}. Lower them."
        ) from error
    size = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    if COPIES * size > (memory := _memory()):
        raise ConfigError(
            f"the network {model.name} has {size / 2**30:,.1f} GiB of weights with these options. Training needs "
            f"{COPIES} times that, and this machine has {memory / 2**30:,.1f} GiB of memory. Make its layers smaller."
        )
    return network


def _memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _trial_examples(dataset: DataSet) -> Tensor:
    """Return two examples as a network gets them; of token ids, one with the largest."""
    inputs = dataset.train["input"] if len(dataset.train["input"]) else dataset.test["input"]
    if not len(inputs):
        return dataset.normalise(torch.zeros(2, *dataset.shape, dtype=inputs.dtype))
    first = int(inputs.flatten(1).amax(1).argmax()) if inputs.dtype == torch.int64 else 0
    return dataset.normalise(inputs[[first, len(inputs) - 1]]).cpu()


def untrained_classes(federation: Federation) -> tuple[str, ...]:
    """Return the names of the classes that the test set has and no client of the federation.

    Returns: The names, in the order of the classes; mostly none.
    """
    dataset = federation.dataset if federation.stream is None else federation.stream.dataset
    trained = torch.zeros(dataset.num_classes, dtype=torch.bool)
    for partition in federation.partitions:
        trained[dataset.train["label"].cpu()[partition.rows]] = True
    tested = dataset.test["label"].cpu().bincount(minlength=dataset.num_classes) > 0
    return tuple(name for name in class_names(federation) if (tested & ~trained)[dataset.label_names.index(name)])


def class_names(federation: Federation) -> tuple[str, ...]:
    """Return the names of a run's classes.

    Returns: The names of the classes of all tasks, in the order in which they arrive.
    """
    return federation.dataset.label_names[: federation.for_task(federation.num_tasks).cumulative_classes[-1]]


def check_device(name: str) -> torch.device:
    """Return a device by name.

    ``name``: ``cpu``, ``cuda`` or such as ``cuda:1``.
    """
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):  # others lack float64 or generators with a state
            raise RuntimeError(f"devices of type {device.type} are not supported")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        available = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        raise ConfigError(f"cannot use device {name!r} here. This machine offers: {', '.join(available)}.") from error
    return device
