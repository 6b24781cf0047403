"""FedDKD: the received model teaches by decoupled distillation, with the same weights everywhere."""

from dataclasses import dataclass
from typing import Any

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.interface import Client
from fedkeep.losses import CrossEntropy, Distillation, Loss, Scale
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FedDKD(FedAvg):
    """Decoupled knowledge distillation from the received model: CE + s (w_target TC + w_nontarget NT), s = tau^2.

    The case with fixed weights; other methods compute these weights. Weights and temperature are the official code's
    (its warm-up of 20 epochs is left out, as in FedADKD and SFedKD). At temperature 1, ``w_target=0`` and
    ``w_nontarget=1`` it is FedNTD, with other ``w_target`` the "FedDKD" of FedADKD's figure 3.
    """

    title = "FedDKD"
    paper = "Zhao et al., 2022: Decoupled knowledge distillation"

    w_target: float = option(1.0, "weight of the target part (alpha in the paper)", low=0.0)
    w_nontarget: float = option(8.0, "weight of the non-target part (beta in the paper)", low=0.0)
    tau: float = option(4.0, "softmax temperature", low=1e-3)
    kd_scale: Scale = option("tau2", "whether the distillation is multiplied by tau squared")

    def local_loss(self, client: Client[Any], model: Weights) -> Loss:
        return CrossEntropy() + Distillation.decoupled(model, self.w_target, self.w_nontarget, self.tau, self.kd_scale)
