"""CWC (reconstructed): a penalty that is passed along protects what mattered to earlier clients."""

from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any

from fedkeep.interface import Algorithm, Client, Cohort, Fit, Range, Server, on_client
from fedkeep.losses import ZERO_LOSS, CrossEntropy, Loss, QuadraticPenalty
from fedkeep.models import Weights
from fedkeep.models.weights import add, find_mismatch, scale
from fedkeep.options import option

MAX_IMPORTANCE = 1e30
"""Larger importances are refused: those of the next clients are added, and the sums must stay finite in float32."""


@dataclass
class AccumulatedImportance:
    """What the server keeps.

    ``importance``: Of every parameter for the clients so far; empty means zero.
    """

    importance: Weights = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class FitWithImportance(Fit):
    """A fit, and the importances after it.

    ``importance``: Of every parameter, with the client's added.
    """

    importance: Annotated[Weights, Range(0, MAX_IMPORTANCE)]


@dataclass(frozen=True)
class CWC(Algorithm[AccumulatedImportance]):
    """Cyclical weight consolidation, RECONSTRUCTED: CE + w_penalty / 2 * sum_j O_j (w_j - a_j)^2, a the received model.

    No code and no full text of the paper was at hand, only its abstract and a summary: it trains serially, regularises
    by a consolidation matrix of importances that is attenuated by a factor when clients are visited again. Ours is one
    reading: after its training a client adds to O what mattered to it, and O is multiplied by ``attenuation`` at the
    start of every round. O is capped where lr * w_penalty * O would exceed 1, beyond which a step overshoots. Two
    models are sent per client. With ``w_penalty=0`` this is FedSeq.

    What mattered is the diagonal Fisher information at the new model, of at most 500 examples.
    """

    title = "CWC (reconstructed)"
    paper = "Cyclical weight consolidation, 2024: arXiv 2405.10647 (reconstructed from its abstract)"
    needs = ("sgd",)
    sequential = True

    w_penalty: float = option(100.0, "weight of the penalty (lambda; grid 1, 10, 100, 1000)", low=0.0)
    attenuation: float = option(0.5, "share that importances keep each round (sigma)", low=0.0, high=1.0)

    @classmethod
    def name(cls) -> str:
        return "cwc"

    def round(self, server: Server[AccumulatedImportance], cohort: Cohort) -> None:
        """Pass the model and the importances from client to client."""
        importance: Weights = scale(server.state.importance, self.attenuation)
        for client in cohort:
            if reply := client.ask(self.train, server.model, importance):
                server.model, importance = reply.model, reply.importance
        server.state.importance = importance

    def validate_reply(self, server: Server[AccumulatedImportance], reply: Any, examples: int) -> str | None:
        if not isinstance(reply, FitWithImportance):
            return None
        parameters = {name: server.initial_model[name] for name in server.parameter_names}
        if mismatch := find_mismatch(reply.importance, parameters):
            return f"importances of another form than the model's parameters: {mismatch}"
        return None

    @on_client
    def train(self, client: Client, model: Weights, importance: Weights) -> FitWithImportance:
        """Train the model of the previous client near it, and add what matters to this client."""
        fit = client.fit(model, CrossEntropy() + self.penalty(client, model, importance))
        added = client.fisher(fit.model, 500)
        return FitWithImportance(**vars(fit), importance=add(importance, added) if importance else added)

    def penalty(self, client: Client, model: Weights, importance: Weights) -> Loss:
        """Return the penalty of a client.

        ``client``: Whose learning rate caps the importances.
        ``importance``: O, by parameter; empty means zero.
        """
        if not importance or not self.w_penalty:
            return ZERO_LOSS
        rate = client.training.lr_in_round(client.round)
        cap = 1 / (rate * self.w_penalty) if rate else inf
        capped = {name: value.clamp(max=cap) for name, value in importance.items()}
        return QuadraticPenalty(model, self.w_penalty / 2, capped)
