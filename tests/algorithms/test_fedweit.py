"""FedWeIT by its formulas: what a client minimises, in float64; what is sent, and how; what answers for each task."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from math import floor
from typing import Any

import pytest
import tiny
import torch
from recorded_jobs import RecordedJobs
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedkeep._utils import seeds
from fedkeep.algorithms.incremental.fedweit import FedWeIT, WeITUpdate
from fedkeep.data import TaskStream
from fedkeep.errors import ConfigError
from fedkeep.models import Weights
from fedkeep.models.fedweit_layers import SparseTensors
from fedkeep.models.heads import BIAS, WEIGHT
from fedkeep.training.local_training import NetworkView

LAYER = "body.full1.weight"  # the only one that is decomposed
THREE = tiny.stream((1, 1, 1), clients=4, absent=0)
TWO = tiny.stream((1, 2), clients=4, absent=0)  # with labels to learn in the second
LOUD = FedWeIT(w_sparse=0.02, w_l2=0.1, w_drift=3.0, threshold=0.05)
Played = tuple[Any, RecordedJobs]


def mask(model: Weights) -> Tensor:
    return model[f"mask.{LAYER}"]


def adaptive(model: Weights) -> Tensor:
    return model[f"adaptive.{LAYER}"]


def attention(model: Weights) -> Tensor:
    return model[f"attention.{LAYER}"]


def large(model: Weights, threshold: float = LOUD.threshold) -> Tensor:
    """Return A with zeros for what is not sent."""
    a = adaptive(model)
    return torch.where(a.abs() > threshold, a, 0.0)


def gated(body: Tensor, masks: Tensor) -> Tensor:
    """Return B * sigmoid(mask), unit by unit."""
    return torch.stack([row / (1 + (-m).exp()) for row, m in zip(body, masks, strict=True)])


def run_rounds(method: FedWeIT = LOUD, tasks: TaskStream = THREE) -> Played:
    """Run tasks of two rounds with four clients, of whom all take part."""
    simulation = tiny.simulation_with_tasks(method, tasks, cohort_size=4)
    seen = RecordedJobs(simulation)
    tiny.run_rounds(simulation)
    return simulation, seen


# What a client minimises


def loss(
    weights: Mapping[str, Tensor], images: Tensor, labels: Tensor, others: list[Tensor], past: list[Any]
) -> Tensor:
    """Return FedWeIT's loss as the paper writes it, of a task with one new class or more."""
    theta = gated(weights[LAYER], mask(weights)) + adaptive(weights)
    for number, other in enumerate(others):
        theta = theta + attention(weights)[number] * other
    hidden = (images.flatten(1) @ theta.T + weights["body.full1.bias"]).clamp(min=0)
    logits = hidden @ weights[WEIGHT].T + weights[BIAS]
    value = cross_entropy(logits[:, int(labels.min()) :], labels - labels.min())
    value = value + 0.02 * adaptive(weights).abs().sum()
    value = value + 0.1 / 2 * (adaptive(weights) ** 2).sum() + 0.1 / 2 * (mask(weights) ** 2).sum()
    if not past:
        value = value + 0.1 / 2 * (weights[LAYER] ** 2).sum()
    for old_mask, old_adaptive, old_theta in past:
        restored = gated(weights[LAYER], old_mask) + old_adaptive
        value = value + 3.0 / 2 * ((restored - old_theta) ** 2).sum()
    return value


def known(seen: RecordedJobs, task: int, client: str) -> tuple[list[Tensor], list[Any]]:
    """Return in a task the others' A_j, and of each task before (mask_s, A_s, theta_s), in float64."""
    others = [large(seen.results[task - 1, 2, other].model).double() for other in "0123"] if task > 1 else []
    first = seen.fits[task, 1, client].model[LAYER].double()
    past = []
    for before in range(1, task):
        left = seen.results[before, 2, client].model
        m, a = mask(left).double(), adaptive(left).double()
        past.append((m, a, gated(first, m) + a))
    return others, past


def visited(simulation: Any, seen: RecordedJobs, task: int, round: int, client: str) -> dict[str, Tensor]:
    """Return what a local training leaves, computed by hand in float64."""
    given = seen.fits[task, round, client]
    weights = {name: tensor.double() for name, tensor in given.model.items()}
    others, past = known(seen, task, client)
    data, training = simulation.federation.for_task(task).data(client), simulation.settings.training
    images, labels = simulation.context.normalise(data["input"]).double(), data["label"]
    order = seeds.rng(simulation.settings.seed, "batches", task=task, round=round, client=client)
    velocity = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for _ in range(training.epochs):
        for rows in torch.randperm(len(labels), generator=order).split(training.batch_size):
            live = {name: tensor.requires_grad_() for name, tensor in weights.items()}
            value = loss(live, images[rows], labels[rows], others, past)
            gradients = torch.autograd.grad(value, list(live.values()), allow_unused=True)
            for (name, weight), gradient in zip(live.items(), gradients, strict=True):
                slope = torch.zeros_like(weight) if gradient is None else gradient
                velocity[name] = training.momentum * velocity[name] + slope + training.weight_decay * weight.detach()
                weights[name] = weight.detach() - training.lr * velocity[name]
    return weights


@pytest.mark.parametrize(("task", "round"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_local_training_by_formula_in_float64(task: int, round: int) -> None:
    simulation, seen = run_rounds(tasks=TWO)
    for client in "02":
        assert len(simulation.federation.for_task(task).data(client)["label"]), "it has something to learn"
        expected, got = visited(simulation, seen, task, round, client), seen.results[task, round, client].model
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name].double(), tensor, rtol=1e-4, atol=1e-6)
        for name in (LAYER, f"mask.{LAYER}", f"adaptive.{LAYER}", *([f"attention.{LAYER}"] if task > 1 else [])):
            assert (got[name] - seen.fits[task, round, client].model[name]).abs().max() > 1e-4, f"{name} learns"


def test_all_tasks_before_hold_what_they_need() -> None:
    """The value and the gradient of what is minimised in a third task, far from where it began."""
    simulation, seen = run_rounds()
    given, noise = seen.fits[3, 2, "1"], torch.Generator().manual_seed(3)
    moved = {n: t + torch.randn(t.shape, generator=noise) for n, t in given.model.items()}
    batch = given.streams[0].first(2)
    images, labels = batch.data["input"], batch.data["label"]
    networks = simulation.context.runner

    def ours(weights: dict[str, Tensor]) -> Tensor:
        assert given.parametrization is not None
        network = given.parametrization(weights)
        view = NetworkView(
            networks, weights, lambda batch: functional_call(networks.train_network, dict(network), (batch,))
        )
        return given.loss(view, [batch])

    def theirs(weights: dict[str, Tensor]) -> Tensor:
        return loss(weights, images.double(), labels, *known(seen, 3, "1"))

    found = []
    for function, exact in ((ours, False), (theirs, True)):
        live = {n: (t.double() if exact else t.clone()).requires_grad_() for n, t in moved.items()}
        value = function(live)
        slope = torch.autograd.grad(value, [live[LAYER], live[f"mask.{LAYER}"], live[f"adaptive.{LAYER}"]])
        found.append([value.double(), *(one.double() for one in slope)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_parts_begin_anew_in_each_task() -> None:
    simulation, seen = run_rounds(FedWeIT())
    for task, heard in ((1, 0), (2, 4), (3, 4)):
        begun = seen.fits[task, 1, "1"].model
        assert torch.equal(adaptive(begun), 1 / 3 * simulation.context.runner.initial[LAYER])
        assert (len(mask(begun)), len(attention(begun))) == (8, heard)
    assert not torch.equal(mask(seen.fits[1, 1, "1"].model), mask(seen.fits[2, 1, "1"].model))
    assert torch.equal(mask(seen.fits[2, 2, "1"].model), mask(seen.results[2, 1, "1"].model)), "and go on within it"


# What is sent


def test_each_unit_is_the_mean_over_those_who_sent_it() -> None:
    simulation = tiny.simulation_with_tasks(LOUD, THREE, cohort_size=4)
    seen = RecordedJobs(simulation)
    for task, round in ((1, 1), (1, 2), (2, 1)):
        before = simulation.server.model
        tiny.run_rounds(simulation, 1)
        left = [seen.results[task, round, client].model for client in simulation.sample_cohort(2 * task - 2 + round)]
        sizes = [mask(model).abs() for model in left]
        smallest = [sorted(size.tolist())[floor(8 * 0.3)] for size in sizes]
        for unit in range(8):
            sent = [m[LAYER][unit] for m, s, low in zip(left, sizes, smallest, strict=True) if float(s[unit]) >= low]
            expected = torch.stack(sent).mean(0) if sent else before[LAYER][unit]
            torch.testing.assert_close(simulation.server.model[LAYER][unit], expected)
        mean_bias = torch.stack([model["body.full1.bias"] for model in left]).mean(0)
        torch.testing.assert_close(simulation.server.model["body.full1.bias"], mean_bias)
        for name in (WEIGHT, BIAS):
            new = torch.stack([model[name][task - 1 :] for model in left]).mean(0)
            torch.testing.assert_close(simulation.server.model[name][task - 1 :], new)
            assert torch.equal(simulation.server.model[name][: task - 1], before[name][: task - 1]), "old rows stay"


def test_a_unit_that_nobody_sent_stays() -> None:
    simulation = tiny.simulation_with_tasks(FedWeIT(sparsity=0.9), THREE, cohort_size=1, rounds=1)
    before = simulation.server.model[LAYER]
    tiny.run_rounds(simulation, 1)
    moved = (simulation.server.model[LAYER] != before).any(1)
    assert int(moved.sum()) == 1, "of 8 units the 7 with the smallest masks were not sent"


def test_what_travels_is_counted() -> None:
    simulation = tiny.simulation_with_tasks(LOUD, THREE, cohort_size=4)
    seen = RecordedJobs(simulation)
    records = tiny.run_rounds(simulation)
    shares = 4 * (6 * 16 + 8 + 8 + 8 + 1)  # B's rows of 6 units in 8, masks, biases, and a row with its bias
    for record in records:
        task, last = record["task"], record["round"] % 2 == 0
        model = 4 * (8 * 16 + 8 + 9 * task)
        text = [int((large(seen.results[t, 2, c].model) != 0).sum()) for t in (task - 1, task) for c in "0123" if t]
        ends = 8 * sum(text[-4:]) + 4 * 4 * (8 + (4 if task > 1 else 0))  # value and place, masks and attention
        hears = 4 * 8 * sum(text[:4]) if task > 1 and not last else 0
        assert record["down"] == 4 * model + hears
        assert record["up"] == 4 * shares + (ends if last else 0)
    assert 0 < sum(text) < 8 * 128, "some of A is sent, and some is not"


# What answers


def test_each_tasks_rows_are_asked_with_the_mean_of_the_clients_layers() -> None:
    simulation, seen = run_rounds()
    images = simulation.federation.dataset.test["input"]
    served, columns = simulation.server.model, []
    for task in (1, 2, 3):
        thetas = []
        for client in "0123":
            left = seen.results[task, 2, client].model
            theta = gated(served[LAYER], mask(left)) + large(left)
            others = [large(seen.results[task - 1, 2, other].model) for other in "0123"] if task > 1 else []
            thetas.append(theta + sum(a * other for a, other in zip(attention(left), others, strict=True)))
        bias = torch.stack([seen.results[task, 2, client].model["body.full1.bias"] for client in "0123"]).mean(0)
        weights = {**served, LAYER: torch.stack(thetas).mean(0), "body.full1.bias": bias}
        normalised = simulation.context.normalise(images)
        columns.append(simulation.context.runner.logits(weights, normalised)[:, task - 1 : task])
    got = simulation.algorithm.predict(simulation.server, served, images)
    torch.testing.assert_close(got, torch.cat(columns, 1), rtol=1e-4, atol=1e-5)


def test_a_client_uses_its_own_layers() -> None:
    simulation, seen = run_rounds()
    left = seen.results[3, 2, "2"].model
    theta = gated(left[LAYER], mask(left)) + adaptive(left)
    theta = theta + sum(a * large(seen.results[2, 2, o].model) for a, o in zip(attention(left), "0123", strict=True))
    own = simulation.algorithm.own_model(simulation.client_states["2"])
    torch.testing.assert_close(own[LAYER], theta)
    assert own.keys() == simulation.server.model.keys()


# What may go wrong


def test_who_missed_what_others_told_goes_on_without() -> None:
    lose = lambda number, client, step: "lost it" if (client, step, number) == ("1", "receive", 3) else None  # noqa: E731
    simulation = tiny.simulation_with_tasks(LOUD, THREE, cohort_size=4, fault_injector=lose)
    seen = RecordedJobs(simulation)
    records = tiny.run_rounds(simulation, 4)
    assert [record["lost"] for record in records] == [{}, {}, {"1": "lost it"}, {}]
    assert len(attention(seen.fits[2, 1, "1"].model)) == 0
    assert len(attention(seen.fits[2, 1, "0"].model)) == 4
    thetas = [large(seen.results[2, 2, client].model) for client in "0123"]
    for number, client in enumerate("0123"):
        heard = attention(seen.results[2, 2, client].model).tolist()
        for a, other in zip(heard, "0123", strict=False):
            thetas[number] = thetas[number] + a * large(seen.results[1, 2, other].model)
    torch.testing.assert_close(simulation.server.state.tasks[1].added[LAYER], torch.stack(thetas).mean(0))


def test_a_network_needs_a_layer_before_its_classifier() -> None:
    flat = lambda: nn.Sequential(OrderedDict(flatten=nn.Flatten(), classifier=nn.Linear(16, 3)))  # noqa: E731
    with pytest.raises(ConfigError, match="before the classifier"):
        tiny.simulation(FedWeIT(), factory=flat).run_round()


def test_tied_weights_are_refused() -> None:
    def tied() -> nn.Module:
        network = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3))
        network[2].weight = network[1].weight
        return network

    simulation = tiny.simulation(FedWeIT(), factory=tied)
    with pytest.raises(ConfigError, match=r"2\.weight stands at several places"):
        simulation.run_round()


def test_a_network_whose_classifier_is_not_known_is_decomposed_whole() -> None:
    plain = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))  # noqa: E731
    simulation = tiny.simulation(FedWeIT(), factory=plain, cohort_size=6)
    assert not any(record["lost"] for record in tiny.run_rounds(simulation))
    assert set(simulation.server.state.tasks[0].added) == {"1.weight", "3.weight"}


def test_who_was_never_asked_in_a_task_tells_nothing() -> None:
    simulation = tiny.simulation_with_tasks(LOUD, THREE, cohort_size=1, rounds=1)
    tiny.run_rounds(simulation, 1)
    assert len(simulation.server.state.adaptive) == 1


REFUSED = {
    "places outside": lambda text: replace(
        text, adaptive=SparseTensors(torch.ones(1), torch.tensor([128], dtype=torch.int32))
    ),
    "int64": lambda text: replace(text, adaptive=SparseTensors(torch.ones(1), torch.tensor([1]))),
    "2] numbers": lambda text: replace(text, adaptive=SparseTensors(torch.ones(2), torch.ones(1, dtype=torch.int32))),
    "attention": lambda text: replace(text, parts={**text.parts, f"attention.{LAYER}": torch.ones(3)}),
    "mask": lambda text: replace(text, parts={**text.parts, f"mask.{LAYER}": torch.ones(9)}),
}


@pytest.mark.parametrize("output", REFUSED)
def test_parts_of_another_form_are_refused(output: str) -> None:
    def spoil(client: Any, reply: Any) -> Any:
        return REFUSED[output](reply) if (client.task, client.id) == (2, "1") else reply

    simulation = tiny.simulation_with_tasks(LOUD, THREE, cohort_size=4)
    tiny.change_replies(simulation, "report", spoil)
    records = tiny.run_rounds(simulation)
    assert [list(record["lost"]) for record in records] == [[], [], [], ["1"], [], []]
    assert output in records[3]["lost"]["1"]


def enlarged(weights: Any, prefix: str) -> Any:
    return {name: tensor + 1e4 * name.startswith(prefix) for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("step", "change", "reason"),
    [
        ("train", lambda reply: replace(reply, body=reply.body + 1e4), "an update of norm"),
        ("train", lambda reply: replace(reply, parts=enlarged(reply.parts, "rest.")), "an update of norm"),
        ("report", lambda reply: replace(reply, parts=enlarged(reply.parts, "attention.")), "attention of norm"),
        (
            "report",
            lambda reply: replace(reply, adaptive=replace(reply.adaptive, values=reply.adaptive.values + 1e4)),
            "adaptive weights of norm",
        ),
    ],
)
def test_numbers_that_would_swallow_all_others_are_refused(step: str, change: Any, reason: str) -> None:
    """What FedWeIT's clients send is no whole model, so that no general limit is about it."""

    def spoil(client: Any, reply: Any) -> Any:
        return change(reply) if (client.task, client.id) == (2, "1") else reply

    simulation = tiny.simulation_with_tasks(LOUD, THREE, cohort_size=4, rounds=1)
    tiny.change_replies(simulation, step, spoil)
    records = tiny.run_rounds(simulation)
    assert [list(record["lost"]) for record in records] == [[], ["1"], []]
    assert reason in records[1]["lost"]["1"]
    assert "fits the model" in records[1]["lost"]["1"]


def test_rows_that_do_not_belong_to_the_masks_are_refused() -> None:
    def shorten(client: Any, share: WeITUpdate) -> WeITUpdate:
        return replace(share, body=share.body[1:]) if client.id == "1" else share

    simulation = tiny.simulation_with_tasks(LOUD, THREE, cohort_size=4)
    tiny.change_replies(simulation, "train", shorten)
    (record,) = tiny.run_rounds(simulation, 1)
    assert list(record["lost"]) == ["1"]
    assert "[95] instead of [96]" in record["lost"]["1"]


def test_who_has_no_example_of_a_task_tells_nothing_of_it() -> None:
    stream = tiny.stream((1, 2), clients=5, absent=2)
    simulation = tiny.simulation_with_tasks(LOUD, stream, rounds=2, cohort_size=5)
    seen = RecordedJobs(simulation)
    tiny.run_rounds(simulation)
    trained = [client for client in "01234" if len(stream.tasks[1].partition[int(client)])]
    assert len(trained) == len(simulation.server.state.adaptive) == 3
    masks = [mask(seen.results[2, 2, client].model) for client in trained]
    torch.testing.assert_close(
        simulation.server.state.tasks[1].mask[LAYER], torch.stack([one.sigmoid() for one in masks]).mean(0)
    )
    bias = torch.stack([seen.results[2, 2, client].model["body.full1.bias"] for client in trained]).mean(0)
    torch.testing.assert_close(simulation.server.model["body.full1.bias"], bias)
