"""LwF+KD: FT+KD whose clients learn without forgetting, each from its own model of the task before."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedkeep.algorithms.ft_kd import FTKD, G, Learner
from fedkeep.algorithms.incremental import CESlice, old_classes
from fedkeep.interface import Client, Cohort, Server, on_client
from fedkeep.losses import Objective
from fedkeep.models import Weights
from fedkeep.options import option


@dataclass
class WithTeacher(Learner):
    """What a client keeps: also its own last model of the task before."""

    teacher: Weights = field(default_factory=dict)


@dataclass(frozen=True)
class LwFKD(FTKD[WithTeacher, G]):
    """FT+KD with CE[new] + w_old * KD[old] in the clients' training, taught by the client's own last model of the task
    before. The server's model, which has no such teacher, keeps what the clients keep."""

    title = "LwF+KD"
    paper = "Baseline of FedDCL (2025), after FedMD (Li and Wang, 2019) and Li and Hoiem, 2017"

    ce_slice: CESlice = option("new", "labels among the task's classes, or among all that were seen")
    w_old: float = option(3.0, "weight of what the own old model says about old classes", low=0.0)

    def end_task(self, server: Server[G], clients: Cohort) -> None:
        clients.ask(self.remember)

    @on_client
    def remember(self, client: Client[WithTeacher]) -> None:
        """Keep the task's last model as a teacher of the next."""
        client.state.teacher = client.state.model

    def beside(self, client: Client[WithTeacher], model: Weights) -> Objective:
        return old_classes(client.state.teacher, self.w_old, self.tau)
