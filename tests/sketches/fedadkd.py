"""FedADKD on the real interface: one number down and one up beside the model, and a weight by label balance."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log1p

import torch

from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, each, on_client
from fedkeep.models import Weights
from fedkeep.models.weights import mean
from fedkeep.objectives import CrossEntropy, Distillation, PerTeacher
from fedkeep.objectives.discrepancy import proportions
from fedkeep.options import option


@dataclass
class Balances:
    """What the server keeps: everybody's Gini impurity, as last told."""

    gini: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class BalancedFit(Fit):
    """A fit, and the Gini impurity of the labels it saw."""

    gini: float


@dataclass(frozen=True)
class FedADKD(Algorithm[Balances]):
    """Adaptive decoupled distillation: CE + phi_i w_target TC + w_nontarget NT, taught by the received model.

    phi_i = M x_i / sum_j x_j over the cohort, x = G or ln(1 + delta G); a client never heard of has G = 1.
    """

    title = "Sketch FedADKD"

    w_target: float = option(1.0, "weight of the target part (alpha in the paper)", low=0.0)
    w_nontarget: float = option(1.0, "weight of the non-target part (beta in the paper)", low=0.0)
    delta: float | None = option(1.0, "how strongly differences are compressed; none: not at all", low=0.0)

    def round(self, server: Server[Balances], cohort: Cohort) -> None:
        known = server.state.gini
        balance = {client.id: self.compressed(known.get(client.id, 1.0)) for client in cohort}
        total = sum(balance.values())
        phi = {name: len(balance) * x / total if total else 1.0 for name, x in balance.items()}
        replies = cohort.ask(self.train, server.model, each(phi))
        server.model = mean([reply.model for reply in replies.values()])
        known |= {name: reply.gini for name, reply in replies.items()}

    def compressed(self, gini: float) -> float:
        """Return x = f(G)."""
        return gini if self.delta is None else log1p(self.delta * gini)

    @on_client
    def train(self, client: Client, model: Weights, phi: float) -> BalancedFit:
        """Train on labels and on what the received model says, and tell how balanced the labels are."""
        rule = PerTeacher(torch.tensor([phi * self.w_target]), torch.tensor([self.w_nontarget]))
        fit = client.fit(model, CrossEntropy() + Distillation((model,), rule, tau=1.0, scale="none"))
        shares = proportions(client.data["label"].bincount(minlength=client.classes))
        return BalancedFit(fit.model, fit.examples, fit.steps, fit.loss, gini=1 - float(shares.square().sum()))
