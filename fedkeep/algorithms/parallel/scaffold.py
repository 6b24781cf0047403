"""SCAFFOLD: control variates take out the drift of each client's gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedkeep.aggregation.mean import Aggregation, aggregate, effective_steps
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy, LinearTerm
from fedkeep.models import Weights
from fedkeep.models.weights import add, find_mismatch, mean, scale, subtract
from fedkeep.options import option


@dataclass
class ControlVariate:
    """What the server keeps, and what each client keeps.

    Attributes
    ----------
    c : Weights
        The control variate, with a model's names; empty at first, which means zero.
    """

    c: Weights = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class FitWithControlVariate(Fit):
    """A fit, and how the client's control variate changed.

    Attributes
    ----------
    change : Weights
        The new control variate minus the last one.
    """

    change: Weights


@dataclass(frozen=True)
class SCAFFOLD(Algorithm[ControlVariate, ControlVariate]):
    """Stochastic controlled averaging: steps along g - c_i + c, then c_i <- c_i - c + (w - w_i) / (K_i lr) (option II).

    The server adds to c the mean change of the c_i times M / N, for M replies of N clients (algorithm 1). With momentum
    rho, K_i is the effective number of steps, as in FedNTD's program. From c = 0 the first round is FedAvg's, bit for
    bit. Two models' sizes are sent each way. Without clipping it may diverge at high momentum: chance accuracy in
    published tables is that.
    """

    paper = "Karimireddy et al., 2020: SCAFFOLD, stochastic controlled averaging for federated learning"
    needs = ("sgd",)

    aggregation: Aggregation = option("num_examples", "whether clients count by their examples, or all alike")

    def round(self, server: Server[ControlVariate], cohort: Cohort) -> None:
        """Let all clients train with corrected gradients, average their models, and update c."""
        c = server.state.c or scale(server.model, 0.0)
        replies = cohort.ask(self.train, server.model, c)
        server.model = aggregate(replies, self.aggregation)
        change = mean([reply.change for reply in replies.values()])
        server.state.c = add(c, change, len(replies) / server.num_clients)

    def validate_reply(self, server: Server[ControlVariate], reply: Any, examples: int) -> str | None:
        if not isinstance(reply, FitWithControlVariate):
            return None
        if mismatch := find_mismatch(reply.change, server.initial_model):
            return f"a change of its control variate of another form: {mismatch}"
        return None

    @on_client
    def train(self, client: Client[ControlVariate], model: Weights, c: Weights) -> FitWithControlVariate:
        """Train with the drift of the client's own gradient taken out, and update its control variate."""
        c_i = client.state.c or scale(model, 0.0)
        fit = client.fit(model, CrossEntropy() + LinearTerm(subtract(c, c_i)))
        rate = client.training.lr_in_round(client.round) * effective_steps(fit.num_steps, client.training.momentum)
        # Without steps, or with a learning rate of 0, the training showed nothing of the client's gradient.
        new = add(subtract(c_i, c), subtract(model, fit.model), 1 / rate) if rate else c_i
        client.state.c = new
        return FitWithControlVariate(**vars(fit), change=subtract(new, c_i))
