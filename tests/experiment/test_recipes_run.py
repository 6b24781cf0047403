"""The papers' methods as their recipes set them, on 250 digits over ten clients for two rounds.

Small versions of the presets (specification, section 18): that every recipe can be carried out, not what comes of it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import tiny
import torch

import fedkeep
from fedkeep.algorithms.incremental.target import TARGET
from fedkeep.data import Augmentation, DataSet, Tasks
from fedkeep.data.partition import ByColumn, ExDir, Scheme
from fedkeep.experiment.build import build_simulation, split_clients, split_server_data
from fedkeep.experiment.recipe import Method, Recipe
from fedkeep.experiment.recipe_files import paper_tables
from fedkeep.experiment.recipe_loader import load_recipe
from fedkeep.models import get_architecture


@cache
def digits() -> DataSet:
    """Return 250 training images, each by one of twenty writers."""
    whole = fedkeep.load("digits")
    few = {name: column[:250] for name, column in whole.train.items()}
    halves = [{**half, "writer": torch.arange(len(half["label"])) % 20} for half in (few, whole.test)]
    return replace(whole, train=halves[0], test=halves[1])


def shrunk(scheme: Scheme) -> Scheme:
    """Return a partition of the same kind over ten clients."""
    if isinstance(scheme, ByColumn):
        return replace(scheme, num_clients=10, num_groups=20)
    if isinstance(scheme, ExDir):
        return replace(scheme, num_clients=10, classes_per_client=2, min_size=1)
    return replace(scheme, num_clients=10, **({"min_size": 1} if hasattr(scheme, "min_size") else {}))


def small(recipe: Recipe) -> Recipe:
    return replace(
        recipe,
        partition=shrunk(recipe.partition),
        model=get_architecture("mlp")(hidden=(8,)),  # type: ignore[call-arg]
        training=replace(recipe.training, epochs=1, batch_size=16),
        run=replace(recipe.run, rounds=2, cohort_size=3, evaluate_every=1),
        auxiliary=replace(recipe.auxiliary, images_per_class=min(recipe.auxiliary.images_per_class, 5)),
    )


def small_in_tasks(recipe: Recipe) -> Recipe:
    """Return the recipe with two tasks of five classes, and in each a round of two steps a client."""
    recipe = small(recipe)
    training, run = replace(recipe.training, batch_size=25), replace(recipe.run, rounds=1)
    return replace(recipe, tasks=Tasks(num_tasks=2), training=training, run=run, augmentation=Augmentation())


def presets(paper: str) -> dict[str, tuple[Recipe, Method]]:
    """Return every method once for each way in which its recipes split and augment data, and of each sweep one.

    ``paper`` may name one of its tables only.
    """
    found: dict[Any, tuple[str, Recipe, Method]] = {}
    for table in paper_tables().values():
        for name in table.columns if f"{table.name}/".startswith(f"{paper}/") else ():
            recipe = load_recipe(name)
            for method in recipe.methods:
                options = re.sub(r"[0-9.]+", "#", repr(method.algorithm))
                kind = options, type(recipe.partition), recipe.augmentation, recipe.auxiliary
                found.setdefault(kind, (f"{name}: {method.label}", recipe, method))
    return {name: (recipe, method) for name, recipe, method in found.values()}


@pytest.mark.parametrize(
    "paper", [*(pytest.param(paper, marks=pytest.mark.slow) for paper in ("sfedkd", "fedadkd")), "fedcad"]
)
def test_every_recipe_can_be_carried_out(paper: str) -> None:
    run_rounds = presets(paper)
    assert len(run_rounds) > 10
    for name, (recipe, method) in run_rounds.items():
        recipe = small(recipe)
        federation = split_clients(recipe, 0, *split_server_data(recipe, 0, digits()))
        simulation = build_simulation(recipe, method, 0, federation)
        for record in tiny.run_rounds(simulation):
            assert record["lost"] == {}, name
            assert sum(record["correct"]) > 0, name
        assert tiny.finite(simulation.server.model), name
        assert not tiny.equal(simulation.server.model, simulation.context.runner.initial), name


@pytest.mark.parametrize(("table", "methods"), [("fedskf", 12), ("feddcl/table1", 4)])
def test_every_recipe_with_tasks_can_be_carried_out(table: str, methods: int) -> None:
    run_rounds = {method.label: (recipe, method) for recipe, method in presets(table).values()}
    assert len(run_rounds) == methods
    for name, (recipe, method) in run_rounds.items():
        recipe = small_in_tasks(recipe)
        if isinstance(method.algorithm, TARGET):
            method = replace(method, algorithm=replace(method.algorithm, **tiny.INVERSION))
        simulation = build_simulation(recipe, method, 0, split_clients(recipe, 0, digits(), {}))
        records = tiny.run_rounds(simulation)
        assert [len(record["correct"]) for record in records] == [5, 10], name
        for record in records:
            assert record["lost"] == {}, name
            assert sum(record["correct"]) > 0, name
        assert tiny.finite(simulation.server.model), name
