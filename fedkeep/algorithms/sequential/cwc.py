"""CWC (reconstructed): what mattered to earlier clients of a sequence is held by a penalty that travels along."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import NOTHING, CrossEntropy, Quadratic
from fedkeep.losses.importance import PathIntegral
from fedkeep.models import Weights
from fedkeep.models.weights import add, scale
from fedkeep.options import option


@dataclass
class Consolidation:
    """What travels beside the model: the importance of every parameter for the clients so far; empty means zero."""

    importance: Weights = field(default_factory=dict)


@dataclass
class Own:
    """What a client keeps if it is its own anchor: the model as it left it."""

    model: Weights | None = None


@dataclass(frozen=True, eq=False)
class ConsolidatedFit(Fit):
    """A fit, and the importance with the client's own added."""

    importance: Weights


@dataclass(frozen=True)
class CWC(Algorithm[Consolidation, Own]):
    """Cyclical weight consolidation, RECONSTRUCTED: CE + w_penalty / 2 * sum_j O_j (w_j - a_j)^2, a the received model.

    No code and no full text of the paper was at hand, only its abstract and a summary: it trains serially, regularises
    by a consolidation matrix of importances that is attenuated by a factor when clients are visited again. Ours is one
    reading: after its training a client adds to O what mattered to it, and O is multiplied by ``attenuation`` at the
    start of every round. O is capped where lr * w_penalty * O would exceed 1, beyond which a step overshoots. Two
    models travel per hop. With ``w_penalty=0`` this is FedSeq.

    What mattered is the diagonal Fisher information (``importance=fisher``) or the sensitivity of the answers
    (``mas``, memory-aware synapses) at the new model, of at most 500 examples; or what each parameter's way through the
    training gained (``si``, synaptic intelligence), of all that were trained on.
    """

    title = "CWC (reconstructed)"
    paper = "Cyclical weight consolidation, 2024: arXiv 2405.10647 (reconstructed from its abstract)"
    schedule = "sequential"

    w_penalty: float = option(100.0, "weight of the penalty (lambda; grid 1, 10, 100, 1000)", low=0.0)
    attenuation: float = option(0.5, "what importances keep of themselves each round (sigma)", low=0.0, high=1.0)
    importance: Literal["fisher", "mas", "si"] = option("fisher", "what of a client's training is held by later ones")
    damping: float = option(0.1, "added to squared ways, with importance=si", low=1e-12)
    anchor: Literal["incoming", "last_own"] = option("incoming", "the received model, or the client's own last one")
    normalise: bool = option(False, "scale importances so that the largest is 1")

    @classmethod
    def name(cls) -> str:
        return "cwc"

    def round(self, server: Server[Consolidation], cohort: Cohort) -> None:
        importance: Weights = scale(server.state.importance, self.attenuation)
        for client in cohort:
            if reply := client.ask(self.train, server.model, importance):
                server.model, importance = reply.model, reply.importance
        server.state.importance = importance

    @on_client
    def train(self, client: Client[Own], model: Weights, importance: Weights) -> ConsolidatedFit:
        """Train the model that the previous client left, and add what matters to this one."""
        penalty = self.penalty(client, model, importance)
        start = {name: model[name] for name in client.parameters}
        path = PathIntegral(start, penalty) if self.importance == "si" else None
        fit = client.fit(model, CrossEntropy() + (penalty or NOTHING), watch=path)
        if self.anchor == "last_own":
            client.state.model = fit.model
        own = path.importance(fit.model, self.damping) if path else self.measured(client, fit.model)
        return ConsolidatedFit(**vars(fit), importance=add(importance, own) if importance else own)

    def measured(self, client: Client[Own], model: Weights) -> Weights:
        """Return what matters to a client at its new model."""
        return client.sensitivity(model, 500) if self.importance == "mas" else client.fisher(model, 500)

    def penalty(self, client: Client[Own], model: Weights, importance: Weights) -> Quadratic | None:
        """Return the penalty of a client that received ``model``; None if nothing is held."""
        if not importance or not self.w_penalty:
            return None
        anchor = client.state.model if self.anchor == "last_own" and client.state.model is not None else model
        largest = max(float(value.max()) for value in importance.values())
        factor = 1 / largest if self.normalise and largest else 1.0
        rate = client.training.lr_at(client.round)
        cap = 1 / (rate * self.w_penalty) if rate else inf
        held = {name: (factor * value).clamp(max=cap) for name, value in importance.items()}
        return Quadratic(anchor, self.w_penalty / 2, held)
