"""FedEWC: elastic weight consolidation, each client by its own data."""

from dataclasses import dataclass, field
from typing import Any

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.algorithms.incremental.class_incremental import CEClasses, label_loss
from fedkeep.interface import Algorithm, Client, Cohort, Fit, NoState, Server, on_client
from fedkeep.losses import ZERO_LOSS, Loss, QuadraticPenalty
from fedkeep.losses.penalties import merge_fisher, pad_rows
from fedkeep.models import Weights
from fedkeep.options import option

MAX_FISHER = 1e-4
"""The largest Fisher information of a parameter."""


@dataclass
class EWCState:
    """What elastic weight consolidation keeps.

    ``anchor``: The last model of the task before.
    ``fisher``: The Fisher information of each parameter on the client's data.
    """

    anchor: Weights = field(default_factory=dict)
    fisher: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class FedEWC(Algorithm[NoState, EWCState]):
    """Federated elastic weight consolidation: CE[new] + w_penalty / 2 * sum_j F_j (w_j - a_j)^2.

    a is the last global model of the task before. F is the mean over the client's batches of the squared gradient,
    clipped at 1e-4 and merged over tasks by their share of the classes. Rows of new classes are free.

    The code of TARGET, which others reused, computes the penalty of another network than the one that it trains: it has
    no gradient. What is published as EWC may be plain training without weight decay.
    """

    title = "FedEWC"
    paper = "Kirkpatrick et al., 2017: Overcoming catastrophic forgetting; federated as in the code of TARGET (2023)"
    reason_against_dp_sgd = (
        "FedEWC uses the Fisher information of examples, which epsilon would not cover. Take FedLwF."
    )

    w_penalty: float = option(1000.0, "weight of the penalty", low=0.0)
    ce_classes: CEClasses = option("new", "labels among the task's classes, or among all that were seen")
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")

    def round(self, server: Server, cohort: Cohort) -> None:
        server.model = aggregate(cohort.ask(self.train, server.model), self.aggregation)

    def end_task(self, server: Server, clients: Cohort) -> None:
        clients.ask(self.consolidate, server.model)

    @on_client
    def train(self, client: Client[EWCState], model: Weights) -> Fit:
        """Train on the task's labels, with the penalty for old tasks."""
        return client.fit(model, label_loss(client, self.ce_classes) + ewc_penalty(client.state, model, self.w_penalty))

    @on_client
    def consolidate(self, client: Client[EWCState], model: Weights) -> None:
        """Compute the Fisher information of the task's last model on the client's data."""
        client.state = consolidate(client, client.state, model)


def consolidate(client: Client[Any], before: EWCState, model: Weights) -> EWCState:
    """Return what is kept after a task that ended with ``model``; see `FedEWC`.

    ``before``: What was kept so far. It stays if the client has no example of this task.
    """
    if not len(client.data["label"]):
        return before
    fisher = client.fisher(model, batch=max(client.training.batch_size, 2))
    merged = merge_fisher(before.fisher, fisher, client.num_old_classes / client.num_classes, MAX_FISHER)
    return EWCState({name: model[name] for name in fisher}, merged)


def ewc_penalty(ewc_state: EWCState, model: Weights, weight: float) -> Loss:
    """Return weight / 2 * sum_j F_j (w_j - a_j)^2, on a model whose head may have been expanded since."""
    if not ewc_state.anchor:
        return ZERO_LOSS
    return QuadraticPenalty(pad_rows(ewc_state.anchor, model), weight / 2, pad_rows(ewc_state.fisher, model))
