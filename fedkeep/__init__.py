"""Federated learning that keeps what it has learned.

>>> import fedkeep
>>> run = fedkeep.run("demo", methods=[fedkeep.FedSeq(), fedkeep.SFedKD(teachers=3)], rounds=20)  # doctest: +SKIP

Names are imported when they are first used, so that ``import fedkeep`` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkeep.algorithms.heterogeneous.ewc_kd import EWCKD
    from fedkeep.algorithms.heterogeneous.feddcl import FedDCL
    from fedkeep.algorithms.heterogeneous.fedgems import FedGEMS
    from fedkeep.algorithms.heterogeneous.fedmd import FedMD
    from fedkeep.algorithms.heterogeneous.ft_kd import FTKD
    from fedkeep.algorithms.heterogeneous.lwf_kd import LwFKD
    from fedkeep.algorithms.incremental.dddr import DDDR
    from fedkeep.algorithms.incremental.fedewc import FedEWC
    from fedkeep.algorithms.incremental.fedicarl import FediCaRL
    from fedkeep.algorithms.incremental.fedlwf import FedLwF, FedProxLwF
    from fedkeep.algorithms.incremental.fedpass import FedPASS
    from fedkeep.algorithms.incremental.fedskf import FedSKF
    from fedkeep.algorithms.incremental.fedweit import FedWeIT
    from fedkeep.algorithms.incremental.finetune import Finetune
    from fedkeep.algorithms.incremental.flwf2t import FLwF2T
    from fedkeep.algorithms.incremental.lander import LANDER
    from fedkeep.algorithms.incremental.target import TARGET
    from fedkeep.algorithms.parallel.asd import ASD, FedNTDASD
    from fedkeep.algorithms.parallel.fedadkd import FedADKD
    from fedkeep.algorithms.parallel.fedavg import FedAvg
    from fedkeep.algorithms.parallel.fedcad import FedCAD
    from fedkeep.algorithms.parallel.fedcurv import FedCurv
    from fedkeep.algorithms.parallel.feddf import FedDF
    from fedkeep.algorithms.parallel.feddkd import FedDKD
    from fedkeep.algorithms.parallel.fedgkd import FedGKD
    from fedkeep.algorithms.parallel.fedlsd import FedLSD
    from fedkeep.algorithms.parallel.fednova import FedNova
    from fedkeep.algorithms.parallel.fedntd import FedNTD
    from fedkeep.algorithms.parallel.fedopt import FedAdam, FedAvgM
    from fedkeep.algorithms.parallel.fedprox import FedProx
    from fedkeep.algorithms.parallel.moon import MOON
    from fedkeep.algorithms.parallel.scaffold import SCAFFOLD
    from fedkeep.algorithms.sequential.aver import AVER, CAMKD, EBKD
    from fedkeep.algorithms.sequential.cwc import CWC
    from fedkeep.algorithms.sequential.fedseq import FedSeq
    from fedkeep.algorithms.sequential.seqkeep import SeqKeep
    from fedkeep.algorithms.sequential.sfedkd import SFedKD
    from fedkeep.api import resume, run
    from fedkeep.data import load
    from fedkeep.data.partition import IID, ByColumn, Dirichlet, DirichletPerClient, ExDir, Hybrid, Sharding
    from fedkeep.errors import FedKeepError
    from fedkeep.experiment.recipe import Method, Recipe
    from fedkeep.experiment.recipe_loader import load_recipe, recipe_names
    from fedkeep.experiment.runtime import Machine
    from fedkeep.export.files import export_model
    from fedkeep.export.prediction import load_model, predict
    from fedkeep.interface import Training
    from fedkeep.interface.algorithm import get_algorithm
    from fedkeep.interface.training_settings import SGD, Adam, AdamW
    from fedkeep.models.custom import custom
    from fedkeep.reporting.early_stopping import EarlyStopping
    from fedkeep.reporting.metric import Metric, add_metric
    from fedkeep.results import read_run
    from fedkeep.rounds.reply_step import ReplyStep
    from fedkeep.trials.callbacks import Callback
    from fedkeep.tuning import tune

_MODULES = {
    "Method": "fedkeep.experiment.recipe",
    "Metric": "fedkeep.reporting.metric",
    "add_metric": "fedkeep.reporting.metric",
    "AdamW": "fedkeep.interface.training_settings",
    "Adam": "fedkeep.interface.training_settings",
    "SGD": "fedkeep.interface.training_settings",
    "Training": "fedkeep.interface",
    "ByColumn": "fedkeep.data.partition",
    "Dirichlet": "fedkeep.data.partition",
    "DirichletPerClient": "fedkeep.data.partition",
    "ExDir": "fedkeep.data.partition",
    "Hybrid": "fedkeep.data.partition",
    "Sharding": "fedkeep.data.partition",
    "IID": "fedkeep.data.partition",
    "ASD": "fedkeep.algorithms.parallel.asd",
    "AVER": "fedkeep.algorithms.sequential.aver",
    "CAMKD": "fedkeep.algorithms.sequential.aver",
    "CWC": "fedkeep.algorithms.sequential.cwc",
    "Callback": "fedkeep.trials.callbacks",
    "EarlyStopping": "fedkeep.reporting.early_stopping",
    "ReplyStep": "fedkeep.rounds.reply_step",
    "DDDR": "fedkeep.algorithms.incremental.dddr",
    "EBKD": "fedkeep.algorithms.sequential.aver",
    "EWCKD": "fedkeep.algorithms.heterogeneous.ewc_kd",
    "FLwF2T": "fedkeep.algorithms.incremental.flwf2t",
    "FTKD": "fedkeep.algorithms.heterogeneous.ft_kd",
    "FedADKD": "fedkeep.algorithms.parallel.fedadkd",
    "FedAdam": "fedkeep.algorithms.parallel.fedopt",
    "FedAvg": "fedkeep.algorithms.parallel.fedavg",
    "FedAvgM": "fedkeep.algorithms.parallel.fedopt",
    "FedCAD": "fedkeep.algorithms.parallel.fedcad",
    "FedCurv": "fedkeep.algorithms.parallel.fedcurv",
    "FedDCL": "fedkeep.algorithms.heterogeneous.feddcl",
    "FedDF": "fedkeep.algorithms.parallel.feddf",
    "FedDKD": "fedkeep.algorithms.parallel.feddkd",
    "FedEWC": "fedkeep.algorithms.incremental.fedewc",
    "FedGEMS": "fedkeep.algorithms.heterogeneous.fedgems",
    "FedGKD": "fedkeep.algorithms.parallel.fedgkd",
    "FedKeepError": "fedkeep.errors",
    "FedLSD": "fedkeep.algorithms.parallel.fedlsd",
    "FedLwF": "fedkeep.algorithms.incremental.fedlwf",
    "FedMD": "fedkeep.algorithms.heterogeneous.fedmd",
    "FedNTD": "fedkeep.algorithms.parallel.fedntd",
    "FedNTDASD": "fedkeep.algorithms.parallel.asd",
    "FedNova": "fedkeep.algorithms.parallel.fednova",
    "FedPASS": "fedkeep.algorithms.incremental.fedpass",
    "FedProx": "fedkeep.algorithms.parallel.fedprox",
    "FedProxLwF": "fedkeep.algorithms.incremental.fedlwf",
    "FedSKF": "fedkeep.algorithms.incremental.fedskf",
    "FedSeq": "fedkeep.algorithms.sequential.fedseq",
    "FedWeIT": "fedkeep.algorithms.incremental.fedweit",
    "FediCaRL": "fedkeep.algorithms.incremental.fedicarl",
    "Finetune": "fedkeep.algorithms.incremental.finetune",
    "LANDER": "fedkeep.algorithms.incremental.lander",
    "LwFKD": "fedkeep.algorithms.heterogeneous.lwf_kd",
    "MOON": "fedkeep.algorithms.parallel.moon",
    "Machine": "fedkeep.experiment.runtime",
    "Recipe": "fedkeep.experiment.recipe",
    "SCAFFOLD": "fedkeep.algorithms.parallel.scaffold",
    "SFedKD": "fedkeep.algorithms.sequential.sfedkd",
    "SeqKeep": "fedkeep.algorithms.sequential.seqkeep",
    "TARGET": "fedkeep.algorithms.incremental.target",
    "custom": "fedkeep.models.custom",
    "export_model": "fedkeep.export.files",
    "get_algorithm": "fedkeep.interface.algorithm",
    "load": "fedkeep.data",
    "load_model": "fedkeep.export.prediction",
    "load_recipe": "fedkeep.experiment.recipe_loader",
    "predict": "fedkeep.export.prediction",
    "read_run": "fedkeep.results",
    "recipe_names": "fedkeep.experiment.recipe_loader",
    "resume": "fedkeep.api",
    "run": "fedkeep.api",
    "tune": "fedkeep.tuning",
}
"""By public name, the module that defines it."""

__all__ = [
    "ASD",
    "AVER",
    "CAMKD",
    "CWC",
    "DDDR",
    "EBKD",
    "EWCKD",
    "FTKD",
    "IID",
    "LANDER",
    "MOON",
    "SCAFFOLD",
    "SGD",
    "TARGET",
    "Adam",
    "AdamW",
    "ByColumn",
    "Callback",
    "Dirichlet",
    "DirichletPerClient",
    "EarlyStopping",
    "ExDir",
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
    "Hybrid",
    "LwFKD",
    "Machine",
    "Method",
    "Metric",
    "Recipe",
    "ReplyStep",
    "SFedKD",
    "SeqKeep",
    "Sharding",
    "Training",
    "add_metric",
    "custom",
    "export_model",
    "get_algorithm",
    "load",
    "load_model",
    "load_recipe",
    "predict",
    "read_run",
    "recipe_names",
    "resume",
    "run",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("fedkeep")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedkeep' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
