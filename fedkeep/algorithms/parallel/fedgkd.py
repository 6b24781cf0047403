"""FedGKD: the average of the last global models teaches."""

from dataclasses import dataclass, field

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import ZERO_LOSS, CrossEntropy, Distillation
from fedkeep.models import Weights
from fedkeep.models.weights import mean
from fedkeep.options import option


@dataclass
class ModelWindow:
    """What the server keeps.

    ``models``: The last global models, the oldest first.
    """

    models: list[Weights] = field(default_factory=list)


@dataclass(frozen=True)
class FedGKD(Algorithm[ModelWindow]):
    """Global knowledge distillation: CE + w_full * tau^2 KL, taught by the mean of the last ``window`` global models.

    Distillation begins in the second round. The server averages uniformly, as the official code does. From then on each
    client receives two models.
    """

    title = "FedGKD"
    paper = "Yao et al., 2021: FedGKD, local-global knowledge distillation in heterogeneous federated learning"

    window: int = option(5, "global models that are averaged into the teacher", low=1)
    w_full: float = option(0.1, "weight of the distillation (gamma / 2 in the paper)", low=0.0)
    tau: float = option(1.0, "softmax temperature", low=1e-3)
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")

    def round(self, server: Server[ModelWindow], cohort: Cohort) -> None:
        """Average the last global models into a teacher, let all clients train, and average their models."""
        models = server.state.models
        teacher = mean(models) if models else None
        server.model = aggregate(cohort.ask(self.train, server.model, teacher), self.aggregation)
        server.state.models = [*models, server.model][-self.window :]

    @on_client
    def train(self, client: Client, model: Weights, teacher: Weights | None) -> Fit:
        """Train the global model on labels and on the predictions of the mean of its predecessors."""
        distillation = ZERO_LOSS if teacher is None else Distillation.kl(teacher, self.w_full, self.tau)
        return client.fit(model, CrossEntropy() + distillation)
