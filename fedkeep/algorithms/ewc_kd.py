"""EWC+KD: FT+KD whose clients hold the weights that mattered before, each by its own data."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from fedkeep.algorithms.fedewc import Consolidated
from fedkeep.algorithms.fedewc import consolidated
from fedkeep.algorithms.fedewc import penalty
from fedkeep.algorithms.ft_kd import FTKD
from fedkeep.algorithms.ft_kd import G
from fedkeep.algorithms.ft_kd import Learner
from fedkeep.interface import Client
from fedkeep.interface import Cohort
from fedkeep.interface import Server
from fedkeep.interface import on_client
from fedkeep.models import Weights
from fedkeep.options import option
from fedkeep.losses import Objective
from fedkeep.objectives import Head


@dataclass
class Holding(Learner):
    """What a client keeps: also what mattered to it."""

    before: Consolidated = field(default_factory=Consolidated)


@dataclass(frozen=True)
class EWCKD(FTKD[Holding, G]):
    """FT+KD with FedEWC's penalty in the clients' training, at each client's own last model of the task before."""

    title = "EWC+KD"
    paper = "Baseline of FedDCL (2025), after FedMD (Li and Wang, 2019) and Kirkpatrick et al., 2017"

    head: Head = option("sliced", "labels compete with all outputs that were seen, or with the task's own")
    w_penalty: float = option(1000.0, "weight of the penalty", low=0.0)
    limit: float = option(1e-4, "largest Fisher information of a parameter", low=0.0)

    def end_task(self, server: Server[G], clients: Cohort) -> None:
        clients.ask(self.consolidate)

    @on_client
    def consolidate(self, client: Client[Holding]) -> None:
        """Note what the own last model is worth to the client's data."""
        kept = client.state
        if kept.model:
            kept.before = consolidated(client, kept.before, kept.model, self.limit)

    def beside(self, client: Client[Holding], model: Weights) -> Objective:
        return penalty(client.state.before, model, self.w_penalty)
