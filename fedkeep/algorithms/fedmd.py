"""FedMD: clients of different networks match the mean of their logits about public images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedkeep.algorithms.ft_kd import FTKD
from fedkeep.algorithms.said import Ensemble
from fedkeep.interface import Data
from fedkeep.losses import Objective
from fedkeep.losses.answers import LogitMatching
from fedkeep.options import option


@dataclass(frozen=True)
class FedMD(FTKD):
    """Heterogeneous federated learning by model distillation: digest the consensus, then revisit the own examples.

    The consensus is the mean of the clients' logits, and they are matched in squares. FedMD has no model on the
    server; here it has one, which digests as the clients do, so that there is one to evaluate and to hand out. Its
    clients are pre-trained on the public set's labels first, which are not used here.
    """

    title = "FedMD"
    paper = "Li and Wang, 2019: FedMD, heterogenous federated learning via model distillation"

    ensemble: Ensemble = option("logit", "the mean is one of probabilities, or of logits")

    def lesson(self, consensus: Tensor, public: Data) -> Objective:
        return LogitMatching(consensus)
