"""What clients send beside a model is checked too: who lies about it is lost for the round, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

from fedkeep.algorithms.incremental.fedicarl import FediCaRL
from fedkeep.algorithms.parallel.fedcurv import Curvature, FedCurv
from fedkeep.algorithms.parallel.scaffold import SCAFFOLD
from fedkeep.algorithms.sequential.cwc import CWC
from fedkeep.models import Weights

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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sums": torch.ones(1, 1)}, "sums of its features by class of shape [1, 1] in torch.float32, not [3, 8]"),
        ({"sums": torch.ones(3, 8).double()}, "in torch.float64, not [3, 8] in float32"),
        ({"num_examples": torch.ones(2)}, "numbers of its features by class of shape [2]"),
        ({"num_examples": torch.tensor([1.0, -1.0, 0.0])}, "examples that cannot be: [1.0, -1.0, 0.0] by class"),
        ({"num_examples": torch.tensor([0.5, 0.0, 0.0])}, "examples that cannot be"),
        ({"num_examples": torch.tensor([1e6, 0.0, 0.0])}, "examples that cannot be"),
        ({"sums": torch.full((3, 8), 1e6)}, "longer than their number"),
    ],
)
def test_features_that_cannot_be(change: dict[str, Any], reason: str) -> None:
    method = FediCaRL(classify="nearest_mean")
    lost = lost_in_second_round(method, "report_features", lambda reply: replace(reply, **change))
    assert list(lost) == ["4"]
    assert reason in lost["4"]


def test_features_of_exemplars_count_too() -> None:
    simulation = tiny.simulation_with_tasks(FediCaRL(classify="nearest_mean"), cohort_size=5)
    assert not any(record["lost"] for record in tiny.run_rounds(simulation))
    assert simulation.server.state.normalized_means is not None
