from fedkeep.algorithms.heterogeneous.ewc_kd import EWCKD as EWCKD
from fedkeep.algorithms.heterogeneous.feddcl import FedDCL as FedDCL
from fedkeep.algorithms.heterogeneous.fedgems import FedGEMS as FedGEMS
from fedkeep.algorithms.heterogeneous.fedmd import FedMD as FedMD
from fedkeep.algorithms.heterogeneous.ft_kd import FTKD as FTKD
from fedkeep.algorithms.heterogeneous.lwf_kd import LwFKD as LwFKD
from fedkeep.algorithms.incremental.dddr import DDDR as DDDR
from fedkeep.algorithms.incremental.fedewc import FedEWC as FedEWC
from fedkeep.algorithms.incremental.fedicarl import FediCaRL as FediCaRL
from fedkeep.algorithms.incremental.fedlwf import FedLwF as FedLwF, FedProxLwF as FedProxLwF
from fedkeep.algorithms.incremental.fedpass import FedPASS as FedPASS
from fedkeep.algorithms.incremental.fedskf import FedSKF as FedSKF
from fedkeep.algorithms.incremental.fedweit import FedWeIT as FedWeIT
from fedkeep.algorithms.incremental.finetune import Finetune as Finetune
from fedkeep.algorithms.incremental.flwf2t import FLwF2T as FLwF2T
from fedkeep.algorithms.incremental.lander import LANDER as LANDER
from fedkeep.algorithms.incremental.target import TARGET as TARGET
from fedkeep.algorithms.parallel.asd import ASD as ASD, FedNTDASD as FedNTDASD
from fedkeep.algorithms.parallel.fedadkd import FedADKD as FedADKD
from fedkeep.algorithms.parallel.fedavg import FedAvg as FedAvg
from fedkeep.algorithms.parallel.fedcad import FedCAD as FedCAD
from fedkeep.algorithms.parallel.fedcurv import FedCurv as FedCurv
from fedkeep.algorithms.parallel.feddf import FedDF as FedDF
from fedkeep.algorithms.parallel.feddkd import FedDKD as FedDKD
from fedkeep.algorithms.parallel.fedgkd import FedGKD as FedGKD
from fedkeep.algorithms.parallel.fedlsd import FedLSD as FedLSD
from fedkeep.algorithms.parallel.fednova import FedNova as FedNova
from fedkeep.algorithms.parallel.fedntd import FedNTD as FedNTD
from fedkeep.algorithms.parallel.fedopt import FedAdam as FedAdam, FedAvgM as FedAvgM
from fedkeep.algorithms.parallel.fedprox import FedProx as FedProx
from fedkeep.algorithms.parallel.moon import MOON as MOON
from fedkeep.algorithms.parallel.scaffold import SCAFFOLD as SCAFFOLD
from fedkeep.algorithms.sequential.aver import AVER as AVER, CAMKD as CAMKD, EBKD as EBKD
from fedkeep.algorithms.sequential.cwc import CWC as CWC
from fedkeep.algorithms.sequential.fedseq import FedSeq as FedSeq
from fedkeep.algorithms.sequential.seqkeep import SeqKeep as SeqKeep
from fedkeep.algorithms.sequential.sfedkd import SFedKD as SFedKD
from fedkeep.api import resume as resume, run as run
from fedkeep.data import load as load
from fedkeep.data.partition import (
    IID as IID,
    ByColumn as ByColumn,
    Dirichlet as Dirichlet,
    DirichletPerClient as DirichletPerClient,
    ExDir as ExDir,
    Hybrid as Hybrid,
    Sharding as Sharding,
)
from fedkeep.errors import FedKeepError as FedKeepError
from fedkeep.experiment.recipe import Method as Method, Recipe as Recipe
from fedkeep.experiment.recipe_files import recipe_names as recipe_names
from fedkeep.experiment.recipe_loader import load_recipe as load_recipe
from fedkeep.experiment.runtime import Machine as Machine
from fedkeep.export.trained_model import export_model as export_model
from fedkeep.export.prediction import load_model as load_model, predict as predict
from fedkeep.interface import Training as Training
from fedkeep.interface.algorithm import get_algorithm as get_algorithm
from fedkeep.interface.training_settings import SGD as SGD, Adam as Adam, AdamW as AdamW
from fedkeep.models.custom import custom as custom
from fedkeep.reporting.metric import EarlyStopping as EarlyStopping
from fedkeep.reporting.metric import Metric as Metric, add_metric as add_metric
from fedkeep.results import read_run as read_run
from fedkeep.rounds.reply_step import ReplyStep as ReplyStep
from fedkeep.trials.callbacks import Callback as Callback
from fedkeep.tuning import tune as tune

__version__: str
