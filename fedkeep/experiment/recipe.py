"""A recipe: everything that determines an experiment, as a value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import tomli_w

from fedkeep.aggregation.robust import max_byzantine
from fedkeep.data import Augmentation, Tasks
from fedkeep.data.data_options import DataOptions
from fedkeep.data.partition import Scheme
from fedkeep.data.server_data import Auxiliary, Public
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.model_config import ClientModel, check_clients, model_to_table
from fedkeep.experiment.overrides import rows_named
from fedkeep.generation.diffusion.generator_config import GeneratorConfig
from fedkeep.interface import Algorithm, Training, algorithms, get_algorithm
from fedkeep.interface.algorithm import returns_model
from fedkeep.interface.method_checks import check_method
from fedkeep.interface.privacy import Privacy
from fedkeep.models import Architecture
from fedkeep.options import as_table, build
from fedkeep.rounds.attack_options import ON_EXAMPLES, Attack
from fedkeep.rounds.defense import MIN_FOR_MEDIAN, Defense
from fedkeep.rounds.run_settings import RunSettings
from fedkeep.tracking.tracker import check_log
from fedkeep.training.pooled import PooledTraining
from fedkeep.trust.robust import KRUM

MAX_SLUG_LENGTH = 200
"""The longest folder name of a label, in characters: file systems allow 255 bytes, and the seed is appended."""

PAPER_METRICS = ("accuracy", "forgetting", "local_accuracy", "rounds_to", "speedup")
"""The metrics of which a recipe may contain a paper's numbers."""


@dataclass(frozen=True)
class Method:
    """A method as one row of a comparison.

    ``label``: Its name in tables.
    ``algorithm``: The method with its options.
    ``grid_of``: For a point of a grid of options, the label of the method whose grid it is; otherwise empty.
    ``training``: Options of local training that differ from the recipe's.
    """

    label: str
    algorithm: Algorithm[Any, Any]
    grid_of: str = ""
    training: Mapping[str, Any] = field(default_factory=dict, hash=False)

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


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run's results, apart from the machine.

    ``name``: The name or path under which it was loaded.
    ``title``: One line that describes it.
    ``data``: A known data set, a Hub id or a path (see `fedkeep.data.load`).
    ``data_options``: How files are read that are not known by name: columns, sizes, scaling.
    ``partition``: How examples are split over the clients.
    ``model``: The server's network, and that of every client without an entry in ``client_models``.
    ``training``: The options of local training.
    ``run``: Rounds, cohorts and evaluation.
    ``methods``: The methods, which are compared on the same partitions, initial weights, cohorts and batch orders.
    ``seeds``: Each method is run once with each seed.
    ``augmentation``: The augmentation of training images.
    ``auxiliary``: The part of the training examples that the server holds.
    ``public``: The public data set that the server holds.
    ``generator``: The generator of images.
    ``tasks``: How classes arrive in tasks.
    ``defense``: Checks of clients' replies, and robust aggregation.
    ``privacy``: What is noised before it leaves a client.
    ``attack``: What malicious clients do, in tests of defences.
    ``client_models``: Clients with other networks than the server's.
    ``paper``: The numbers that a paper printed, if this is a paper's experiment.
    ``log``: Where metrics are logged too: ``csv``, ``tensorboard``, ``wandb``, ``mlflow`` (see `fedkeep.tracking`).
    ``validation``: The share of each class's training images that no client holds and that replaces the test images, so
        that options can be chosen; 0: evaluate on the test images.
    ``weights``: The path of weights from which the rounds begin (``model.weights``); empty for the network's own.
    ``pretraining``: Pooled training before the first round, from which the rounds then begin (``model.pretraining``).
    """

    name: str
    title: str
    data: str
    partition: Scheme
    model: Architecture
    training: Training
    run: RunSettings
    methods: tuple[Method, ...]
    seeds: tuple[int, ...] = (0,)
    augmentation: Augmentation = field(default_factory=Augmentation)
    auxiliary: Auxiliary = field(default_factory=Auxiliary)
    public: Public = field(default_factory=Public)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    tasks: Tasks = field(default_factory=Tasks)
    defense: Defense = field(default_factory=Defense)
    privacy: Privacy = field(default_factory=Privacy)
    attack: Attack = field(default_factory=Attack)
    client_models: tuple[ClientModel, ...] = ()
    paper: Mapping[str, Any] = field(default_factory=dict)
    validation: float = 0.0
    data_options: DataOptions = field(default_factory=DataOptions)
    log: tuple[str, ...] = ()
    weights: str = ""
    pretraining: PooledTraining = field(default_factory=PooledTraining)

    def __post_init__(self) -> None:
        if isinstance(self.log, str):
            object.__setattr__(self, "log", (self.log,))
        for name in ("seeds", "methods", "client_models", "log"):
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))
        _validate(self)

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
        raise RunError(
            f"recipe {self.name!r} has no method {label!r} any more. Do not change its recipe.toml during a run."
        )

    def training_of(self, method: Method) -> Training:
        """Return the settings of local training of a method.

        Returns: The recipe's, with what the method's class and then its entry change.
        """
        changes = {**method.algorithm.training_options, **method.training}
        where = f"training of {method.label}"
        return build(Training, as_table(self.training) | changes, where) if changes else self.training

    def to_toml(self) -> str:
        """Return the recipe as TOML with all options, as `load_recipe` reads it.

        Returns: The content of a .toml file.
        """
        table: dict[str, Any] = {
            "title": self.title,
            "seeds": list(self.seeds),
            "data": self._data_table(),
            "partition": {"scheme": self.partition.name, **as_table(self.partition)},
            "model": self._model_table(),
            "training": as_table(self.training),
            "run": as_table(self.run),
            "augmentation": as_table(self.augmentation),
            "auxiliary": as_table(self.auxiliary),
            "public": as_table(self.public),
            "generator": as_table(self.generator),
            "defense": as_table(self.defense),
            "privacy": as_table(self.privacy),
            "methods": [
                {"label": m.label, "algorithm": m.algorithm.name()}
                | ({"grid_of": m.grid_of} if m.grid_of else {})
                | ({"training": dict(m.training)} if m.training else {})
                | as_table(m.algorithm)
                for m in self.methods
            ],
        }
        if self.attack.kind != "none":
            table["attack"] = as_table(self.attack)
        if self.has_tasks:
            table["tasks"] = as_table(self.tasks)
        if self.client_models:
            table["client_models"] = [model.to_table() for model in self.client_models]
        if self.log:
            table["log"] = list(self.log)
        if self.paper:
            table["paper"] = dict(self.paper)
        return tomli_w.dumps(table)

    def _model_table(self) -> dict[str, Any]:
        """Return the section ``[model]``, with the initial model if the recipe gives one."""
        given = {"weights": self.weights} if self.weights else {}
        pooled = {"pretraining": as_table(self.pretraining)} if self.pretraining.passes else {}
        return model_to_table(self.model) | given | pooled

    def _data_table(self) -> dict[str, Any]:
        """Return the section ``[data]``, with those options that are not as they come."""
        defaults = as_table(DataOptions())
        options = {name: value for name, value in as_table(self.data_options).items() if value != defaults[name]}
        return {"name": self.data} | ({"validation": self.validation} if self.validation else {}) | options


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
        listed = rows_named(wanted, recipe.methods, lambda m: (m.label, m.algorithm.name()))
        if listed:
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


def _validate(recipe: Recipe) -> None:
    """Raise `ConfigError` if parts of a recipe contradict each other, or a method lacks something that it needs."""
    _check_seeds(recipe.seeds)
    check_validation(recipe.validation)
    check_log(recipe.log)
    _check_methods(recipe.methods)
    _check_sizes(recipe)
    _check_server(recipe)
    _check_defense(recipe)
    _check_attack(recipe)
    _check_paper(recipe.paper)
    check_clients(recipe.client_models)
    _check_initial_model(recipe)
    for method in recipe.methods:
        _check_needs(recipe, method)


def _check_seeds(seeds: Any) -> None:
    given = list(seeds) if isinstance(seeds, tuple) else seeds
    if not isinstance(given, list) or not given or not all(type(seed) is int and seed >= 0 for seed in given):
        raise ConfigError(f"seeds must be a list of integers from 0 on, such as [0, 1, 2], not {given!r}.")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds {given} name one twice. Each seed is run only once.")


def check_validation(share: Any) -> None:
    """Check ``data.validation``."""
    if type(share) not in (int, float) or not 0 <= share <= 0.5:
        raise ConfigError(f"data.validation is a share of the training images, 0 (none) to 0.5, not {share!r}.")


def _check_methods(methods: tuple[Method, ...]) -> None:
    if not methods:
        raise ConfigError(
            f"there is no method to run. Add [[methods]] with algorithm = one of: {', '.join(algorithms())}."
        )
    taken: dict[str, str] = {}
    for method in methods:
        if not hasattr(method, "slug"):
            raise ConfigError(
                f"methods of a recipe have labels, which {method!r} has not. Give method objects to fedkeep.run."
            )
        if (other := taken.get(method.slug)) is not None:
            same = "" if other == method.label else f" and {other!r}, which would share the folder {method.slug!r}"
            raise ConfigError(f"two methods are labelled {method.label!r}{same}. Give each its own label.")
        taken[method.slug] = method.label


def _check_sizes(recipe: Recipe) -> None:
    clients, run = recipe.partition.num_clients, recipe.run
    if clients and run.cohort_size > clients:
        raise ConfigError(
            f"a cohort of {run.cohort_size} cannot be drawn from {clients} clients. Change run.cohort_size."
        )
    if run.min_clients > run.cohort_size:
        raise ConfigError(f"run.min_clients {run.min_clients} exceeds run.cohort_size {run.cohort_size}.")
    generators = recipe.generator.by_task
    if generators and len(generators) != recipe.tasks.num_tasks:
        raise ConfigError(
            f"generator.by_task names {len(generators)} generators for {recipe.tasks.num_tasks} tasks. Name one for "
            "each "
            "task."
        )


def _check_server(recipe: Recipe) -> None:
    """Check the examples that the server holds."""
    if recipe.has_tasks and recipe.auxiliary.images_per_class:
        raise ConfigError(
            "an auxiliary set would show the server classes before they arrive. Leave out [auxiliary] or [tasks]."
        )
    if recipe.auxiliary.images_per_class and recipe.public.name:
        raise ConfigError("the server has one set of its own. Leave out [auxiliary] or [public].")


def _check_defense(recipe: Recipe) -> None:
    """Check that somebody can measure losses, and that there are models to aggregate."""
    if recipe.defense.loss_check == "server" and not recipe.auxiliary.images_per_class:
        raise ConfigError(
            'defense.loss_check = "server" needs examples on the server: auxiliary.images_per_class=8. Without '
            "any, clients can check each other: defense.loss_check=clients."
        )
    if recipe.defense.robust_aggregation != "mean":
        for method in recipe.methods:
            if not method.algorithm.sequential and not returns_model(type(method.algorithm)):
                raise ConfigError(
                    f"{method.label} averages no models, so that defense.robust_aggregation cannot make it robust. "
                    "Leave it out of this comparison, or set defense.robust_aggregation=mean."
                )


def _check_attack(recipe: Recipe) -> None:
    """Check that an attack on the models that clients return has models to change."""
    kind = recipe.attack.kind
    if kind in ("none", "silent", *ON_EXAMPLES):
        return
    for method in recipe.methods:
        if not returns_model(type(method.algorithm)):
            raise ConfigError(
                f"{method.label}'s clients return no models, so that attack.kind={kind} would change nothing. Leave it "
                f"out of this comparison, or set attack.kind to silent, {' or '.join(ON_EXAMPLES)}."
            )


def check_robust_aggregation(recipe: Recipe) -> None:
    """Check that a cohort is large enough for robust aggregation, if a method asks a cohort.

    A recipe itself may have less: that of a site is one client's.
    """
    defense, size = recipe.defense, recipe.run.cohort_size
    if defense.robust_aggregation == "mean" or all(method.algorithm.sequential for method in recipe.methods):
        return
    if size < MIN_FOR_MEDIAN:
        raise ConfigError(
            f"defense.robust_aggregation={defense.robust_aggregation} needs {MIN_FOR_MEDIAN} models or more to tell "
            f"what is usual, and a cohort of {size} has fewer. Set run.cohort_size={MIN_FOR_MEDIAN} or more."
        )
    malicious = defense.num_byzantine(size)
    if defense.robust_aggregation in KRUM and malicious > max_byzantine(size):
        raise ConfigError(
            f"defense.robust_aggregation={defense.robust_aggregation} is defined for f malicious of n clients if "
            f"2 f + 2 < n (Blanchard et al., 2017), and not for f = {malicious} of n = {size}. Raise run.cohort_size, "
            f"or lower defense.byzantine, which is {defense.byzantine:g}."
        )


def _check_initial_model(recipe: Recipe) -> None:
    """Check that a given initial model can be where all parties begin, and that pooling is no broken promise."""
    name = "model.weights" if recipe.weights else "model.pretraining"
    if recipe.weights and recipe.pretraining.passes:
        raise ConfigError("rounds begin from one model. Leave out model.weights or model.pretraining.")
    if (recipe.weights or recipe.pretraining.passes) and recipe.client_models:
        raise ConfigError(
            f"{name} makes the initial model of one network, and [[client_models]] gives clients others. Leave one of "
            "the two out."
        )
    noised = [
        option
        for option in ("noise_multiplier", "client_noise_multiplier", "counts_epsilon", "prototypes_noise_multiplier")
        if getattr(recipe.privacy, option)
    ]
    noised += ["secure_aggregation"] * recipe.privacy.secure_aggregation
    if recipe.pretraining.passes and noised:
        raise ConfigError(
            f"model.pretraining trains on all clients' examples in one place, without noise, and privacy.{noised[0]} "
            "promises that they stay apart. Leave one of the two out, or begin from public weights (model.weights)."
        )


def _check_paper(paper: Mapping[str, Any]) -> None:
    for name in PAPER_METRICS:
        numbers = paper.get(name, {})
        if not isinstance(numbers, Mapping) or not all(map(_is_mean_and_std, numbers.values())):
            raise ConfigError(
                f"[paper.{name}] must give methods their mean, and their standard deviation if there is one, such as "
                f"FedAvg = [46.2] or FedAvg = [46.2, 0.8], not {numbers!r}."
            )


def _is_mean_and_std(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and 1 <= len(value) <= 2
        and all(type(number) in (int, float) for number in value)
    )


def _check_needs(recipe: Recipe, method: Method) -> None:
    """Check that the recipe has what a method needs."""
    needs = method.algorithm.needs
    training = recipe.training_of(method)
    if training.optimizer != "sgd" and ("sgd" in needs or recipe.privacy.noise_multiplier):
        who = method.label if "sgd" in needs else "DP-SGD (privacy.noise_multiplier)"
        raise ConfigError(
            f"{who} is defined for steps of SGD, not of {training.optimizer}. Set training.optimizer=sgd."
        )
    unknown = [need for need in needs if need not in ("auxiliary", "generator", "images", "public", "sgd")]
    if unknown:
        raise ConfigError(f"{method.label} needs {', '.join(unknown)}, which no recipe can give.")
    if "auxiliary" in needs and not recipe.auxiliary.images_per_class:
        raise ConfigError(
            f"{method.label} needs an auxiliary set on the server, and there is none. Give it one: "
            "auxiliary.images_per_class=32."
        )
    if "public" in needs and not recipe.public.name:
        raise ConfigError(
            f"{method.label} needs a public set, on whose images clients share their predictions. Name a data set with "
            "images of the same size: public.name=fashion-mnist."
        )
    if "generator" in needs and not recipe.generator.per_task:
        raise ConfigError(
            f"{method.label} needs a generator of images. Train one with fedkeep generator train, and name its folder: "
            "generator.name=FOLDER, or one for each task: generator.by_task."
        )
    if recipe.client_models and method.algorithm.networks == "one":
        raise ConfigError(
            f"{method.label} exchanges weights, which clients of other networks cannot use. Leave out "
            "[[client_models]], or compare methods that exchange predictions."
        )
