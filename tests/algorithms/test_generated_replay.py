"""What FedDCL and DDDR share: replies with prototypes of another generator, or for other classes, are refused."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

from fedkeep.algorithms.heterogeneous.feddcl import FedDCL
from fedkeep.algorithms.incremental.dddr import DDDR
from fedkeep.algorithms.incremental.generated_replay import PrototypeReply


@pytest.mark.parametrize("cls", [FedDCL, DDDR])
def test_prototypes_must_be_of_this_task_and_of_the_servers_generator(cls: type[Any]) -> None:
    fed = cls(**tiny.TOYS[cls.name()])
    simulation = tiny.simulation_with_tasks(fed, tiny.stream((2, 1), absent=0), rounds=2, cohort_size=5)
    assert not any(record["lost"] for record in tiny.run_rounds(simulation))
    simulation.server.begin_round(2, 1)
    shape, name = tiny.SHAPE, simulation.server.generator.loaded_hash
    of_task_one = PrototypeReply(torch.zeros(2, *shape), torch.tensor([1, 1]), name)
    assert f"prototypes of shape {[2, *shape]}" in str(fed.validate_reply(simulation.server, of_task_one, 1))
    other = PrototypeReply(torch.zeros(1, *shape), torch.tensor([1]), "another")
    assert "for another generator than the server's" in str(fed.validate_reply(simulation.server, other, 1))
