"""FedADKD: decoupled distillation from the received model, its target part weighted by each client's label balance."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log1p
from typing import Literal

import torch

from fedkeep.fusion import Fusion, fused
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, each, on_client
from fedkeep.models import Weights
from fedkeep.objectives import CrossEntropy, Distillation, PerTeacher
from fedkeep.objectives.discrepancy import proportions
from fedkeep.options import option


@dataclass
class Balances:
    """What the server keeps: everybody's Gini impurity, as last told."""

    gini: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class BalancedFit(Fit):
    """A fit, and the Gini impurity 1 - sum_c p_c^2 of the labels it saw."""

    gini: float


@dataclass(frozen=True)
class FedADKD(Algorithm[Balances]):
    """Adaptive decoupled knowledge distillation: CE + phi_i w_target TC + w_nontarget NT at temperature 1, no tau^2.

    phi_i = M x_i / sum_j x_j over the cohort of M, x = ln(1 + delta G), G the Gini impurity of a client's labels; the
    mean of phi over the cohort is 1 (eqs. 6 and 7).

    What the paper leaves open, and what is done here:

    - it defines f(G) and then prints G: f is used; ``delta=0`` gives the printed formula, its limit;
    - w_target (alpha) and delta have no printed value: 1 and 1;
    - phi is computed before the clients have computed G: a client never heard of counts as G = 1 (``gini_init=one``),
      or as the mean of those that are known (``mean``);
    - algorithm 1 averages uniformly, its base code by examples: uniform.

    Ablations: ``phi=off`` sets phi to 1; ``w_target=0`` is FedNTD at temperature 1 with the same fusion, bit for bit.
    """

    title = "FedADKD"
    paper = "FedADKD, 2025: Adaptive decoupled knowledge distillation in federated learning (thesis)"

    w_target: float = option(1.0, "weight of the target part (alpha in the paper)", low=0.0)
    w_nontarget: float = option(1.0, "weight of the non-target part (beta in the paper)", low=0.0)
    delta: float = option(1.0, "how strongly differences of balance are compressed; 0: not at all", low=0.0)
    phi: Literal["on", "off"] = option("on", "whether the target part is weighted by balance (off: ablation)")
    gini_init: Literal["one", "mean"] = option("one", "what a client never heard of counts as")
    fusion: Fusion = option("uniform", "whether clients count by their examples, or all alike")

    def round(self, server: Server[Balances], cohort: Cohort) -> None:
        weights = self.balance_weights([client.id for client in cohort], server.state.gini)
        replies = cohort.ask(self.train, server.model, each(weights))
        server.model = fused(replies, self.fusion)
        server.state.gini |= {name: reply.gini for name, reply in replies.items()}

    def balance_weights(self, clients: list[str], known: dict[str, float]) -> dict[str, float]:
        """Return phi for each client of the cohort (eq. 7); 1 for all if none has more than one class."""
        unknown = sum(known.values()) / len(known) if self.gini_init == "mean" and known else 1.0
        gini = [known.get(client, unknown) for client in clients]
        x = [log1p(self.delta * g) if self.delta else g for g in gini]
        if self.phi == "off" or not sum(x):
            return dict.fromkeys(clients, 1.0)
        return {client: len(x) * value / sum(x) for client, value in zip(clients, x, strict=True)}

    @on_client
    def train(self, client: Client, model: Weights, phi: float) -> BalancedFit:
        """Train on labels and on what the received model says, and tell how balanced the labels are."""
        rule = PerTeacher(torch.tensor([phi * self.w_target]), torch.tensor([self.w_nontarget]))
        fit = client.fit(model, CrossEntropy() + Distillation((model,), rule, tau=1.0, scale="none"))
        shares = proportions(client.data["label"].bincount(minlength=client.classes))
        return BalancedFit(**vars(fit), gini=1 - float(shares.square().sum()) if fit.examples else 0.0)
