"""FedProx: a proximal term keeps clients near the model that they received."""

from dataclasses import dataclass
from typing import Any

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.interface import Client
from fedkeep.losses import CrossEntropy, Loss, QuadraticPenalty
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with a proximal term: CE + mu / 2 ||w - w^t||^2 over all parameters.

    With ``mu=0`` this is FedAvg, bit for bit. The code of FedNTD uses mu = 1; FedCAD tunes it over 0.001, 0.01 and 0.1.
    """

    paper = "Li et al., 2020: Federated optimization in heterogeneous networks"

    mu: float = option(0.01, "weight of the proximal term", low=0.0)

    def local_loss(self, client: Client[Any], model: Weights) -> Loss:
        return CrossEntropy() + QuadraticPenalty(model, self.mu / 2)
