"""Federated learning that keeps what it has learned.

>>> import fedkeep
>>> run = fedkeep.run("demo", methods=[fedkeep.FedSeq(), fedkeep.SFedKD(teachers=3)], rounds=20)  # doctest: +SKIP

Names are imported when they are first used, so that ``import fedkeep`` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkeep.algorithms.fedavg import FedAvg
    from fedkeep.algorithms.fedseq import FedSeq
    from fedkeep.algorithms.sfedkd import SFedKD
    from fedkeep.api import resume, run
    from fedkeep.data import load
    from fedkeep.errors import FedKeepError
    from fedkeep.experiment.recipe import Recipe, load_recipe, recipe_names
    from fedkeep.experiment.run import Machine
    from fedkeep.interface.algorithm import algorithms
    from fedkeep.models.custom import custom
    from fedkeep.reporting.run_folder import read_run

_HOMES = {
    "FedAvg": "fedkeep.algorithms.fedavg",
    "FedKeepError": "fedkeep.errors",
    "FedSeq": "fedkeep.algorithms.fedseq",
    "Machine": "fedkeep.experiment.run",
    "Recipe": "fedkeep.experiment.recipe",
    "SFedKD": "fedkeep.algorithms.sfedkd",
    "algorithms": "fedkeep.interface.algorithm",
    "custom": "fedkeep.models.custom",
    "load": "fedkeep.data",
    "load_recipe": "fedkeep.experiment.recipe",
    "read_run": "fedkeep.reporting.run_folder",
    "recipe_names": "fedkeep.experiment.recipe",
    "resume": "fedkeep.api",
    "run": "fedkeep.api",
}

__all__ = [
    "FedAvg",
    "FedKeepError",
    "FedSeq",
    "Machine",
    "Recipe",
    "SFedKD",
    "algorithms",
    "custom",
    "load",
    "load_recipe",
    "read_run",
    "recipe_names",
    "resume",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("fedkeep")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedkeep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
