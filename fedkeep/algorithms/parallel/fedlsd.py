"""FedLSD: the received model teaches all that it says, with one weight for all classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.interface import Client
from fedkeep.losses import Distillation, Objective, Scale, WeightedCrossEntropy, WholeByClass
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FedLSD(FedAvg):
    """Local self-distillation: (1 - w_full) CE + w_full KL(p^T || p^S), taught by the received model.

    As FedCAD's paper writes it, with temperature 2, no tau^2, and w_full from 0.1, 0.3 and 0.5. Not FedNTD, which is
    the later version of the same paper. FedCAD's figure 1 has ten rounds of FedAvg before it: ``first_round=11``.
    """

    title = "FedLSD"
    paper = "Lee et al., 2021: Preservation of the global knowledge by not-true self knowledge distillation (v1)"

    w_full: float = option(0.3, "weight of the distillation (alpha in FedCAD's paper)", low=0.0, high=1.0)
    tau: float = option(2.0, "softmax temperature", low=1e-3)
    kd_scale: Scale = option("none", "whether the distillation is multiplied by tau squared")
    first_round: int = option(1, "round from which the model teaches; before it this is FedAvg", low=1)

    def objective(self, client: Client[Any], model: Weights) -> Objective:
        trust = self.w_full if client.round >= self.first_round else 0.0
        return trusting(model, torch.full((client.classes,), trust), self.tau, self.kd_scale)


def trusting(model: Weights, trust: torch.Tensor, tau: float, scale: Scale, temperature: float = 1.0) -> Objective:
    """Return the mean of (1 - a_y) CE + a_y KL(p^T || p^S), for ``trust`` a [classes] in the teacher ``model``.

    ``temperature`` is the cross-entropy's, ``tau`` the divergence's.
    """
    return WeightedCrossEntropy(1 - trust, temperature) + Distillation((model,), WholeByClass(trust), tau, scale)
