"""FedCAD: clients trust the received model class by class, as far as the server finds it right about each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedkeep.aggregation import Fusion, fused
from fedkeep.algorithms.parallel.fedlsd import trusting
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import Scale
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass(frozen=True)
class FedCAD(Algorithm):
    """Class-wise adaptive self-distillation: the mean of (1 - a_y) CE + a_y KL(p^T || p^S), T the received model.

    a_c = low + (high - low) E[p_c], with E[p_c] how probable the server's model finds the right class on its auxiliary
    images of class c. The printed weight, (high - low)/2 E[2 p_y - 1] + (high + low)/2 (eq. 5), is exactly that. C more
    numbers travel down. With ``low = high = 0`` this is FedAvg, with ``low = high`` FedLSD, bit for bit.

    What the paper leaves open, and what is done here:

    - the temperature has a value for FedLSD only: 2, and no tau^2;
    - its cross-entropy is printed with tempered probabilities, its algorithm applies it to logits: temperature 1
      (``ce_temp=tau`` takes the printed one);
    - p in a_c is the tempered one, by the only definition given (``conf_temp=one`` takes the other);
    - ``low`` and ``high`` are the best pair of 0, 0.3, 0.5 and 0.7: 0.3 and 0.7 here; equal bounds and 0 are allowed;
    - where the auxiliary set comes from is the recipe's to say (`fedkeep.data.auxiliary`).
    """

    title = "FedCAD"
    paper = "He et al., 2022: Class-wise adaptive self distillation for federated learning on non-IID data"
    needs = ("auxiliary",)

    low: float = option(0.3, "trust in a class of which the model knows nothing (beta in the paper)", low=0.0, high=1.0)
    high: float = option(0.7, "trust in a class that it knows for certain (gamma in the paper)", low=0.0, high=1.0)
    tau: float = option(2.0, "softmax temperature", low=1e-3)
    kd_scale: Scale = option("none", "whether the distillation is multiplied by tau squared")
    ce_temp: Literal["one", "tau"] = option("one", "temperature of the cross-entropy")
    conf_temp: Literal["tau", "one"] = option("tau", "temperature of the probabilities that trust is computed from")
    first_round: int = option(1, "round from which the model teaches; before it this is FedAvg (figure 1: 11)", low=1)
    fusion: Fusion = option("by_count", "whether clients count by their examples, or all alike")

    def check(self) -> None:
        if self.low > self.high:
            raise ConfigError(f"FedCAD.low is {self.low}, more than high, which is {self.high}.")

    def round(self, server: Server, cohort: Cohort) -> None:
        trust = self.low + (self.high - self.low) * self.confidence(server)
        if server.round < self.first_round:
            trust = torch.zeros_like(trust)
        server.log("trust", trust.tolist())
        server.model = fused(cohort.ask(self.train, server.model, trust), self.fusion)

    def confidence(self, server: Server) -> Tensor:
        """Return how probable the model finds the right class, on average over the server's images of it: [classes]."""
        labels = server.data["label"]
        logits = server.predict(server.model) / (self.tau if self.conf_temp == "tau" else 1.0)
        said = logits.softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        held = torch.bincount(labels, minlength=server.classes)
        # A class without images is one of which the model is known to know nothing, not a NaN for everybody.
        return torch.bincount(labels, weights=said, minlength=server.classes).to(said.dtype) / held.clamp(min=1)

    @on_client
    def train(self, client: Client, model: Weights, trust: Tensor) -> Fit:
        """Train on labels where the received model is not to be trusted, and on what it says where it is."""
        temperature = self.tau if self.ce_temp == "tau" else 1.0
        return client.fit(model, trusting(model, trust, self.tau, self.kd_scale, temperature))
