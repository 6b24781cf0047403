"""Flower's simulation on Ray: ``with_flower.py WORK VIRTUAL_NODES``.

Flower samples nodes as it does; which client of the cohort a sampled node plays is written into its message, so that
the work is the same however many virtual nodes there are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import ray
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from networks import by_name, load, once
from torch import nn
from turns import Shown, Turns

WORK, NODES = sys.argv[1], int(sys.argv[2])
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client."""
    torch.set_num_threads(1)
    work, network = once(WORK)
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    config = message.content["config"]
    images, labels = map(torch.from_numpy, work.one_epoch(int(config["server-round"]), int(config["place"])))
    loss_of = nn.CrossEntropyLoss()
    optimiser = torch.optim.SGD(network.parameters(), work.lr, momentum=work.momentum)
    for some, said in zip(images.split(work.batch_size), labels.split(work.batch_size), strict=True):
        optimiser.zero_grad()
        loss_of(network(some), said).backward()
        optimiser.step()
    reply = {
        "arrays": ArrayRecord(network.state_dict()),
        "metrics": MetricRecord({"num-examples": len(labels)}),
    }
    return Message(content=RecordDict(reply), reply_to=message)


class InTurns(FedAvg):
    """Flower's FedAvg, which waits for its turn before each round and says which client each node plays."""

    def __init__(self, cohort: int) -> None:
        super().__init__(
            fraction_train=cohort / NODES, fraction_evaluate=0.0, min_train_nodes=cohort, min_available_nodes=NODES
        )
        self.turns = Turns(self._show)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Wait, then address the cohort."""
        self.arrays, self.rounds = arrays, server_round - 1
        going = self.turns.begin("flwr", "ray", "torch") if server_round == 1 else self.turns.done()
        if not going:
            ray.shutdown()
            os._exit(0)  # a strategy has no way to end early, and an exception here would be counted as a crash
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for place, message in enumerate(messages):
            told = ConfigRecord({"server-round": server_round, "place": place})
            message.content = RecordDict({"arrays": arrays, "config": told})
        return messages

    def _show(self) -> Shown:
        work, network = once(WORK)
        load(network, dict(zip(work.initial, self.arrays.to_numpy_ndarrays(), strict=True)))
        return by_name(network, work), self.rounds


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Play rounds when asked."""
    work, network = once(WORK)
    InTurns(work.cohort).start(grid=grid, initial_arrays=ArrayRecord(network.state_dict()), num_rounds=work.rounds)


if __name__ == "__main__":
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=NODES,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
