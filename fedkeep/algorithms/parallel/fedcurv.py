"""FedCurv: a penalty keeps clients near each other's models, along the directions that matter to each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import ZERO_LOSS, CrossEntropy, Loss, QuadraticPenalty
from fedkeep.models import Weights
from fedkeep.models.weights import add, find_mismatch, scale
from fedkeep.options import option


@dataclass
class Curvature:
    """Fisher information F and its product with the weights, by parameter; empty means zero.

    A client keeps what it last added to the server's sums.

    Attributes
    ----------
    fisher : Weights
        F, or a sum of several.
    product : Weights
        F w, or a sum of several.
    """

    fisher: Weights = field(default_factory=dict)
    product: Weights = field(default_factory=dict)

    def plus(self, other: Curvature, sign: float = 1.0) -> Curvature:
        """Return self + sign * other."""
        return Curvature(_sum(self.fisher, other.fisher, sign), _sum(self.product, other.product, sign))


@dataclass
class CurvatureSum:
    """What the server keeps.

    Attributes
    ----------
    total : Curvature
        The sum over all clients that ever took part, at their last models.
    """

    total: Curvature = field(default_factory=Curvature)


@dataclass(frozen=True, eq=False)
class FitWithCurvature(Fit):
    """A fit, and how the client's share of the sums changed.

    Attributes
    ----------
    change : Curvature
        The new share minus the last one.
    """

    change: Curvature


@dataclass(frozen=True)
class FedCurv(Algorithm[CurvatureSum, Curvature]):
    """Federated curvature: CE + w_penalty * sum_p [P_p w_p^2 - 2 Q_p w_p] from the second round on.

    P = sum_{j != i} F_j and Q = sum_{j != i} F_j w_j over all clients j that ever took part, at their last models:
    elastic weight consolidation against everybody else (eq. 3, without its factor 1/2, as in FedNTD's program). It is
    minimised as P (w - Q / P)^2, which differs by a constant. Three models' sizes are sent each way.

    ``fisher=sample`` is the paper's diagonal Fisher information, over at most 500 examples; ``batch``, as in FedNTD's
    program, squares the mean gradient of each batch, which is smaller by about the batch size.

    Steps of SGD overshoot, and grow from step to step, where lr * w_penalty * P is above 1 for a weight. With
    ``sample`` that happened after 899 rounds of SFedKD's table 1, lr 0.01, a hundred clients (docs/reproduction.md).
    """

    paper = "Shoham et al., 2019: Overcoming forgetting in federated learning on non-IID data"

    w_penalty: float = option(1.0, "weight of the penalty (lambda in the paper)", low=0.0)
    fisher: Literal["sample", "batch"] = option("sample", "gradients that are squared: of an example, or of a batch")
    aggregation: Aggregation = option("num_examples", "whether clients count by their examples, or all alike")

    def round(self, server: Server[CurvatureSum], cohort: Cohort) -> None:
        """Let all clients train near the others' models, average theirs, and update the sums."""
        replies = cohort.ask(self.train, server.model, server.state.total)
        server.model = aggregate(replies, self.aggregation)
        for reply in replies.values():
            server.state.total = server.state.total.plus(reply.change)

    def validate_reply(self, server: Server[CurvatureSum], reply: Any, examples: int) -> str | None:
        if not isinstance(reply, FitWithCurvature):
            return None
        parameters = {name: server.initial_model[name] for name in server.parameter_names}
        mismatches = (find_mismatch(sent, parameters) for sent in (reply.change.fisher, reply.change.product))
        if mismatch := next(filter(None, mismatches), None):
            return f"curvature of another form than the model's parameters: {mismatch}"
        return None

    @on_client
    def train(self, client: Client[Curvature], model: Weights, total: Curvature) -> FitWithCurvature:
        """Train near the others' models, and return the curvature of the local loss at the new one."""
        share = client.state
        fit = client.fit(model, CrossEntropy() + self.penalty(total, share))
        size = client.training.batch_size if self.fisher == "batch" else 1
        fisher = client.fisher(fit.model, 500 if size == 1 else (500 // size + 1) * size, size)
        product = {name: value * fit.model[name] for name, value in fisher.items()}
        client.state = Curvature(fisher, product)
        return FitWithCurvature(**vars(fit), change=client.state.plus(share, -1))

    def penalty(self, total: Curvature, share: Curvature) -> Loss:
        """Return the penalty of a client (eq. 3).

        Parameters
        ----------
        total : Curvature
            The sums over all clients.
        share : Curvature
            The client's own part of them, which is taken out.

        Returns
        -------
        Loss
        """
        if not total.fisher:
            return ZERO_LOSS
        # Where nobody else had any curvature, a subtraction may leave less than zero, by rounding.
        others = total.plus(share, -1)
        p = {name: value.clamp(min=0) for name, value in others.fisher.items()}
        anchor = {name: torch.where(value > 0, others.product[name] / value, 0.0) for name, value in p.items()}
        return QuadraticPenalty(anchor, self.w_penalty, p)


def _sum(a: Weights, b: Weights, sign: float) -> Weights:
    """Return a + sign * b, where empty means zero."""
    return add(a, b, sign) if a and b else scale(b, sign) if b else a
