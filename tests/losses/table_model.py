"""A model view of plain tensors: features are a table with one row an example, and a linear classifier reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedkeep.losses import Batch, Loss

EXACT: dict[str, float] = {"rtol": 1e-9, "atol": 1e-11}  # float64 on both sides


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model(examples: int, width: int, classes: int, seed: int) -> dict[str, Tensor]:
    """Return a table of features and a classifier."""
    return {
        "table": noise(examples, width, seed=seed),
        "classifier.weight": noise(classes, width, seed=seed + 1000),
        "classifier.bias": noise(classes, seed=seed + 2000),
    }


def features(model: Mapping[str, Tensor], batch: Batch) -> Tensor:
    return model["table"][batch.data["input"]]


def logits(model: Mapping[str, Tensor], batch: Batch) -> Tensor:
    return features(model, batch) @ model["classifier.weight"].T + model["classifier.bias"]


class TableView:
    """The model in training; counts how often teachers are asked."""

    def __init__(self, model: Mapping[str, Tensor]) -> None:
        self.weights = {name: tensor.clone().requires_grad_() for name, tensor in model.items()}
        self.teacher_calls = 0

    def logits(self, batch: Batch) -> Tensor:
        return logits(self.weights, batch)

    def features(self, batch: Batch) -> Tensor:
        return features(self.weights, batch)

    def teacher_logits(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
        self.teacher_calls += 1
        return logits(model, batch)

    def teacher_features(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
        self.teacher_calls += 1
        return features(model, batch)


class TableOutputs:
    """The outputs of frozen models on all of a data set."""

    def __init__(self, data: Mapping[str, Tensor]) -> None:
        self.batch = Batch(data, torch.arange(len(data["label"])))

    def __call__(self, model: Mapping[str, Tensor]) -> Tensor:
        return logits(model, self.batch)

    def features(self, model: Mapping[str, Tensor]) -> Tensor:
        return features(model, self.batch)

    def for_data(self, data: Mapping[str, Tensor]) -> TableOutputs:
        return TableOutputs(data)


def data(labels: Sequence[int]) -> dict[str, Tensor]:
    return {"input": torch.arange(len(labels)), "label": torch.tensor(list(labels))}


def draw(data: Mapping[str, Tensor], rows: Sequence[int]) -> Batch:
    picked = torch.tensor(list(rows))
    return Batch({name: column[picked] for name, column in data.items()}, picked)


def value_and_gradients(
    objective: Loss, model: Mapping[str, Tensor], *batches: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and its gradient by parameter, zeros where nothing flows."""
    view = TableView(model)
    loss = objective(view, list(batches))
    assert loss.shape == ()
    gradients = torch.autograd.grad(loss, list(view.weights.values()), allow_unused=True)
    named = zip(view.weights, gradients, strict=True)
    return loss.detach(), {n: torch.zeros_like(model[n]) if g is None else g for n, g in named}


def settled(objective: Loss, data: Mapping[str, Tensor]) -> Loss:
    answer: Any = TableOutputs(data)
    return objective.cache_teachers(answer, data, 0)
