"""FedNova: clients that took more steps count no more for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedkeep.aggregation.normalised import effective_steps, normalised_mean
from fedkeep.interface import Algorithm, Client, Cohort, Fit, NoState, Server, on_client
from fedkeep.losses import NOTHING, CrossEntropy, Slope
from fedkeep.models import Weights
from fedkeep.models.weights import scale, subtract
from fedkeep.options import option


@dataclass
class Own:
    """What a client keeps, only with ``compat_ccvr``: its mean gradient at its last visit; empty before the first."""

    gradient: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class FedNova(Algorithm[NoState, Own]):
    """Normalised averaging: w <- w - (sum_i p_i a_i) sum_i (p_i / a_i) (w - w_i), a_i the effective steps of client i.

    With equal a_i this is FedAvg, bit for bit; batch norm's statistics are averaged as there.

    FedNTD's program runs with a correction between clients, meant as in SCAFFOLD, of which one half is never computed:
    a client that comes back subtracts its own last mean gradient (w - w_i) / (lr a_i) from every step.
    ``compat_ccvr`` repeats that, to explain published numbers.
    """

    title = "FedNova"
    paper = "Wang et al., 2020: Tackling the objective inconsistency problem in heterogeneous federated optimization"

    compat_ccvr: bool = option(False, "subtract a client's own last mean gradient, as a published program does")

    def round(self, server: Server, cohort: Cohort) -> None:
        replies = cohort.ask(self.train, server.model)
        buffers = set(server.model) - set(server.parameters)
        server.model = normalised_mean(server.model, replies, server.training.momentum, buffers)

    @on_client
    def train(self, client: Client[Own], model: Weights) -> Fit:
        """Train the global model on the client's own examples."""
        known = client.state.gradient
        fit = client.fit(model, CrossEntropy() + (Slope(scale(known, -1.0)) if known else NOTHING))
        rate = client.training.lr_at(client.round) * effective_steps(fit.steps, client.training.momentum)
        if self.compat_ccvr and rate:
            client.state.gradient = scale(subtract(model, fit.model), 1 / rate)
        return fit
