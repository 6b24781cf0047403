"""FedDF: the mean of the clients' models goes on learning what these models say together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedkeep.aggregation import Fusion, fused
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import NOTHING, CrossEntropy
from fedkeep.losses.answers import taught
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FedDF(Algorithm):
    """Ensemble distillation: FedAvg, then KL from softmax of the clients' mean logits on a public set, at the server.

    Clients do what FedAvg's do; no client sees the public set. The paper distils with Adam until a validation set says
    stop; here the recipe's optimiser takes ``passes`` over the set.
    """

    title = "FedDF"
    paper = "Lin et al., 2020: Ensemble distillation for robust model fusion in federated learning"
    needs = ("public",)

    passes: int = option(1, "passes over the public set", low=0)
    tau: float = option(1.0, "softmax temperature; there is no tau squared", low=1e-3)
    fusion: Fusion = option("by_count", "whether clients count by their examples in the mean, or all alike")

    def round(self, server: Server, cohort: Cohort) -> None:
        replies = cohort.ask(self.train, server.model)
        server.model = fused(replies, self.fusion)
        said = torch.stack([server.predict(reply.model) for reply in replies.values()]).mean(0)
        lesson = taught(said, server.data, self.tau)
        if lesson is not NOTHING:
            server.model = server.fit(server.model, lesson, server.data, passes=self.passes).model

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the global model on the client's examples."""
        return client.fit(model, CrossEntropy())
