"""FedGKD: the average of the last global models teaches."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedkeep.aggregation import Fusion, fused
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import NOTHING, CrossEntropy, Distillation, Whole
from fedkeep.models import Weights
from fedkeep.models.weights import mean
from fedkeep.options import option


@dataclass
class Window:
    """What the server keeps: the last global models, the oldest first."""

    models: list[Weights] = field(default_factory=list)


@dataclass(frozen=True)
class FedGKD(Algorithm[Window]):
    """Global knowledge distillation: CE + w_full * tau^2 KL, taught by the mean of the last ``window`` global models.

    From the second round on; the server averages uniformly, as the official code does. One more model travels down.
    """

    title = "FedGKD"
    paper = "Yao et al., 2021: FedGKD, local-global knowledge distillation in heterogeneous federated learning"

    window: int = option(5, "global models that are averaged into the teacher", low=1)
    w_full: float = option(0.1, "weight of the distillation (gamma / 2 in the paper)", low=0.0)
    tau: float = option(1.0, "softmax temperature", low=1e-3)
    fusion: Fusion = option("uniform", "whether clients count by their examples, or all alike")

    def round(self, server: Server[Window], cohort: Cohort) -> None:
        kept = server.state
        teacher = mean(kept.models) if kept.models else None
        server.model = fused(cohort.ask(self.train, server.model, teacher), self.fusion)
        kept.models = [*kept.models, server.model][-self.window :]

    @on_client
    def train(self, client: Client, model: Weights, teacher: Weights | None) -> Fit:
        """Train the global model on labels and on what the mean of its predecessors says."""
        taught = NOTHING if teacher is None else Distillation((teacher,), Whole(self.w_full), self.tau)
        return client.fit(model, CrossEntropy() + taught)
