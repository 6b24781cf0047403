"""Federated learning that keeps what it has learned.

>>> import fedkeep
>>> run = fedkeep.run("demo", methods=[fedkeep.FedSeq(), fedkeep.SFedKD(teachers=3)], rounds=20)  # doctest: +SKIP

Names are imported when they are first used, so that ``import fedkeep`` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkeep.algorithms.asd import ASD, FedNTDASD
    from fedkeep.algorithms.aver import AVER, CAMKD, EBKD
    from fedkeep.algorithms.cwc import CWC
    from fedkeep.algorithms.dddr import DDDR
    from fedkeep.algorithms.ewc_kd import EWCKD
    from fedkeep.algorithms.fedadkd import FedADKD
    from fedkeep.algorithms.fedavg import FedAvg
    from fedkeep.algorithms.fedcad import FedCAD
    from fedkeep.algorithms.fedcurv import FedCurv
    from fedkeep.algorithms.feddcl import FedDCL
    from fedkeep.algorithms.feddf import FedDF
    from fedkeep.algorithms.feddkd import FedDKD
    from fedkeep.algorithms.fedewc import FedEWC
    from fedkeep.algorithms.fedgems import FedGEMS
    from fedkeep.algorithms.fedgkd import FedGKD
    from fedkeep.algorithms.fedicarl import FediCaRL
    from fedkeep.algorithms.fedlsd import FedLSD
    from fedkeep.algorithms.fedlwf import FedLwF, FedProxLwF
    from fedkeep.algorithms.fedmd import FedMD
    from fedkeep.algorithms.fednova import FedNova
    from fedkeep.algorithms.fedntd import FedNTD
    from fedkeep.algorithms.fedopt import FedAdam, FedAvgM
    from fedkeep.algorithms.fedpass import FedPASS
    from fedkeep.algorithms.fedprox import FedProx
    from fedkeep.algorithms.fedseq import FedSeq
    from fedkeep.algorithms.fedskf import FedSKF
    from fedkeep.algorithms.fedweit import FedWeIT
    from fedkeep.algorithms.finetune import Finetune
    from fedkeep.algorithms.flwf2t import FLwF2T
    from fedkeep.algorithms.ft_kd import FTKD
    from fedkeep.algorithms.lander import LANDER
    from fedkeep.algorithms.lwf_kd import LwFKD
    from fedkeep.algorithms.moon import MOON
    from fedkeep.algorithms.scaffold import SCAFFOLD
    from fedkeep.algorithms.seqkeep import SeqKeep
    from fedkeep.algorithms.sfedkd import SFedKD
    from fedkeep.algorithms.target import TARGET
    from fedkeep.api import resume, run
    from fedkeep.data import load
    from fedkeep.errors import FedKeepError
    from fedkeep.experiment.catalogue import recipe_names
    from fedkeep.experiment.reading import load_recipe
    from fedkeep.experiment.recipe import Recipe
    from fedkeep.experiment.runtime import Machine
    from fedkeep.interface.algorithm import algorithms
    from fedkeep.models.custom import custom
    from fedkeep.reporting.run_folder import read_run
    from fedkeep.simulation.callbacks import Callback

_HOMES = {
    "ASD": "fedkeep.algorithms.asd",
    "AVER": "fedkeep.algorithms.aver",
    "CAMKD": "fedkeep.algorithms.aver",
    "CWC": "fedkeep.algorithms.cwc",
    "Callback": "fedkeep.simulation.callbacks",
    "DDDR": "fedkeep.algorithms.dddr",
    "EBKD": "fedkeep.algorithms.aver",
    "EWCKD": "fedkeep.algorithms.ewc_kd",
    "FTKD": "fedkeep.algorithms.ft_kd",
    "FedDCL": "fedkeep.algorithms.feddcl",
    "FedDF": "fedkeep.algorithms.feddf",
    "FedGEMS": "fedkeep.algorithms.fedgems",
    "FedMD": "fedkeep.algorithms.fedmd",
    "LwFKD": "fedkeep.algorithms.lwf_kd",
    "FLwF2T": "fedkeep.algorithms.flwf2t",
    "FedADKD": "fedkeep.algorithms.fedadkd",
    "FedAdam": "fedkeep.algorithms.fedopt",
    "FedAvg": "fedkeep.algorithms.fedavg",
    "FedAvgM": "fedkeep.algorithms.fedopt",
    "FedCAD": "fedkeep.algorithms.fedcad",
    "FedCurv": "fedkeep.algorithms.fedcurv",
    "FedDKD": "fedkeep.algorithms.feddkd",
    "FedEWC": "fedkeep.algorithms.fedewc",
    "FedGKD": "fedkeep.algorithms.fedgkd",
    "FedKeepError": "fedkeep.errors",
    "FedLSD": "fedkeep.algorithms.fedlsd",
    "FedLwF": "fedkeep.algorithms.fedlwf",
    "FedNTD": "fedkeep.algorithms.fedntd",
    "FedNTDASD": "fedkeep.algorithms.asd",
    "FedNova": "fedkeep.algorithms.fednova",
    "FedPASS": "fedkeep.algorithms.fedpass",
    "FedProx": "fedkeep.algorithms.fedprox",
    "FedProxLwF": "fedkeep.algorithms.fedlwf",
    "FedSKF": "fedkeep.algorithms.fedskf",
    "FedSeq": "fedkeep.algorithms.fedseq",
    "FedWeIT": "fedkeep.algorithms.fedweit",
    "FediCaRL": "fedkeep.algorithms.fedicarl",
    "Finetune": "fedkeep.algorithms.finetune",
    "LANDER": "fedkeep.algorithms.lander",
    "MOON": "fedkeep.algorithms.moon",
    "Machine": "fedkeep.experiment.runtime",
    "Recipe": "fedkeep.experiment.recipe",
    "SCAFFOLD": "fedkeep.algorithms.scaffold",
    "SFedKD": "fedkeep.algorithms.sfedkd",
    "SeqKeep": "fedkeep.algorithms.seqkeep",
    "TARGET": "fedkeep.algorithms.target",
    "algorithms": "fedkeep.interface.algorithm",
    "custom": "fedkeep.models.custom",
    "load": "fedkeep.data",
    "load_recipe": "fedkeep.experiment.reading",
    "read_run": "fedkeep.reporting.run_folder",
    "recipe_names": "fedkeep.experiment.catalogue",
    "resume": "fedkeep.api",
    "run": "fedkeep.api",
}

__all__ = [
    "ASD",
    "AVER",
    "CAMKD",
    "CWC",
    "DDDR",
    "EBKD",
    "EWCKD",
    "FTKD",
    "LANDER",
    "MOON",
    "SCAFFOLD",
    "TARGET",
    "Callback",
    "FLwF2T",
    "FedADKD",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCAD",
    "FedCurv",
    "FedDCL",
    "FedDF",
    "FedDKD",
    "FedEWC",
    "FedGEMS",
    "FedGKD",
    "FedKeepError",
    "FedLSD",
    "FedLwF",
    "FedMD",
    "FedNTD",
    "FedNTDASD",
    "FedNova",
    "FedPASS",
    "FedProx",
    "FedProxLwF",
    "FedSKF",
    "FedSeq",
    "FedWeIT",
    "FediCaRL",
    "Finetune",
    "LwFKD",
    "Machine",
    "Recipe",
    "SFedKD",
    "SeqKeep",
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
