"""Weights with two names, and buffers that are in no state dict: in all that looks at single parameters."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedcurv import FedCurv
from fedkeep.algorithms.sequential.cwc import CWC
from fedkeep.interface.privacy import Privacy
from fedkeep.training.per_example import fisher


class Shared(nn.Module):
    """Two layers with one weight, and a position that is added and not sent."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, tiny.CLASSES)
        self.b.weight = self.a.weight
        self.register_buffer("position", torch.arange(16) / 16, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.c(self.b(torch.relu(self.a(images.flatten(1) + self.position))))
        return logits


@pytest.mark.parametrize("batch", [1, 4])
def test_the_fisher_information_is_that_of_autograd(batch: int) -> None:
    simulation = tiny.simulation(FedAvg(), factory=Shared)
    model, data = simulation.server.model, simulation.federation.data("0")
    images, labels = simulation.context.normalise(data["input"]), data["label"]
    found = fisher(simulation.context.runner.eval_network, model, images, labels, batch)
    assert set(found) == set(simulation.context.runner.parameters)
    network = Shared()
    network.load_state_dict(model)
    total = {name: torch.zeros_like(tensor) for name, tensor in network.named_parameters()}
    parts = list(zip(images.split(batch), labels.split(batch), strict=True))
    for some, their in parts:
        network.zero_grad()
        cross_entropy(network(some), their).backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None
            total[name] += parameter.grad.square()
    for name, tensor in total.items():
        torch.testing.assert_close(found[name], tensor / len(parts), rtol=1e-4, atol=1e-7)
    assert torch.equal(found["b.weight"], found["a.weight"])


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (FedCurv(), {}),
        (CWC(), {}),
        (FedAvg(), {"privacy": Privacy(noise_multiplier=1.0)}),
    ],
    ids=["fedcurv", "cwc", "dp-sgd"],
)
def test_methods_train_such_a_network(method: Any, changes: dict[str, Any]) -> None:
    simulation = tiny.simulation(method, factory=Shared, **changes)
    records = tiny.run_rounds(simulation)
    assert not any(record["lost"] or record["rolled_back"] for record in records)
    assert torch.equal(simulation.server.model["a.weight"], simulation.server.model["b.weight"])
