"""A recipe: everything that determines an experiment, as a value; with the networks of server and clients."""

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from fedkeep._utils.type_hints import annotations_of
from fedkeep.aggregation.robust import max_byzantine
from fedkeep.data import Augmentation, DataOptions, Tasks
from fedkeep.data.catalog import local_paths
from fedkeep.data.combine import shared_classes
from fedkeep.data.partition import IID, Scheme, get_scheme
from fedkeep.data.server_data import Auxiliary, Public
from fedkeep.errors import ConfigError, RunError, refuse
from fedkeep.generation.generator_config import GeneratorConfig
from fedkeep.interface import Algorithm, Training, algorithms, get_algorithm
from fedkeep.interface.algorithm import returns_model
from fedkeep.interface.method_checks import check_method
from fedkeep.interface.privacy import Privacy
from fedkeep.models import Architecture, get_architecture
from fedkeep.models.custom import from_path
from fedkeep.models.pretrained import Pretrained
from fedkeep.options import NO_OPTION, Options, as_table, build, build_kind, check_values, option, options_of
from fedkeep.rounds.run_settings import AVERAGE_SUFFIX, MIN_FOR_MEDIAN, ON_EXAMPLES, Attack, Defense, RunSettings
from fedkeep.tracking import check_log
from fedkeep.training.pooled import PooledTraining
from fedkeep.trust.robust_aggregation import KRUM

Row = TypeVar("Row")

MAX_SLUG_LENGTH = 200
"""The longest folder name of a label, in characters: file systems allow 255 bytes, and the seed is appended."""

PAPER_METRICS = ("accuracy", "forgetting", "local_accuracy", "rounds_to", "speedup")
"""The metrics of which a recipe may contain a paper's numbers."""

MAX_RANGE = 1_000_000
"""The most clients in a range such as ``"3-7"``; a larger range is taken as one client's name."""


INITIAL_MODEL = ("weights", "pretraining")
"""What of ``[model]`` says from which model rounds begin, whatever the network."""
NETWORK = ("name", get_architecture)
"""Under which name a table of a recipe says the network, and what finds it."""


@dataclass(frozen=True)
class ClientModel(Options):
    """A network that some clients have instead of the server's."""

    clients: tuple[str, ...] = option(MISSING, 'a list of names such as ["0", "1-4"], where 1-4 stands for 1, 2, 3, 4')
    model: Architecture = option(MISSING, "the clients' network, such as lenet5", at="", kind=NETWORK)

    def check(self) -> None:
        if not self.clients:
            raise ConfigError('it needs clients: a list of names such as ["0", "1-4"].')


def model_to_table(model: Architecture) -> dict[str, Any]:
    """Return the table of a network in a recipe, as TOML can represent it."""
    return {"name": model.name, **as_table(model)}


def read_model(table: Mapping[str, Any], where: str, allow_code: bool) -> Architecture:
    """Return the network that a table describes.

    ``allow_code``: Let the name be ``package.module:function``, which is then imported.
    """
    return build_kind(options_of(Recipe)["model"], Architecture, with_own_model(table, allow_code), where)  # type: ignore[type-abstract]


def with_own_model(table: Mapping[str, Any], allow_code: bool, model: Architecture | None = None) -> dict[str, Any]:
    """Return the table of a network whose name is the network itself, if one is given, or the name is of the user's."""
    if model is not None:
        return {name: value for name, value in table.items() if name in INITIAL_MODEL} | {"name": model}
    name = table.get("name")
    own = isinstance(name, str) and ":" in name
    return {**table, "name": from_path(str(name), allow_code=allow_code) if own else name}


def client_architectures(models: Sequence[ClientModel], clients: Container[str]) -> dict[str, Architecture]:
    """Return by client the networks of those that do not have the server's."""
    own = {name: model.model for model in models for name in _names(model, clients)}
    if (unknown := next((name for name in own if name not in clients), None)) is not None:
        raise ConfigError(f"[[client_models]] names {unknown!r}, which is no client of this federation.")
    return own


def resolve_pretrained(model: Architecture, data_dir: str | Path | None) -> Architecture:
    """Return a network with the path of its pre-trained extractor, which may be a folder in the data folder.

    ``model``: The network; one without a pre-trained extractor is returned as it is.
    """
    return model.located(local_paths(model.source, data_dir)) if isinstance(model, Pretrained) else model


def pretrained_models(
    model: Architecture, clients: Sequence[ClientModel], data_dir: str | Path | None
) -> dict[str, Pretrained]:
    """Return the networks with a frozen pre-trained extractor.

    Returns: Networks by owner: ``""`` for the server, otherwise such as ``"clients 1-2"``.
    """
    models = {"": model} | {f"clients {', '.join(own.clients)}": own.model for own in clients}
    resolved = {owner: resolve_pretrained(network, data_dir) for owner, network in models.items()}
    return {owner: network for owner, network in resolved.items() if isinstance(network, Pretrained)}


def describe_extractor(model: Pretrained, label_names: Sequence[str]) -> str:
    """Describe a frozen extractor, and how many of a run's classes it has learned, judged by their names."""
    if not model.learned:
        return f"{model.about}; whether it learned classes of this run is not known"
    common = len(shared_classes(label_names, model.learned))
    return f"{model.about}; by their names it learned {common or 'none'} of this run's {len(label_names)} classes"


def select_client(models: Sequence[ClientModel], client: str) -> tuple[ClientModel, ...]:
    """Return the network of one client.

    Returns: Its network, or nothing for a client with the server's.
    """
    return tuple(ClientModel((client,), model.model) for model in models if client in _names(model, (client,)))


def _names(model: ClientModel, clients: Container[str]) -> list[str]:
    """Return the names of all clients, with ranges expanded; a client may itself be called "3-7"."""
    names: list[str] = []
    for name in model.clients:
        first, dash, last = name.partition("-")
        is_range = name not in clients and dash and first.isdecimal() and last.isdecimal()
        if is_range and 0 <= int(last) - int(first) < MAX_RANGE:
            names += map(str, range(int(first), int(last) + 1))
        else:
            names.append(name)
    return names


@dataclass(frozen=True)
class Method(Options):
    """A method as one row of a comparison."""

    label: str = option(MISSING, "its name in tables; empty: the method's title")
    algorithm: Algorithm[Any, Any] = option(
        MISSING, "a method, as fedkeep methods lists them", at="", kind=("algorithm", get_algorithm)
    )
    grid_of: str = option("", "of a point of a grid, the label of the method whose grid it is", brief=True)
    training: Mapping[str, Any] = option(dict, "options of local training that differ from the recipe's", brief=True)

    def check(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", default_label(type(self.algorithm)))
        if (name := self.algorithm.name()) in SECTIONS:
            raise ConfigError(f"a method cannot be called {name!r}, like a section of recipes. Give its class a title.")
        check_values(Training, self.training, f"training of {self.label}")

    @property
    def slug(self) -> str:
        """The label as a folder name."""
        return slug(self.label)


def slug(label: str) -> str:
    """Return a label as a folder name: its Latin letters and digits, or a hash of labels without any."""
    name = re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.")
    if name and len(name) <= MAX_SLUG_LENGTH:
        return name
    suffix = sha256(label.encode()).hexdigest()[:8]
    return f"{name[: MAX_SLUG_LENGTH - 9] or 'method'}-{suffix}"


@dataclass(frozen=True, kw_only=True)
class Recipe(Options):
    """Everything that determines a run's results, apart from the machine.

    ``name``: The name or path under which it was loaded.
    """

    name: str = field(metadata=NO_OPTION)
    title: str = option("", "one line that describes it", at="title")
    seeds: tuple[int, ...] = option((0,), "each method is run once with each seed", low=0, at="seeds")
    log: tuple[str, ...] = option((), "where metrics are logged too: tensorboard, wandb", at="log", brief=True)
    data: str = option(MISSING, "a known data set, a Hub id or a path", at="data.name")
    validation: float = option(
        0.0,
        "share of each class's training images that no client holds, and that replaces the test images, so that "
        "options can be chosen",
        low=0.0, high=0.5, at="data.validation", brief=True,
    )  # fmt: skip
    data_options: DataOptions = option(DataOptions, "how files are read", at="data", brief=True)
    partition: Scheme = option(IID(), "how examples are split over the clients", kind=("scheme", get_scheme))
    model: Architecture = option(MISSING, "the server's network, such as lenet5", kind=NETWORK)
    weights: str = option("", "path of weights from which the rounds begin", at="model.weights", brief=True)
    pretraining: PooledTraining = option(
        PooledTraining, "pooled training from which the rounds begin", at="model.pretraining", brief=True
    )
    training: Training = option(Training, "local training")
    run: RunSettings = option(RunSettings, "rounds, cohorts and evaluation")
    augmentation: Augmentation = option(Augmentation, "how training images are augmented")
    auxiliary: Auxiliary = option(Auxiliary, "labelled examples that the server holds")
    public: Public = option(Public, "the public data set that the server holds")
    generator: GeneratorConfig = option(GeneratorConfig, "the generator of images")
    defense: Defense = option(Defense, "checks of clients' replies, and robust aggregation")
    privacy: Privacy = option(Privacy, "what is noised before it leaves a client")
    methods: tuple[Method, ...] = option((), "compared on the same partitions, initial weights, cohorts and batches")
    attack: Attack = option(Attack, "what malicious clients do, in tests of defences", brief=True)
    tasks: Tasks = option(Tasks, "how classes arrive in tasks", brief=True)
    client_models: tuple[ClientModel, ...] = option((), "clients with other networks than the server's", brief=True)
    paper: Mapping[str, Any] = option(dict, "the numbers that a paper printed", brief=True)

    def check(self) -> None:
        check_log(self.log)
        refuse([*_problems_of_parts(self), *_problems_together(self)])

    @property
    def models(self) -> tuple[Architecture, ...]:
        """The server's network, then those that clients have instead."""
        return self.model, *(client.model for client in self.client_models)

    @property
    def has_tasks(self) -> bool:
        """Whether classes arrive in tasks; otherwise all classes are there from the start."""
        return self.tasks != Tasks()

    @property
    def rounds(self) -> int:
        """The number of rounds, over all tasks."""
        return self.run.rounds * self.tasks.num_tasks

    def method(self, label: str) -> Method:
        """Return the method with a label."""
        for method in self.methods:
            if method.label == label:
                return method
        raise RunError(f"recipe {self.name!r} has no method {label!r} any more. Leave its recipe.toml as it was.")

    def training_of(self, method: Method) -> Training:
        """Return a method's local training: the recipe's, with what the method's class and then its entry change."""
        changes = {**method.algorithm.training_options, **method.training}
        where = f"training of {method.label}"
        return build(Training, as_table(self.training) | changes, where) if changes else self.training

    def to_toml(self) -> str:
        """Return the recipe as TOML with all options, as `load_recipe` reads it."""
        return tomli_w.dumps(as_table(self))


OPTIONS: Mapping[str, type[Options]] = {
    name: annotations_of(Recipe)[name]
    for name, field in options_of(Recipe).items()
    if field.default_factory is annotations_of(Recipe)[name] and field.metadata["at"] is None
}
"""The class of each section's options. The options of data, partition and model depend on a name in the section."""

SECTIONS = ("data", "partition", "model", *OPTIONS)
"""The sections of a recipe."""


def rows_named(wanted: str, rows: Sequence[Row], names: Callable[[Row], Iterable[str]]) -> list[Row]:
    """Return the rows that have a name: exactly as it is written, or else in upper and lower case.

    So ``FedSeq`` is the row with this label, and ``fedseq``, the name of a method, is each row of that method.
    """
    exact = [row for row in rows if wanted in names(row)]
    return exact or [row for row in rows if wanted.lower() in (name.lower() for name in names(row))]


def select_methods(
    recipe: Recipe, methods: Iterable[Algorithm[Any, Any] | type[Algorithm[Any, Any]] | str]
) -> tuple[Method, ...]:
    """Return the methods that a recipe shall run instead of its own.

    ``methods``: The methods: with their options; as classes, with default options; or by name or label, with the
        options that the recipe gives them.
    """
    chosen: list[Method] = []
    for wanted in methods:
        for found in _find_methods(recipe, wanted):
            taken = sum(m.label == found.label or m.label.startswith(f"{found.label} ") for m in chosen)
            chosen.append(replace(found, label=f"{found.label} {taken + 1}") if taken else found)
    return tuple(chosen)


def default_label(method: type[Algorithm]) -> str:
    """Return the label of a method that a recipe gives none."""
    return method.title or method.__name__


def _find_methods(recipe: Recipe, wanted: Any) -> list[Method]:
    if isinstance(wanted, str):
        if listed := rows_named(wanted, recipe.methods, lambda m: (m.label, m.algorithm.name())):
            return listed
        wanted = get_algorithm(wanted)
    if isinstance(wanted, type) and issubclass(wanted, Algorithm):
        check_method(wanted)
        wanted = wanted()
    if isinstance(wanted, Method):
        return [wanted]
    if not isinstance(wanted, Algorithm):
        raise ConfigError(
            f"methods must be methods such as [fedkeep.FedSeq(), fedkeep.SFedKD(teachers=3)] or their names, such as "
            f"['fedseq'], not {wanted!r:.80}."
        )
    check_method(type(wanted))
    return [Method(default_label(type(wanted)), wanted)]


def _problems_of_parts(recipe: Recipe) -> Iterator[str]:
    """Yield what is wrong with single parts of a recipe."""
    seeds, named = recipe.seeds, Counter(name for model in recipe.client_models for name in _names(model, ()))
    if not seeds:
        yield "seeds must be a list of integers from 0 on, such as [0, 1, 2], not []."
    elif len(set(seeds)) < len(seeds):
        yield f"seeds {list(seeds)} name one twice. Each seed is run only once."
    for twice in [name for name, count in named.items() if count > 1][:1]:
        yield f"[[client_models]] gives client {twice!r} two networks. Name it once."
    for name in PAPER_METRICS:
        numbers = recipe.paper.get(name, {})
        if not isinstance(numbers, Mapping) or not all(map(_is_mean_and_std, numbers.values())):
            yield (
                f"[paper.{name}] must give methods their mean, and their standard deviation if there is one, such as "
                f"FedAvg = [46.2] or FedAvg = [46.2, 0.8], not {numbers!r}."
            )
    if not recipe.methods:
        yield f"there is no method to run. Add [[methods]] with algorithm = one of: {', '.join(algorithms())}."
    taken: dict[str, str] = {}
    for method in recipe.methods:
        if (other := taken.get(method.slug)) is not None:
            same = "" if other == method.label else f" and {other!r}, which would share the folder {method.slug!r}"
            yield f"two methods are labelled {method.label!r}{same}. Give each its own label."
        taken[method.slug] = method.label
    labels = {method.label for method in recipe.methods}
    for label, suffix in product(labels, filter(None, AVERAGE_SUFFIX.values())):
        if f"{label}{suffix}" in labels:
            yield f"a method is labelled {f'{label}{suffix}'!r}, as an average of {label!r} is. Give it another label."


def _is_mean_and_std(value: Any) -> bool:
    is_short = isinstance(value, list | tuple) and len(value) in (1, 2)
    return is_short and all(type(each) in (int, float) for each in value)


def _problems_together(recipe: Recipe) -> Iterator[str]:
    """Yield which parts of a recipe contradict each other, and what a method needs and the recipe lacks."""
    run, clients, on_server = recipe.run, recipe.partition.num_clients, recipe.auxiliary.images_per_class
    if clients and run.cohort_size > clients:
        few = f"Set run.cohort_size={clients} or less."
        yield f"a cohort of {run.cohort_size} cannot be drawn from {clients} clients. {few}"
    if run.min_clients > run.cohort_size:
        yield f"run.min_clients {run.min_clients} exceeds run.cohort_size {run.cohort_size}."
    if recipe.has_tasks and on_server:
        yield "an auxiliary set would show the server classes before they arrive. Leave out [auxiliary] or [tasks]."
    if on_server and recipe.public.name:
        yield "the server has one set of its own. Leave out [auxiliary] or [public]."
    if isinstance(run.client_test, float) and run.client_test and recipe.validation:
        yield (
            f"data.validation={recipe.validation:g} would choose options on examples that clients hold back for the "
            f"test (run.client_test={run.client_test:g}). Mark test rows in the data (data.split), and set "
            "run.client_test=own."
        )
    if recipe.defense.loss_check == "server" and not on_server:
        yield ('defense.loss_check = "server" needs examples on the server: auxiliary.images_per_class=8.')
    begun = "model.weights" if recipe.weights else "model.pretraining" if recipe.pretraining.passes else ""
    if recipe.weights and recipe.pretraining.passes:
        yield "rounds begin from one model. Leave out model.weights or model.pretraining."
    if begun and recipe.client_models:
        yield (
            f"{begun} makes the initial model of one network, and [[client_models]] gives clients others. Leave one of "
            "the two out."
        )
    trainings = [recipe.training, *map(recipe.training_of, recipe.methods)]
    if recipe.privacy.noise_multiplier and any(one.class_weights != "none" for one in trainings):
        yield (
            "training.class_weights divide by the weights of a batch, and DP-SGD (privacy.noise_multiplier) takes each "
            "example alone. Give a training.loss that weighs classes, or leave one of the two out."
        )
    if recipe.privacy.noise_multiplier and any(one.max_grad_norm is not None for one in trainings):
        yield (
            "training.max_grad_norm clips the gradient of a batch, and DP-SGD (privacy.noise_multiplier) clips that of "
            "each example. Set privacy.max_grad_norm instead."
        )
    if recipe.has_tasks and any(isinstance(one.class_weights, tuple) for one in trainings):
        yield (
            "training.class_weights are in the order of the classes' names, and with [tasks] classes arrive in another "
            "one. Set training.class_weights=balanced."
        )
    noised = [name for name in PROMISES if getattr(recipe.privacy, name)]
    if recipe.pretraining.passes and noised:
        yield (
            f"model.pretraining trains on all clients' examples in one place, without noise, and privacy.{noised[0]} "
            "promises that they stay apart. Leave one of the two out, or begin from public weights (model.weights)."
        )
    if recipe.auxiliary.images_per_class and recipe.auxiliary.source == "train_shared" and noised:
        yield (
            f"auxiliary.source=train_shared gives the server clients' examples, and privacy.{noised[0]} promises that "
            "they stay apart. Leave one of the two out, or take train_holdout."
        )
    for method in recipe.methods:
        yield from _problems_of_method(recipe, method)


PROMISES = (
    "noise_multiplier",
    "client_noise_multiplier",
    "counts_epsilon",
    "prototypes_noise_multiplier",
    "secure_aggregation",
)
"""The options of privacy that pooled training would break."""


NEEDS = {
    "images": "",  # what the inputs are is known when the data are loaded
    "sgd": "",
    "auxiliary": "an auxiliary set on the server, and there is none. Give it one: auxiliary.images_per_class=32.",
    "public": "a public set, on whose images clients share their predictions. Name a data set with images of the same "
    "size: public.name=fashion-mnist.",
    "generator": "a generator of images. Train one with fedkeep generator train, and name its folder: "
    "generator.name=FOLDER.",
}
"""What a method may need, and what is said if a recipe does not give it."""


def _problems_of_method(recipe: Recipe, method: Method) -> Iterator[str]:
    """Yield what a method needs and the recipe lacks, and what it cannot run with."""
    label, needs, training = method.label, method.algorithm.needs, recipe.training_of(method)
    attack, own_loss = recipe.attack.kind, method.algorithm.reason_against_label_loss
    given = training.loss != "cross-entropy" or training.class_weights != "none"
    if given and own_loss:
        yield (f"{label} takes no training.loss or training.class_weights: {own_loss}. Leave the method or them out.")
    if not returns_model(type(method.algorithm)):
        if recipe.defense.robust_aggregation != "mean" and not method.algorithm.sequential:
            yield (
                f"{label} averages no models, so that defense.robust_aggregation cannot make it robust. Leave it out "
                "of this comparison, or set defense.robust_aggregation=mean."
            )
        if attack not in ("none", "silent", *ON_EXAMPLES):
            yield (
                f"{label}'s clients return no models, so that attack.kind={attack} would change nothing. Leave it out "
                f"of this comparison, or set attack.kind to silent, {' or '.join(ON_EXAMPLES)}."
            )
    if training.lr_schedule == "cosine" and training.lr_min > training.lr:
        low, lr = training.lr_min, training.lr
        yield f"{label}: training.lr_min = {low:g} is above training.lr = {lr:g}, from which it falls."
    if training.optimizer != "sgd" and ("sgd" in needs or recipe.privacy.noise_multiplier):
        who = label if "sgd" in needs else "DP-SGD (privacy.noise_multiplier)"
        yield f"{who} is defined for steps of SGD, not of {training.optimizer}. Set training.optimizer=sgd."
    of_recipe = (recipe.auxiliary.images_per_class, recipe.public.name, recipe.generator.name)
    lacking = [need for need, found in zip(("auxiliary", "public", "generator"), of_recipe, strict=True) if not found]
    for need in needs:
        if need not in NEEDS:
            yield f"{label} needs {need}, which no recipe can give."
        elif need in lacking:
            yield f"{label} needs {NEEDS[need]}"
    if recipe.client_models and method.algorithm.networks == "one":
        yield (
            f"{label} exchanges weights, which clients of other networks cannot use. Leave out [[client_models]], or "
            "compare methods that exchange predictions."
        )


def check_robust_aggregation(recipe: Recipe) -> None:
    """Check that a cohort is large enough for robust aggregation, if a method asks a cohort.

    A recipe itself may have less: that of a site is one client's.
    """
    refuse(_problems_of_robust_aggregation(recipe))


def _problems_of_robust_aggregation(recipe: Recipe) -> Iterator[str]:
    rule, size, malicious = recipe.defense.robust_aggregation, recipe.run.cohort_size, 0
    if rule == "mean" or all(method.algorithm.sequential for method in recipe.methods):
        return
    if size < MIN_FOR_MEDIAN:
        yield (
            f"defense.robust_aggregation={rule} needs {MIN_FOR_MEDIAN} models or more to tell what is usual, and a "
            f"cohort of {size} has fewer. Set run.cohort_size={MIN_FOR_MEDIAN} or more."
        )
    malicious = recipe.defense.num_byzantine(size)
    if rule in KRUM and malicious > max_byzantine(size):
        yield (
            f"defense.robust_aggregation={rule} is defined for f malicious of n clients if 2 f + 2 < n (Blanchard et "
            f"al., 2017), and not for f = {malicious} of n = {size}. Raise run.cohort_size, or lower "
            f"defense.byzantine, which is {recipe.defense.byzantine:g}."
        )
