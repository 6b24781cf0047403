"""FLwF-2T: learning without forgetting with two teachers, the client's own past model and the server's present one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedkeep.algorithms.incremental import Old, WithOldModel, old_classes
from fedkeep.interface import Client, Cohort, Fit, NoState, Server, on_client
from fedkeep.models import Weights
from fedkeep.models.heads import shrunk
from fedkeep.objectives import NOTHING, Objective
from fedkeep.options import option


@dataclass
class Own(Old):
    """What a client keeps: also the model as it left it at its last visit, the teacher of the task to come."""

    own: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class FLwF2T(WithOldModel[NoState, Own]):
    """Federated learning without forgetting with two teachers: CE[new] + w_old * KD[old] from the client's own last
    model of the task before + w_server * KD from the model that it received.

    The paper searches for its weights, and those who compare with it print none: 3 and 1 are ours. The received model
    teaches the old classes; with ``server_slice=all`` all of them from a task's second round on, when its new rows have
    been trained. The first task is FedAvg's, bit for bit. The exemplars of the paper's experiments are left out.
    """

    title = "FLwF-2T"
    paper = "Usmanova et al., 2021: A distillation-based approach integrating continual and federated learning"

    w_server: float = option(1.0, "weight of what the received model says", low=0.0)
    server_slice: Literal["old", "all"] = option("old", "classes that the received model teaches")

    def end_task(self, server: Server, clients: Cohort) -> None:
        clients.ask(self.remember, server.model)

    @on_client
    def train(self, client: Client[Own], model: Weights) -> Fit:
        """Train with both teachers, and keep the own model."""
        fit = super().train(client, model)
        client.state.own = fit.model
        return fit

    @on_client
    def remember(self, client: Client[Own], model: Weights) -> None:
        """Keep the client's own last model; the task's, if it never trained."""
        client.state.teacher = client.state.own or model

    def beside(self, client: Client[Own], model: Weights) -> Objective:
        if not client.old:
            return NOTHING
        everything = self.server_slice == "all" and client.round > 1
        return old_classes(model if everything else shrunk(model, client.old), self.w_server, self.tau)
