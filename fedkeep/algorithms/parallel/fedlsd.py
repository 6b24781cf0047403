"""FedLSD: the received model teaches its full predictions, with one weight for all classes."""

from dataclasses import dataclass
from typing import Any

import torch

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.interface import Client
from fedkeep.losses import Distillation, FullKLByClass, Loss, Scale, WeightedCrossEntropy
from fedkeep.models import Weights
from fedkeep.options import option

WEIGHED = "its loss weighs the cross-entropy of each class itself"
"""Why a recipe's loss of labels is not for a method with `class_wise_distillation`."""


@dataclass(frozen=True)
class FedLSD(FedAvg):
    """Local self-distillation: (1 - w_full) CE + w_full KL(p^T || p^S), taught by the received model.

    As FedCAD's paper writes it, with temperature 2, no tau^2, and w_full from 0.1, 0.3 and 0.5. Not FedNTD, which is
    the later version of the same paper. FedCAD's figure 1 has ten rounds of FedAvg before it: ``first_round=11``.
    """

    title = "FedLSD"
    paper = "Lee et al., 2021: Preservation of the global knowledge by not-true self knowledge distillation (v1)"
    reason_against_label_loss = WEIGHED

    w_full: float = option(0.3, "weight of the distillation (alpha in FedCAD's paper)", low=0.0, high=1.0)
    tau: float = option(2.0, "softmax temperature", low=1e-3)
    kd_scale: Scale = option("none", "whether the distillation is multiplied by tau squared")
    first_round: int = option(1, "round from which the model teaches; before it this is FedAvg", low=1)

    def local_loss(self, client: Client[Any], model: Weights) -> Loss:
        alpha = self.w_full if client.round >= self.first_round else 0.0
        return class_wise_distillation(model, torch.full((client.num_classes,), alpha), self.tau, self.kd_scale)


def class_wise_distillation(model: Weights, alpha: torch.Tensor, tau: float, scale: Scale) -> Loss:
    """Return the mean of (1 - a_y) CE + a_y KL(p^T || p^S) (FedCAD, eq. 6; FedLSD with one a for all classes).

    ``alpha``: [classes], a.
    ``tau``: The softmax temperature of the divergence; the cross-entropy has 1.
    ``scale``: Whether the divergence is multiplied by tau squared.
    """
    return WeightedCrossEntropy(1 - alpha) + Distillation((model,), FullKLByClass(alpha), tau, scale)
