"""FedCurv: clients are held near each other's models, along the directions that matter to each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from fedkeep.aggregation import Fusion, fused
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, each, on_client
from fedkeep.losses import NOTHING, CrossEntropy, Objective, Quadratic
from fedkeep.models import Weights
from fedkeep.models.weights import add, scale
from fedkeep.options import option


@dataclass
class Curvature:
    """Fisher information F and its product with the weights, by parameter; empty means zero.

    A client keeps what it last added to the server's sums.
    """

    fisher: Weights = field(default_factory=dict)
    product: Weights = field(default_factory=dict)

    def plus(self, other: Curvature, sign: float = 1.0) -> Curvature:
        """Return self + sign * other."""
        return Curvature(_sum(self.fisher, other.fisher, sign), _sum(self.product, other.product, sign))


@dataclass
class Sums:
    """What the server keeps: the sums over all clients ever seen and, only to repeat a defect, everybody's share."""

    total: Curvature = field(default_factory=Curvature)
    shares: dict[str, Curvature] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CurvedFit(Fit):
    """A fit, and how the client's share of the two sums changed."""

    change: Curvature


@dataclass(frozen=True)
class FedCurv(Algorithm[Sums, Curvature]):
    """Federated curvature: CE + w_penalty * sum_p [P_p w_p^2 - 2 Q_p w_p] from the second round on.

    P = sum_{j != i} F_j and Q = sum_{j != i} F_j w_j over all clients j ever seen, at their last models: elastic weight
    consolidation against everybody else (eq. 3, without its factor 1/2, as in FedNTD's program). It is minimised as
    P (w - Q / P)^2, which differs by a constant. Three times a model travels each way.

    ``fisher=sample`` is the paper's diagonal Fisher information, over at most 500 examples; ``batch``, as in FedNTD's
    program, squares the mean gradient of each batch, which is smaller by about the batch size. That program subtracts
    a client's own share in place from the sum that the round's later clients use too; ``compat_inplace`` repeats the
    defect, to explain published numbers; the server then keeps two models for each client.

    Steps of SGD overshoot, and grow from step to step, where lr * w_penalty * P is above 1 for a weight. With
    ``sample`` that happened after 899 rounds of SFedKD's table 1, lr 0.01, a hundred clients (docs/reproduction.md).
    """

    paper = "Shoham et al., 2019: Overcoming forgetting in federated learning on non-IID data"

    w_penalty: float = option(1.0, "weight of the penalty (lambda in the paper)", low=0.0)
    fisher: Literal["sample", "batch"] = option("sample", "gradients that are squared: of an example, or of a batch")
    compat_inplace: bool = option(False, "let later clients of a round miss the shares of earlier ones")
    fusion: Fusion = option("by_count", "whether clients count by their examples, or all alike")

    def round(self, server: Server[Sums], cohort: Cohort) -> None:
        kept = server.state
        sent: dict[str, Curvature] = {}
        left = kept.total
        for client in cohort:
            sent[client.id] = left
            if self.compat_inplace:
                left = left.plus(kept.shares.get(client.id, Curvature()), -1)
        replies = cohort.ask(self.train, server.model, each(sent))
        server.model = fused(replies, self.fusion)
        for name, reply in replies.items():
            kept.total = kept.total.plus(reply.change)
            if self.compat_inplace:
                kept.shares[name] = kept.shares.get(name, Curvature()).plus(reply.change)

    @on_client
    def train(self, client: Client[Curvature], model: Weights, sums: Curvature) -> CurvedFit:
        """Train near the others' models, and tell the curvature of the own loss at the new one."""
        own = client.state
        fit = client.fit(model, CrossEntropy() + self.penalty(sums, own))
        size = client.training.batch_size if self.fisher == "batch" else 1
        fisher = client.fisher(fit.model, 500 if size == 1 else (500 // size + 1) * size, size)
        product = {name: value * fit.model[name] for name, value in fisher.items()}
        client.state = Curvature(fisher, product)
        return CurvedFit(**vars(fit), change=client.state.plus(own, -1))

    def penalty(self, sums: Curvature, own: Curvature) -> Objective:
        """Return the penalty of a client, whose own share is taken out of the sums."""
        if not sums.fisher:
            return NOTHING
        # What is left of a sum after a subtraction may be below zero by rounding, where nobody else had any curvature.
        others = sums.plus(own, -1)
        p = {name: value.clamp(min=0) for name, value in others.fisher.items()}
        anchor = {name: torch.where(value > 0, others.product[name] / value, 0.0) for name, value in p.items()}
        return Quadratic(anchor, self.w_penalty, p)


def _sum(a: Weights, b: Weights, sign: float) -> Weights:
    """Return a + sign * b, where empty means zero."""
    return add(a, b, sign) if a and b else scale(b, sign) if b else a
