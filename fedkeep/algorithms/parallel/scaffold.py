"""SCAFFOLD: control variates take out the drift of each client's gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedkeep.aggregation import Fusion, fused
from fedkeep.aggregation.normalised import effective_steps
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy, Slope
from fedkeep.models import Weights
from fedkeep.models.weights import add, mean, scale, subtract
from fedkeep.options import option


@dataclass
class Control:
    """What a party keeps: its control variate, in the form of a model; empty at first, which means zero."""

    c: Weights = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ControlledFit(Fit):
    """A fit, and how far the client's control variate moved."""

    moved: Weights


@dataclass(frozen=True)
class SCAFFOLD(Algorithm[Control, Control]):
    """Stochastic controlled averaging: steps along g - c_i + c, then c_i <- c_i - c + (w - w_i) / (K_i lr) (option II).

    The server adds to c the mean movement of the c_i times M / N, for M answers of N clients. With momentum rho, K_i is
    the effective number of steps (``division=effective``, as in FedNTD's program; ``steps`` takes the bare number).
    From c = 0 the first round is FedAvg's, bit for bit. Twice the model travels each way. Without clipping it may
    diverge at high momentum: chance accuracy in published tables is that.
    """

    paper = "Karimireddy et al., 2020: SCAFFOLD, stochastic controlled averaging for federated learning"

    division: Literal["effective", "steps"] = option("effective", "what the control variates are divided by")
    fusion: Fusion = option("by_count", "whether clients count by their examples, or all alike")

    def round(self, server: Server[Control], cohort: Cohort) -> None:
        c = server.state.c or scale(server.model, 0.0)
        replies = cohort.ask(self.train, server.model, c)
        server.model = fused(replies, self.fusion)
        moved = mean([reply.moved for reply in replies.values()])
        server.state.c = add(c, moved, len(replies) / server.population)

    @on_client
    def train(self, client: Client[Control], model: Weights, c: Weights) -> ControlledFit:
        """Train with the drift of the client's own gradient taken out, and refresh what is known of it."""
        own = client.state.c or scale(model, 0.0)
        fit = client.fit(model, CrossEntropy() + Slope(subtract(c, own)))
        momentum = client.training.momentum if self.division == "effective" else 0.0
        rate = client.training.lr_at(client.round) * effective_steps(fit.steps, momentum)
        # Who could not move, for want of examples or of a learning rate, has learned nothing of its gradient.
        new = add(subtract(own, c), subtract(model, fit.model), 1 / rate) if rate else own
        client.state.c = new
        return ControlledFit(**vars(fit), moved=subtract(new, own))
