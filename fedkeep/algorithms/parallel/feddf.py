"""FedDF: the mean of the clients' models learns the mean of their predictions on a public set."""

from dataclasses import dataclass

import torch

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import ZERO_LOSS, CrossEntropy, soft_label_loss
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FedDF(Algorithm):
    """Ensemble distillation: FedAvg, then KL from softmax of the clients' mean logits on a public set, at the server.

    Clients do what FedAvg's do; no client sees the public set. The paper distils with Adam and stops by a validation
    set; here the recipe's optimiser takes ``epochs`` over the set. The predictions are of public images as they are. If
    the recipe augments images, the student learns them on augmented ones, as with all methods that learn from
    predictions on a public set; the paper's teachers see the augmented images.
    """

    title = "FedDF"
    paper = "Lin et al., 2020: Ensemble distillation for robust model fusion in federated learning"
    needs = ("public",)
    only_averages = False  # it distils the predictions of each model

    epochs: int = option(1, "epochs over the public set", low=0)
    tau: float = option(1.0, "softmax temperature; there is no tau squared", low=1e-3)
    aggregation: Aggregation = option("num_examples", "whether clients count by their examples, or all alike")

    def round(self, server: Server, cohort: Cohort) -> None:
        """Average the clients' models, and distil their mean logits into the average (algorithm 1)."""
        replies = cohort.ask(self.train, server.model)
        server.model = aggregate(replies, self.aggregation)
        trained = [reply.model for reply in replies.values() if reply.num_steps] or [server.model]
        logits = torch.stack([server.predict(model) for model in trained]).mean(0)
        loss = soft_label_loss(logits, server.data, self.tau)
        if loss is not ZERO_LOSS:
            server.model = server.fit(server.model, loss, server.data, epochs=self.epochs).model

    @on_client
    def train(self, client: Client, model: Weights) -> Fit:
        """Train the global model on the client's examples."""
        return client.fit(model, CrossEntropy())
