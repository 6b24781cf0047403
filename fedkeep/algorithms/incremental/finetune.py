"""Finetune: federated averaging that does nothing about forgetting, the lower bound of class-incremental learning."""

from dataclasses import dataclass
from typing import Any

from fedkeep.aggregation import Aggregation
from fedkeep.algorithms.incremental.class_incremental import CEClasses, label_loss
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.interface import Client
from fedkeep.losses import Loss
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class Finetune(FedAvg):
    """FedAvg, task after task, with uniform weights and the cross-entropy among the task's own classes.

    This is the code of TARGET. The rows that FedDCL calls FedAvg are ``ce_classes=all``, with which old classes are
    forgotten at once.
    """

    paper = "Zhang et al., 2023: TARGET, federated class-continual learning via exemplar-free distillation (its code)"

    ce_classes: CEClasses = option("new", "labels among the task's classes, or among all that were seen")
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")

    def local_loss(self, client: Client[Any], model: Weights) -> Loss:
        return label_loss(client, self.ce_classes)
