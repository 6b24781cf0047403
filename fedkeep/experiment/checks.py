"""What must hold between the parts of a recipe, whether it was read from a file or made in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedkeep.errors import ConfigError
from fedkeep.experiment.networks import check_clients
from fedkeep.interface import algorithms

if TYPE_CHECKING:
    from fedkeep.experiment.recipe import Method, Recipe

PRINTED = ("accuracy", "forgetting", "clients", "rounds_to", "speedup")
"""What a recipe may hold of a paper's numbers."""


def check(recipe: Recipe) -> None:
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
    for name in PRINTED:
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
