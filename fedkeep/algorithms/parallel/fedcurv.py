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

MAX_CURVATURE = 1e30
"""Larger numbers are refused in any case: sums over clients must stay finite in float32."""
OVERSHOOT = 10.0
"""How many times the curvature from which steps of SGD overshoot a client's may be."""
MAX_WEIGHT = 10.0
"""How many times the largest weight of the model, or 1, weights of earlier models may have been."""


@dataclass
class Curvature:
    """Fisher information F and its product with the weights, by parameter; empty means zero.

    A client keeps what it last added to the server's sums.

    ``fisher``: F, or a sum of several.
    ``product``: F w, or a sum of several.
    """

    fisher: Weights = field(default_factory=dict)
    product: Weights = field(default_factory=dict)

    def plus(self, other: Curvature, sign: float = 1.0) -> Curvature:
        """Return self + sign * other."""
        return Curvature(_sum(self.fisher, other.fisher, sign), _sum(self.product, other.product, sign))


@dataclass
class CurvatureSum:
    """What the server keeps.

    ``total``: The sum over all clients that ever took part, at their last models.
    """

    total: Curvature = field(default_factory=Curvature)


@dataclass(frozen=True, eq=False)
class FitWithCurvature(Fit):
    """A fit, and how the client's share of the sums changed.

    ``change``: The new share minus the last one.
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
    A client is refused whose F alone changes by ten times that: what it sends would end the others' trainings.
    """

    paper = "Shoham et al., 2019: Overcoming forgetting in federated learning on non-IID data"
    reason_against_merging = "a client takes its own share out of the server's sum, which must be what it sent."

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
        largest = max(1.0, *(_largest({n: model[n] for n in parameters}) for model in (server.model, reply.model)))
        limit = self.max_fisher_change(server)
        limits = {"fisher": limit, "product": min(limit * MAX_WEIGHT * largest, MAX_CURVATURE)}
        for name, most in limits.items():
            if not (found := _largest(getattr(reply.change, name))) <= most:
                return f"a change of its curvature's {name} by {found:.3g}, where at most {most:.3g} is possible"
        return None

    def max_fisher_change(self, server: Server[CurvatureSum]) -> float:
        """Return by how much a client's Fisher information may change.

        Of one that has taken part before it may fall too, by what it was. Where others have ten times the curvature
        from which SGD overshoots, each step of a client takes its weights 19 times as far from their mean, and no
        training could go on.
        """
        training = server.training
        rate = training.lr_in_round(server.round) * self.w_penalty
        if not rate or training.optimizer != "sgd" or training.max_grad_norm is not None or server.num_clients == 1:
            return MAX_CURVATURE
        return min(OVERSHOOT * (1 + training.momentum) / rate, MAX_CURVATURE)

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

        ``total``: The sums over all clients.
        ``share``: The client's own part of them, which is taken out.
        """
        if not total.fisher:
            return ZERO_LOSS
        # Where nobody else had any curvature, a subtraction may leave less than zero, by rounding.
        others = total.plus(share, -1)
        p = {name: value.clamp(min=0) for name, value in others.fisher.items()}
        anchor = {name: torch.where(value > 0, others.product[name] / value, 0.0) for name, value in p.items()}
        return QuadraticPenalty(anchor, self.w_penalty, p)


def _largest(weights: Weights) -> float:
    """Return the largest absolute value; 0 without any."""
    return max((float(tensor.abs().max()) for tensor in weights.values() if tensor.numel()), default=0.0)


def _sum(a: Weights, b: Weights, sign: float) -> Weights:
    """Return a + sign * b, where empty means zero."""
    return add(a, b, sign) if a and b else scale(b, sign) if b else a
