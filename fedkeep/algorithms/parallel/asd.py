"""ASD: the received model teaches most where it is sure and where labels are rare; alone, and with FedNTD's loss."""

from dataclasses import dataclass
from typing import Any

import torch

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.interface import Client
from fedkeep.losses import CrossEntropy, Distillation, EntropyAndLabelWeighting, FullKL, Loss, PerTeacher, WeightRule
from fedkeep.losses.discrepancy import proportions
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class ASD(FedAvg):
    """Adaptive self-distillation: CE + w_full * sum_i o_i KL_i, taught by the received model.

    o_i is proportional to exp(-beta_entropy H_i) pi(y_i)^-beta (eq. 5), with H_i the teacher's entropy at temperature 1
    in nats and pi the client's own label frequencies; over each batch the o_i sum to one. No tau^2. The official
    configuration has w_full = 2 (20 in a script for CIFAR-100) and ships with uniform weights, ``beta = beta_entropy =
    0``.
    """

    paper = "Yashwanth et al., 2023: Federated learning on heterogeneous data via adaptive self-distillation"
    reason_against_dp_sgd = (
        "ASD weighs the examples of a batch against each other by label frequencies, and DP-SGD takes each alone. "
        "Take FedLSD or FedNTD, which weigh all alike."
    )

    w_full: float = option(2.0, "weight of the distillation (lambda in the paper)", low=0.0)
    tau: float = option(2.0, "softmax temperature", low=1e-3)
    beta: float = option(1.0, "how much rare labels count", low=0.0)
    beta_entropy: float = option(1.0, "how little an unsure teacher counts", low=0.0)

    def rule(self) -> WeightRule:
        """Return which part of the divergence is learned."""
        return FullKL(self.w_full)

    def local_loss(self, client: Client[Any], model: Weights) -> Loss:
        frequency = proportions(torch.bincount(client.data["label"], minlength=client.num_classes)).float()
        weighting = EntropyAndLabelWeighting(frequency, self.beta, self.beta_entropy)
        return CrossEntropy() + Distillation((model,), self.rule(), self.tau, "none", example_weights=weighting)


@dataclass(frozen=True)
class FedNTDASD(ASD):
    """FedNTD with ASD's weights: of the divergence only the part over the classes that are not the label."""

    title = "FedNTD+ASD"

    def rule(self) -> WeightRule:
        return PerTeacher(torch.zeros(1), torch.tensor([self.w_full]))

    def idle_part(self, num_classes: int, num_tasks: int) -> str:
        return (
            "with two classes there is one beside the label, so that nothing is distilled" if num_classes == 2 else ""
        )
