"""FedADKD: decoupled distillation from the received model, its target part weighted by each client's label balance."""

from dataclasses import dataclass, field
from math import log1p
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedkeep.aggregation import Aggregation, aggregate
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Range, Server, each, on_client
from fedkeep.interface.privacy import FROM_LABEL_COUNTS
from fedkeep.losses import CrossEntropy, Distillation, Loss
from fedkeep.losses.discrepancy import proportions
from fedkeep.losses.fedadkd_variants import FedADKDVariant, Mask, TargetReading
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass
class LabelBalance:
    """What the server keeps.

    ``gini``: Gini impurity of each client's labels, as last received.
    """

    gini: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class FitWithGini(Fit):
    """A fit, and the label balance of the client.

    ``gini``: The Gini impurity 1 - sum_c p_c^2 of the labels that it was trained on.
    """

    gini: Annotated[float, Range(0, 1), FROM_LABEL_COUNTS]


@dataclass(frozen=True)
class FedADKD(Algorithm[LabelBalance]):
    """Adaptive decoupled knowledge distillation: CE + phi_i w_target TC + w_nontarget NT at temperature 1, no tau^2.

    TC = p_y^T ln(p_y^T / p_y^S), of the label's probabilities in the received and the local model (eq. 3).
    phi_i = M x_i / sum_j x_j over the cohort of M, x = ln(1 + delta G), G the Gini impurity of a client's labels; the
    mean of phi over the cohort is 1 (eqs. 6 and 7).

    What the paper leaves open, and what is done here:

    - it defines f(G) and then prints G: f is used; ``delta=0`` gives the printed formula, its limit;
    - w_target (alpha) and delta have no printed value: 0.3, chosen after a warm start on held-out images, where larger
      weights lose to FedNTD (docs/findings.md), and 1;
    - phi is computed before the clients have computed G: a client without a known G counts as G = 1;
    - eq. 3 prints one term under a sum over classes on which it does not depend. ``single_term`` is the term alone,
      which is the cross-entropy times p_y^T but for a constant; ``binary`` reads it as decoupled distillation's
      two-class divergence, which has no gradient where training starts and lost 8 points to FedNTD on held-out images.
      ``nckd_mask`` has the masks of figure 3;
    - algorithm 1 averages uniformly, its base code by examples: uniform.

    Ablations: ``phi=off`` sets phi to 1; ``w_target=0`` is FedNTD at temperature 1 with the same aggregation, bit for
    bit. ``w_target_iid`` gives clients of balanced labels (G of ``iid_from`` and more) a target weight of their own,
    with phi = 1 for all (figure 4, whose procedure the paper does not describe).
    """

    title = "FedADKD"
    paper = "Jang and Chou: Mitigating global knowledge forgetting via adaptive decoupled knowledge distillation"

    w_target: float = option(0.3, "weight of the target part (alpha in the paper)", low=0.0)
    w_nontarget: float = option(1.0, "weight of the non-target part (beta in the paper)", low=0.0)
    delta: float = option(
        1.0,
        "delta in ln(1 + delta G): the larger, the less label balance G matters; 0: weight in proportion to G",
        low=0.0,
        only=("phi", "on"),
    )
    phi: Literal["on", "off"] = option("on", "whether the target part is weighted by balance (off: ablation)")
    tckd: TargetReading = option(
        "single_term", "TCKD, the target part, as eq. 3 is read: its single term, or the two-class divergence (binary)"
    )
    nckd_mask: Mask = option("gather", "NCKD, the non-target part: how the target is kept out of it")
    w_target_iid: float | None = option(
        None,
        "weight of the target part for balanced clients (see iid_from), with phi = 1 for all; none: w_target",
        low=0.0,
    )
    iid_from: float = option(0.85, "Gini impurity from which a client is balanced", low=0.0, high=1.0)
    aggregation: Aggregation = option("uniform", "whether clients count by their examples, or all alike")

    def check(self) -> None:
        if self.w_target_iid is None and self.iid_from != 0.85:
            raise ConfigError(
                "FedADKD.iid_from says who gets w_target_iid, which is none. Set it, or leave iid_from out."
            )

    def idle_part(self, num_classes: int, num_tasks: int) -> str:
        largest = 1 - 1 / num_classes
        if self.w_target_iid is not None and (self.delta, self.phi) != (1.0, "on"):
            return "delta and phi count only without w_target_iid"
        if self.w_target_iid is not None and self.iid_from > largest:
            return f"with {num_classes} classes no Gini impurity is above {largest:.3g}, so that iid_from finds nobody"
        return "" if self.nckd_mask == "zero_logit" else super().idle_part(num_classes, num_tasks)

    def round(self, server: Server[LabelBalance], cohort: Cohort) -> None:
        """Weigh the clients by label balance (eqs. 6 and 7), let all train, and average their models."""
        gini = server.state.gini
        phi = self.balance_weights([client.id for client in cohort], gini)
        replies = cohort.ask(self.train, server.model, each(phi))
        server.model = aggregate(replies, self.aggregation)
        gini |= {name: reply.gini for name, reply in replies.items()}

    def balance_weights(self, clients: list[str], known: dict[str, float]) -> dict[str, float]:
        """Compute phi for each client of the cohort (eqs. 6 and 7).

        ``known``: Gini impurity by client; 1 for clients that it lacks.
        Returns: By client; 1 for all if none has more than one class.
        """
        gini = [known.get(client, 1.0) for client in clients]
        x = [log1p(self.delta * g) if self.delta else g for g in gini]
        if self.phi == "off" or self.w_target_iid is not None or not sum(x):
            return dict.fromkeys(clients, 1.0)
        return {client: len(x) * value / sum(x) for client, value in zip(clients, x, strict=True)}

    @on_client
    def train(self, client: Client, model: Weights, phi: float) -> FitWithGini:
        """Train on labels and on the received model's predictions (eq. 8), and return the labels' balance."""
        gini = gini_impurity(client.label_counts())
        w_target = self.w_target
        if self.w_target_iid is not None and gini >= self.iid_from:
            w_target = self.w_target_iid
        fit = client.fit(model, CrossEntropy() + self.distillation(model, phi * w_target))
        return FitWithGini(**vars(fit), gini=gini)

    def distillation(self, model: Weights, w_target: float) -> Loss:
        """Return the distillation from the received model, in the reading that was chosen.

        ``w_target``: Weight of the target part, phi included.
        """
        if self.nckd_mask == "gather" and (self.tckd == "binary" or not w_target):
            return Distillation.decoupled(model, w_target, self.w_nontarget)
        return FedADKDVariant(model, torch.tensor(w_target), self.w_nontarget, self.tckd, self.nckd_mask)


def gini_impurity(counts: Tensor) -> float:
    """Return the Gini impurity 1 - sum_c p_c^2.

    ``counts``: [classes], label counts.
    """
    return 1 - float(proportions(counts).square().sum()) if counts.any() else 0.0
