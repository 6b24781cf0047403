"""FedNova: clients that took more steps count no more for it."""

from __future__ import annotations

from dataclasses import dataclass

from fedkeep.algorithms.fedavg import FedAvg
from fedkeep.errors import ConfigError
from fedkeep.fusion.normalised import normalised_mean
from fedkeep.interface import Cohort, Server


@dataclass(frozen=True)
class FedNova(FedAvg):
    """Normalised averaging: w <- w - (sum_i p_i a_i) sum_i (p_i / a_i) (w - w_i), a_i the effective steps of client i.

    With equal a_i this is FedAvg, bit for bit; batch norm's statistics are averaged as there.
    """

    title = "FedNova"
    paper = "Wang et al., 2020: Tackling the objective inconsistency problem in heterogeneous federated optimization"

    def check(self) -> None:
        if self.fusion != "by_count":
            raise ConfigError("FedNova weighs clients by examples and steps: it knows no other fusion than by_count.")

    def round(self, server: Server, cohort: Cohort) -> None:
        replies = cohort.ask(self.train, server.model)
        buffers = [name for name, _ in server.network(server.model).named_buffers(remove_duplicate=False)]
        server.model = normalised_mean(
            server.model, replies, server.training.momentum, [name for name in buffers if name in server.model]
        )
