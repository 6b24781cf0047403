"""A recipe: everything that determines an experiment, as a value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import tomli_w

from fedkeep.data import Augmentation, Tasks
from fedkeep.data.partition import Scheme
from fedkeep.data.server_data import Auxiliary, Public
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.model_config import ClientModel, check_clients, model_to_table
from fedkeep.generation.diffusion.generator_config import GeneratorConfig
from fedkeep.interface import Algorithm, Training, algorithms
from fedkeep.models import Architecture
from fedkeep.options import as_table
from fedkeep.simulation.schedule import Schedule

MAX_SLUG_LENGTH = 200
"""Of a label's folder name, in characters: file systems take 255 bytes, and a seed is added."""


PAPER_METRICS = ("accuracy", "forgetting", "clients", "rounds_to", "speedup")
"""What a recipe may hold of a paper's numbers."""


@dataclass(frozen=True)
class Method:
    """A method as one row of a comparison: its label and its options.

    ``point_of`` is the label of the method of whose grid this is a point; empty for one that stands for itself.
    """

    label: str
    algorithm: Algorithm[Any, Any]
    point_of: str = ""

    @property
    def slug(self) -> str:
        """The label as a folder name: its Latin letters and digits, or a hash of labels without any."""
        name = re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-.")
        if name and len(name) <= MAX_SLUG_LENGTH:
            return name
        mark = sha256(self.label.encode()).hexdigest()[:8]
        return f"{name[: MAX_SLUG_LENGTH - 9] or 'method'}-{mark}"


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run's results, apart from the machine.

    Attributes
    ----------
    name : how it was asked for. title : a line for people.
    data : a known data set, a Hub id or a path (see `fedkeep.data.load`).
    validation : share of each class's training images that is kept from the clients, and on which models are evaluated
        in the place of the test images, so that options can be chosen; 0: there is none.
    model : the server's network, and every client's that has none of its own in ``client_models``.
    methods : compared on the same partitions, initial weights, cohorts and batch orders. seeds : one run of each for
    each.
    paper : the numbers that a paper printed for it, if it is a paper's experiment.

    Raises
    ------
    ConfigError
        Where its parts contradict each other, or a method needs what it does not give.
    """

    name: str
    title: str
    data: str
    partition: Scheme
    model: Architecture
    training: Training
    run: Schedule
    methods: tuple[Method, ...]
    seeds: tuple[int, ...] = (0,)
    augmentation: Augmentation = field(default_factory=Augmentation)
    auxiliary: Auxiliary = field(default_factory=Auxiliary)
    public: Public = field(default_factory=Public)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    tasks: Tasks = field(default_factory=Tasks)
    client_models: tuple[ClientModel, ...] = ()
    paper: Mapping[str, Any] = field(default_factory=dict)
    validation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seeds", "methods", "client_models"):
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))
        _validate(self)

    @property
    def has_tasks(self) -> bool:
        """Tell whether classes are put in an order and arrive in tasks; otherwise all are there from the start."""
        return self.tasks != Tasks()

    @property
    def rounds(self) -> int:
        """How many rounds there are, over all tasks."""
        return self.run.rounds * self.tasks.tasks

    def method(self, label: str) -> Method:
        """Return the method of a label; raise `RunError` where somebody has taken it out of the recipe meanwhile."""
        for method in self.methods:
            if method.label == label:
                return method
        raise RunError(
            f"recipe {self.name!r} has no method {label!r} any more. Let nobody else change its recipe.toml."
        )

    def to_toml(self) -> str:
        """Return the recipe with every option written out, as a file that `load_recipe` reads."""
        table: dict[str, Any] = {
            "title": self.title,
            "seeds": list(self.seeds),
            "data": {"name": self.data} | ({"validation": self.validation} if self.validation else {}),
            "partition": {"scheme": self.partition.name, **as_table(self.partition)},
            "model": model_to_table(self.model),
            "training": as_table(self.training),
            "run": as_table(self.run),
            "augmentation": as_table(self.augmentation),
            "auxiliary": as_table(self.auxiliary),
            "public": as_table(self.public),
            "generator": as_table(self.generator),
            "methods": [
                {"label": m.label, "algorithm": m.algorithm.name()}
                | ({"point_of": m.point_of} if m.point_of else {})
                | as_table(m.algorithm)
                for m in self.methods
            ],
        }
        if self.has_tasks:
            table["tasks"] = as_table(self.tasks)
        if self.client_models:
            table["client_models"] = [model.to_table() for model in self.client_models]
        if self.paper:
            table["paper"] = dict(self.paper)
        return tomli_w.dumps(table)


def with_methods(recipe: Recipe, instances: Iterable[Algorithm[Any, Any]]) -> Recipe:
    """Return a recipe that runs these methods, as configured in Python, instead of its own."""
    instances = list(instances)
    for instance in instances:
        if not isinstance(instance, Algorithm):
            raise ConfigError(f"methods must be method objects, such as [fedkeep.FedSeq()], not {instance!r}.")
    methods: list[Method] = []
    for instance in instances:
        label = type(instance).title or type(instance).__name__
        taken = sum(m.label == label or m.label.startswith(f"{label} ") for m in methods)
        methods.append(Method(f"{label} {taken + 1}" if taken else label, instance))
    return replace(recipe, methods=tuple(methods))


def _validate(recipe: Recipe) -> None:
    """Raise `ConfigError` where the parts of a recipe contradict each other, or a method lacks what it needs."""
    _check_seeds(recipe.seeds)
    _check_validation(recipe.validation)
    _check_methods(recipe.methods)
    _check_sizes(recipe)
    _check_server(recipe)
    _check_paper(recipe.paper)
    check_clients(recipe.client_models)
    for method in recipe.methods:
        _check_needs(recipe, method)


def _check_seeds(seeds: Any) -> None:
    given = list(seeds) if isinstance(seeds, tuple) else seeds
    if not isinstance(given, list) or not given or not all(type(seed) is int and seed >= 0 for seed in given):
        raise ConfigError(f"seeds must be a list of integers from 0 on, such as [0, 1, 2], not {given!r}.")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds {given} name one twice. Each seed is run once.")


def _check_validation(share: Any) -> None:
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
    clients, plan = recipe.partition.clients, recipe.run
    if clients and plan.cohort > clients:
        raise ConfigError(f"a cohort of {plan.cohort} cannot be drawn from {clients} clients. Change run.cohort.")
    if plan.min_clients > plan.cohort:
        raise ConfigError(f"run.min_clients {plan.min_clients} exceeds run.cohort {plan.cohort}.")
    named = recipe.generator.by_task
    if named and len(named) != recipe.tasks.tasks:
        raise ConfigError(
            f"generator.by_task names {len(named)} generators for {recipe.tasks.tasks} tasks. Name one of each task."
        )


def _check_server(recipe: Recipe) -> None:
    """Check what the server holds."""
    if recipe.has_tasks and recipe.auxiliary.per_class:
        raise ConfigError(
            "an auxiliary set would show the server classes before they arrive. Leave out [auxiliary] or [tasks]."
        )
    if recipe.auxiliary.per_class and recipe.public.name:
        raise ConfigError("the server has one set of its own. Leave out [auxiliary] or [public].")


def _check_paper(paper: Mapping[str, Any]) -> None:
    for name in PAPER_METRICS:
        numbers = paper.get(name, {})
        if not isinstance(numbers, Mapping) or not all(map(_is_spread, numbers.values())):
            raise ConfigError(
                f"[paper.{name}] must give methods their mean, and their standard deviation if there is one, such as "
                f"FedAvg = [46.2] or FedAvg = [46.2, 0.8], not {numbers!r}."
            )


def _is_spread(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and 1 <= len(value) <= 2
        and all(type(number) in (int, float) for number in value)
    )


def _check_needs(recipe: Recipe, method: Method) -> None:
    """Check that a method gets what it needs."""
    needs = method.algorithm.needs
    unknown = [need for need in needs if need not in ("auxiliary", "public", "generator")]
    if unknown:
        raise ConfigError(f"{method.label} needs {', '.join(unknown)}, which no recipe can give.")
    if "auxiliary" in needs and not recipe.auxiliary.per_class:
        raise ConfigError(
            f"{method.label} needs an auxiliary set on the server, and there is none. Give it one: "
            "auxiliary.per_class=32."
        )
    if "public" in needs and not recipe.public.name:
        raise ConfigError(
            f"{method.label} needs a public set, about whose images clients tell what they think. Name a data set with "
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
            "[[client_models]], or compare methods that exchange what their models say."
        )
