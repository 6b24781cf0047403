"""A recipe: everything that determines an experiment, as a value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import tomli_w

from fedkeep.data import Augmentation, Tasks
from fedkeep.data.auxiliary import Auxiliary
from fedkeep.data.partition import Scheme
from fedkeep.data.public import Public
from fedkeep.engine.plan import Plan
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.checks import check
from fedkeep.experiment.networks import ClientModel, model_table
from fedkeep.generation.diffusion.generator_config import GeneratorConfig
from fedkeep.interface import Algorithm, Training
from fedkeep.models import Architecture
from fedkeep.options import as_table

LONGEST = 200
"""Of a label's folder name, in characters: file systems take 255 bytes, and a seed is added."""


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
        if name and len(name) <= LONGEST:
            return name
        mark = sha256(self.label.encode()).hexdigest()[:8]
        return f"{name[: LONGEST - 9] or 'method'}-{mark}"


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
    run: Plan
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
        check(self)

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
            "model": model_table(self.model),
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
