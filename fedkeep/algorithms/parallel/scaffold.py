"""SCAFFOLD: control variates take out the drift of each client's gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedkeep.aggregation.mean import Aggregation, aggregate, effective_steps
from fedkeep.interface import Algorithm, Client, Cohort, Fit, Server, on_client
from fedkeep.losses import CrossEntropy, LinearTerm
from fedkeep.models import Weights
from fedkeep.models.weights import add, find_mismatch, joint_norm, mean, scale, subtract
from fedkeep.options import option

ROUNDING = 1e-3
"""How far a model may be from that which its client's control variate implies, as a share of the model's norm.

Of honest clients it was 6e-6 at most, in 60 rounds with and without batch norm, momentum and clipping, at learning
rates from 1e-9 to 50: c_i, which the server does not know, cancels out but for float32's rounding.
"""


@dataclass
class ControlVariate:
    """What the server keeps, and what each client keeps.

    ``c``: The control variate, with a model's names; empty at first, which means zero.
    """

    c: Weights = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class FitWithControlVariate(Fit):
    """A fit, and how the client's control variate changed.

    ``change``: The new control variate minus the last one.
    """

    change: Weights


@dataclass(frozen=True)
class SCAFFOLD(Algorithm[ControlVariate, ControlVariate]):
    """Stochastic controlled averaging: steps along g - c_i + c, then c_i <- c_i - c + (w - w_i) / (K_i lr) (option II).

    The server adds to c the mean change of the c_i times M / N, for M replies of N clients (algorithm 1). With momentum
    rho, K_i is the effective number of steps, as in FedNTD's program. From c = 0 the first round is FedAvg's, bit for
    bit. Two models' sizes are sent each way. Without clipping it may diverge at high momentum: chance accuracy in
    published tables is that.
    """

    paper = "Karimireddy et al., 2020: SCAFFOLD, stochastic controlled averaging for federated learning"
    needs = ("sgd",)
    uses_num_steps = True  # what a client says of its control variate is compared with its model by them

    aggregation: Aggregation = option("num_examples", "whether clients count by their examples, or all alike")

    def round(self, server: Server[ControlVariate], cohort: Cohort) -> None:
        """Let all clients train with corrected gradients, average their models, and update c."""
        c = server.state.c or scale(server.model, 0.0)
        replies = cohort.ask(self.train, server.model, c)
        server.model = aggregate(replies, self.aggregation)
        change = mean([reply.change for reply in replies.values()])
        server.state.c = add(c, change, len(replies) / server.num_clients)

    def validate_reply(self, server: Server[ControlVariate], reply: Any, examples: int) -> str | None:
        if not isinstance(reply, FitWithControlVariate):
            return None
        if mismatch := find_mismatch(reply.change, server.initial_model):
            return f"a change of its control variate of another form: {mismatch}"
        floating = [name for name, tensor in server.model.items() if tensor.is_floating_point()]
        trained = set(server.parameter_names)
        groups = [[name for name in floating if (name in trained) == is_trained] for is_trained in (True, False)]
        if all(self.is_consistent(server, reply, names) for names in groups):
            return None
        return "a change of its control variate that does not follow from its model, steps and learning rate"

    @torch.no_grad()
    def is_consistent(self, server: Server[ControlVariate], reply: FitWithControlVariate, names: Sequence[str]) -> bool:
        """Tell whether a change of a control variate is (w - w_i) / (K_i lr) - c, up to rounding: c_i cancels out."""
        c, training = server.state.c, server.training
        rate = training.lr_in_round(server.round) * effective_steps(reply.num_steps, training.momentum)
        told = [reply.change[name] for name in names]
        if not rate:
            return not any(change.any() for change in told)
        sent, moved = [server.model[name] for name in names], [server.model[name] - reply.model[name] for name in names]
        implied = [rate * (change + c[name] if c else change) for name, change in zip(names, told, strict=True)]
        difference = joint_norm([a - b for a, b in zip(implied, moved, strict=True)])
        return difference <= ROUNDING * max(joint_norm(sent), joint_norm(moved), 1.0)

    @on_client
    def train(self, client: Client[ControlVariate], model: Weights, c: Weights) -> FitWithControlVariate:
        """Train with the drift of the client's own gradient taken out, and update its control variate."""
        c_i = client.state.c or scale(model, 0.0)
        fit = client.fit(model, CrossEntropy() + LinearTerm(subtract(c, c_i)))
        rate = client.training.lr_in_round(client.round) * effective_steps(fit.num_steps, client.training.momentum)
        # Without steps, or with a learning rate of 0, the training showed nothing of the client's gradient.
        new = add(subtract(c_i, c), subtract(model, fit.model), 1 / rate) if rate else c_i
        client.state.c = new
        return FitWithControlVariate(**vars(fit), change=subtract(new, c_i))
