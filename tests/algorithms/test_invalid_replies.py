"""What clients send beside a model is checked too: who lies about it is lost for the round, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from fedkeep.algorithms.parallel.fedcurv import Curvature, FedCurv
from fedkeep.algorithms.parallel.scaffold import SCAFFOLD
from fedkeep.algorithms.sequential.cwc import CWC
from fedkeep.interface.training_settings import SGD, Training
from fedkeep.models import Weights
from fedkeep.models.weights import add, scale

Change = Callable[[Any], Any]
OTHER = {"other": torch.ones(3)}


def lost_in_second_round(method: Any, step: str, change: Change, **settings: Any) -> dict[str, str]:
    """Return who is lost in the second of three rounds, in which one client lies; in the others nobody is."""
    simulation = tiny.simulation(method, cohort_size=6, rounds=3, **settings)

    def lie(client: Any, reply: Any) -> Any:
        return change(reply) if (client.id, client.round) == ("4", 2) else reply

    tiny.change_replies(simulation, step, lie)
    records = tiny.run_rounds(simulation)
    assert not records[0]["lost"]
    assert not records[2]["lost"]
    assert tiny.finite(simulation.server.model)
    return dict(records[1]["lost"])


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, tiny.CLASSES))


def cut(weights: Weights) -> Weights:
    return {name: tensor[:1] for name, tensor in weights.items()}


def of_change(change: Callable[[Weights], Weights]) -> Change:
    return lambda reply: replace(reply, change=change(reply.change))


def of_curvature(**parts: Callable[[Weights], Weights]) -> Change:
    def change(reply: Any) -> Any:
        changed: dict[str, Any] = {name: part(getattr(reply.change, name)) for name, part in parts.items()}
        return replace(reply, change=replace(reply.change, **changed))

    return change


def of_importance(change: Callable[[Weights], Weights]) -> Change:
    return lambda reply: replace(reply, importance=change(reply.importance))


NETWORKS = [tiny.network, pytest.param(normed, marks=pytest.mark.slow)]


@pytest.mark.parametrize("form", [lambda weights: {}, lambda weights: OTHER, lambda weights: weights | OTHER, cut])
@pytest.mark.parametrize(
    ("method", "change"),
    [
        (SCAFFOLD(), of_change),
        (FedCurv(), lambda form: of_curvature(fisher=form)),
        (FedCurv(), lambda form: of_curvature(product=form)),
        (FedCurv(), lambda form: lambda reply: replace(reply, change=Curvature(form({}), form({})))),
        (CWC(), of_importance),
    ],
)
def test_tensors_of_another_form_than_the_models(method: Any, change: Any, form: Any) -> None:
    lost = lost_in_second_round(method, "train", change(form))
    assert list(lost) == ["4"]
    assert "of another form" in lost["4"] or "another model" in lost["4"]


def scaled_by(factor: float) -> Callable[[Weights], Weights]:
    return lambda weights: scale(weights, factor)


def filled(value: float) -> Callable[[Weights], Weights]:
    return lambda weights: add(scale(weights, 0.0), {n: torch.full_like(t, value) for n, t in weights.items()})


def in_buffers(weights: Weights) -> Weights:
    return {name: torch.full_like(tensor, 1e3) if "running" in name else tensor for name, tensor in weights.items()}


LIES: list[tuple[Any, Change, str]] = [
    *(
        (SCAFFOLD(), of_change(change), "that does not follow from its model")
        for change in (filled(1e3), filled(0.0), scaled_by(2.0), scaled_by(-1.0), scaled_by(1e38))
    ),
    (SCAFFOLD(), lambda reply: replace(reply, num_steps=1, change=scaled_by(2.0)(reply.change)), "in 1 steps"),
    (FedCurv(), of_curvature(fisher=filled(-1e3)), "a change of its curvature's fisher by 1e+03, where at most 150"),
    (FedCurv(), of_curvature(fisher=filled(1e3)), "a change of its curvature's fisher by 1e+03, where at most 150"),
    (FedCurv(), of_curvature(product=filled(1e6)), "a change of its curvature's product by 1e+06, where at most"),
    (FedCurv(w_penalty=0.0), of_curvature(fisher=filled(1e35)), "fisher by 1e+35, where at most 1e+30"),
    (CWC(), of_importance(filled(-1e8)), "importance -1e+08, which must be 0 to 1e+30"),
    (CWC(), of_importance(filled(1e35)), "importance 1e+35, which must be 0 to 1e+30"),
]


@pytest.mark.parametrize(("method", "change", "reason"), LIES)
@pytest.mark.parametrize("factory", NETWORKS)
def test_numbers_that_cannot_be(method: Any, change: Change, reason: str, factory: Any) -> None:
    lost = lost_in_second_round(method, "train", change, factory=factory)
    assert list(lost) == ["4"]
    assert reason in lost["4"]


def test_control_variates_of_buffers_are_compared_too() -> None:
    """Nobody trains by them, but their sum would grow beyond float32."""
    lost = lost_in_second_round(SCAFFOLD(), "train", of_change(in_buffers), factory=normed)
    assert list(lost) == ["4"]
    assert "does not follow from its model" in lost["4"]


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), SGD(lr=0.5, max_grad_norm=0.01), SGD(lr=0.0)])
@pytest.mark.parametrize("method", [SCAFFOLD(), FedCurv(), CWC()])
@pytest.mark.parametrize("factory", NETWORKS)
def test_honest_numbers_can_be(method: Any, optimizer: Training, factory: Any) -> None:
    training = replace(optimizer, epochs=2, batch_size=6)
    federation = tiny.federation((9, 1, 6, 0, 7, 23))
    simulation = tiny.simulation(
        method, cohort_size=4, rounds=6, factory=factory, training=training, federation=federation
    )
    assert not any(record["lost"] for record in tiny.run_rounds(simulation))
