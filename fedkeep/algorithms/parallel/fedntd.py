"""FedNTD: the received model teaches its predictions among the classes that are not the label."""

from dataclasses import dataclass
from typing import Any

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.interface import Client
from fedkeep.losses import CrossEntropy, Distillation, Loss
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FedNTD(FedAvg):
    """Federated not-true distillation: CE + w_nontarget * tau^2 * NT, taught by the received model.

    NT is the divergence of the softmaxes over the classes that are not the label (eq. 4; see
    `fedkeep.losses.decoupled`). The official program runs with weight 1 and temperature 1; the default of its loss
    class, 3, is overridden there.
    """

    title = "FedNTD"
    paper = "Lee et al., 2022: Preservation of the global knowledge by not-true distillation in federated learning"

    w_nontarget: float = option(1.0, "weight of the non-target part (beta in the paper)", low=0.0)
    tau: float = option(1.0, "softmax temperature", low=1e-3)

    def local_loss(self, client: Client[Any], model: Weights) -> Loss:
        return CrossEntropy() + Distillation.not_true(model, self.w_nontarget, self.tau)
