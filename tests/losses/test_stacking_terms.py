"""The terms of class-incremental learning give the same for stacked clients as for one after the other."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from table_model import EXACT, TableView, data, model, noise, settled
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedkeep.losses import (
    TSD,
    Batch,
    ClassSubset,
    CompensatedCrossEntropy,
    CrossEntropy,
    Distillation,
    FeatureDistance,
    FullKL,
    Loss,
    PrototypeCrossEntropy,
    QuadraticPenalty,
    Scaled,
    SubsetDistillation,
)

STUDENT, TEACHER, OLD = model(10, 4, 5, seed=1), model(10, 4, 3, seed=2), 3
DATA = data([3, 4, 4, 3, 3, 4, 3, 4, 4, 3])
TERMS: dict[str, Loss] = {
    "tsd as printed": TSD(TEACHER, OLD, "recombined_sigmoid"),
    "tsd softmax": TSD(TEACHER, OLD, "recombined_softmax"),
    "tsd glfc": TSD(TEACHER, OLD, "glfc"),
    "glfc": CompensatedCrossEntropy(4),
    "distillation of old classes": ClassSubset(Distillation((TEACHER,), FullKL(1.0), tau=2.0), 0, OLD, any_label=True),
    "old classes among all": SubsetDistillation(TEACHER, 0, OLD, 0.5, tau=2.0, scale="tau2"),
    "one old class": ClassSubset(Distillation((TEACHER,), FullKL(1.0)), 0, 1, any_label=True) + CrossEntropy(),
    "new classes": Scaled(0.5, ClassSubset(CrossEntropy(), OLD)),
    "prototypes": PrototypeCrossEntropy(noise(10, 4), torch.arange(10) % 5),
    "sharper labels": CrossEntropy(tau=0.1),
    "features": FeatureDistance(model(10, 4, 5, seed=3)),
    "pull": QuadraticPenalty({name: tensor for name, tensor in STUDENT.items() if "classifier" in name}, 2.0),
}


class Given(TableView):
    """A student of these very weights, live."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)
        self.teacher_calls = 0


@pytest.mark.parametrize("name", TERMS)
def test_stacked_clients(name: str) -> None:
    term = settled(TERMS[name], DATA)

    def loss(weights: dict[str, Tensor], rows: Tensor, image: Tensor, label: Tensor) -> Tensor:
        return term(Given(weights), [Batch({"input": image, "label": label}, rows)])

    stacked = {key: torch.stack((tensor, tensor + 0.1)) for key, tensor in STUDENT.items()}
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    columns = rows, DATA["input"][rows], DATA["label"][rows]
    gradients, losses = vmap(grad_and_value(loss))(stacked, *columns)
    for client in range(2):
        own = {key: tensor[client] for key, tensor in stacked.items()}
        slope, value = grad_and_value(loss)(own, *(column[client] for column in columns))
        torch.testing.assert_close(losses[client], value, **EXACT)
        for key in own:
            torch.testing.assert_close(gradients[key][client], slope[key], **EXACT)
