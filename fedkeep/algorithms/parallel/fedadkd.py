"""FedADKD: decoupled distillation from the received model, its target part weighted by each client's label balance."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log1p
from typing import Literal

from torch import Tensor, tensor

from fedkeep.aggregation import Fusion, fused
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, each, on_client
from fedkeep.interface.steps import label_counts
from fedkeep.losses import CrossEntropy, Distillation, Objective, PerTeacher
from fedkeep.losses.discrepancy import proportions
from fedkeep.losses.readings import Mask, ReadDistillation, TargetReading
from fedkeep.models import Weights
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
      as the mean of those that are known (``mean``), or tells its label counts before it is first weighed (``true``);
    - eq. 3 prints one term, p_y^T ln(p_y^T / p_y^S), under a sum over classes on which it does not depend. Read as TC,
      as in decoupled distillation, it is ``tckd=binary``, which has no gradient where training starts; the term alone,
      which is the cross-entropy times p_y^T but for a constant, is ``single_term``. Other readings, and other ways to
      mask the target (``nckd_mask``), are in `objectives.readings`;
    - algorithm 1 averages uniformly, its base code by examples: uniform.

    Ablations: ``phi=off`` sets phi to 1; ``w_target=0`` is FedNTD at temperature 1 with the same fusion, bit for bit.
    ``w_target_iid`` gives clients of balanced labels (G of ``iid_from`` and more) a target weight of their own, with
    phi = 1 for all (figure 4, whose procedure is not told).
    """

    title = "FedADKD"
    paper = "FedADKD, 2025: Adaptive decoupled knowledge distillation in federated learning (thesis)"

    w_target: float = option(1.0, "weight of the target part (alpha in the paper)", low=0.0)
    w_nontarget: float = option(1.0, "weight of the non-target part (beta in the paper)", low=0.0)
    delta: float = option(1.0, "how strongly differences of balance are compressed; 0: not at all", low=0.0)
    phi: Literal["on", "off"] = option("on", "whether the target part is weighted by balance (off: ablation)")
    gini_init: Literal["one", "mean", "true"] = option("one", "what a client never heard of counts as")
    tckd: TargetReading = option("binary", "reading of the target part")
    nckd_mask: Mask = option("gather", "how the target is kept out of the non-target part")
    w_target_iid: float | None = option(None, "the same for balanced clients; none: no difference", low=0.0)
    iid_from: float = option(0.85, "Gini impurity from which a client is balanced", low=0.0, high=1.0)
    fusion: Fusion = option("uniform", "whether clients count by their examples, or all alike")

    label_counts = label_counts

    def round(self, server: Server[Balances], cohort: Cohort) -> None:
        known = server.state.gini
        if self.gini_init == "true":
            known |= {name: impurity(told) for name, told in cohort.without(known).ask(self.label_counts).items()}
        weights = self.balance_weights([client.id for client in cohort], known)
        replies = cohort.ask(self.train, server.model, each(weights))
        server.model = fused(replies, self.fusion)
        known |= {name: reply.gini for name, reply in replies.items()}

    def balance_weights(self, clients: list[str], known: dict[str, float]) -> dict[str, float]:
        """Return phi for each client of the cohort (eq. 7); 1 for all if none has more than one class."""
        unknown = sum(known.values()) / len(known) if self.gini_init == "mean" and known else 1.0
        gini = [known.get(client, unknown) for client in clients]
        x = [log1p(self.delta * g) if self.delta else g for g in gini]
        if self.phi == "off" or self.w_target_iid is not None or not sum(x):
            return dict.fromkeys(clients, 1.0)
        return {client: len(x) * value / sum(x) for client, value in zip(clients, x, strict=True)}

    @on_client
    def train(self, client: Client, model: Weights, phi: float) -> BalancedFit:
        """Train on labels and on what the received model says, and tell how balanced the labels are."""
        gini = impurity(client.data["label"].bincount(minlength=client.classes))
        own = self.w_target_iid if self.w_target_iid is not None and gini >= self.iid_from else self.w_target
        fit = client.fit(model, CrossEntropy() + self.lesson(model, phi * own))
        return BalancedFit(**vars(fit), gini=gini)

    def lesson(self, model: Weights, w_target: float) -> Objective:
        """Return what the received model teaches, in the reading that was chosen."""
        if self.tckd != "binary" or self.nckd_mask != "gather":
            return ReadDistillation(model, w_target, self.w_nontarget, self.tckd, self.nckd_mask)
        return Distillation((model,), PerTeacher(tensor([w_target]), tensor([self.w_nontarget])), 1.0, "none")


def impurity(counts: Tensor) -> float:
    """Return the Gini impurity 1 - sum_c p_c^2 of label counts [classes]; 0 without examples."""
    return 1 - float(proportions(counts).square().sum()) if counts.any() else 0.0
