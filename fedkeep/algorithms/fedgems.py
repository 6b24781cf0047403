"""FedGEMS: a larger server trusts what it knew already, and otherwise the clients that are sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeep.algorithms.ft_kd import FTKD, Guests
from fedkeep.interface import Data, Server
from fedkeep.losses import CrossEntropy, Objective, Scaled
from fedkeep.losses.answers import taught
from fedkeep.options import option


@dataclass(frozen=True)
class FedGEMS(FTKD):
    """Federated learning of larger server models via selective knowledge fusion, on a labelled public set.

    What is learned from an image, at the server and at clients, is epsilon CE + (1 - epsilon) KD. The server's teacher
    is what its model said before, where that is right; elsewhere the mean of the clients' probabilities, each weighted
    by softmax over clients of 1 / entropy. The clients' teacher is the server's model after that. The public set is the
    recipe's auxiliary one. From the paper's summary and a public re-implementation, which has epsilon 0.75; other
    details are ours.
    """

    title = "FedGEMS"
    paper = "Cheng et al., 2021: FedGEMS, federated learning of larger server models via selective knowledge fusion"
    needs = ("auxiliary",)

    tau: float = option(1.0, "softmax temperature of the distillation", low=1e-3)
    epsilon: float = option(0.75, "share of the cross-entropy with the public set's labels", low=0.0, high=1.0)

    def consensus(self, server: Server[Guests], replies: Sequence[Tensor]) -> Tensor:
        own, labels = server.predict(server.model), server.data["label"]
        told = torch.stack([(said / self.tau).log_softmax(-1) for said in replies])
        entropy = torch.special.entr(told.exp()).sum(-1)  # 0 where a probability is 0
        sure = (1 / entropy.clamp(min=1e-3)).log_softmax(0)  # who is certain outweighs all, and stays finite
        together = self.tau * (told + sure.unsqueeze(-1)).logsumexp(0)
        return torch.where((own.argmax(-1) == labels).unsqueeze(-1), own, together)

    def shared(self, server: Server[Guests], consensus: Tensor) -> Tensor:
        return server.predict(server.model)

    def lesson(self, consensus: Tensor, public: Data) -> Objective:
        return Scaled(self.epsilon, CrossEntropy()) + taught(
            consensus, public, self.tau, 1 - self.epsilon, scale=self.kd_scale
        )
