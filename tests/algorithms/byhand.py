"""Federated training written out plainly in float64: one loop for each level, PyTorch's autograd, and nothing folded,
settled, fused or vectorised. What FedKeep computes is compared with this.

Only what is drawn and given is taken from FedKeep: initial weights, cohorts, the clients' examples and batch orders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import tiny
import torch
from interception import record_fits
from torch import Tensor
from torch.func import functional_call

from fedkeep._utils import seeds
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.interface import Algorithm
from fedkeep.losses import Batch, Loss
from fedkeep.models import Weights
from fedkeep.models.custom import split_classifier
from fedkeep.trials.simulation import Simulation

Model = dict[str, Tensor]
BatchLoss = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]
"""(weights, images, labels) of one batch to a scalar."""
Lesson = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(teacher's logits, student's logits, labels) to the loss of a batch."""


class Hand:
    """A federation as a simulation would have it, to be run by hand."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.training = simulation.settings.training
        self.network = simulation.context.runner.build().double()
        self.initial = doubled(simulation.context.runner.initial)
        self.classes = simulation.context.num_classes

    def cohorts(self, rounds: int) -> list[tuple[int, list[str]]]:
        """Return (round, ordered cohort), rounds counted from 1."""
        return [(number, self.simulation.sample_cohort(number)) for number in range(1, rounds + 1)]

    def data(self, client: str) -> tuple[Tensor, Tensor]:
        """Return a client's normalised images, in float64, and its labels."""
        rows = self.simulation.federation.data(client)
        return self.simulation.context.normalise(rows["input"]).double(), rows["label"]

    def size(self, client: str) -> int:
        return len(self.data(client)[1])

    def gini(self, client: str) -> float:
        """Return 1 - sum_c p_c^2 of a client's labels."""
        labels = self.data(client)[1].tolist()
        return 1 - sum((labels.count(c) / len(labels)) ** 2 for c in range(self.classes))

    def logits(self, model: Mapping[str, Tensor], images: Tensor) -> Tensor:
        answer: Tensor = functional_call(self.network, dict(model), (images,))
        return answer

    def taught(self, model: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return what a frozen teacher says."""
        return self.logits({name: tensor.detach() for name, tensor in model.items()}, images).detach()

    def features(self, model: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return what the classifier of the tiny network reads."""
        read: list[Tensor] = []
        handle = split_classifier(self.network)[1].register_forward_pre_hook(
            lambda module, given: read.append(given[0])
        )
        self.logits(model, images)
        handle.remove()
        return read[0]

    def cross_entropy(self, model: Mapping[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return each_cross_entropy(self.logits(model, images), labels).mean()

    def batches(self, client: str, round: int) -> Iterator[Tensor]:
        """Yield the rows of every batch of a local training, all epochs."""
        order = seeds.rng(self.simulation.settings.seed, "batches", task=1, round=round, client=client)
        count = self.size(client)
        for _ in range(self.training.epochs):
            rows = torch.randperm(count, generator=order)
            for start in range(0, count, self.training.batch_size):
                yield rows[start : start + self.training.batch_size]

    def steps(self, client: str) -> int:
        return len(list(self.batches(client, 1)))

    def train(self, client: str, round: int, start: Mapping[str, Tensor], loss: BatchLoss) -> Model:
        """Return the model after one local training: SGD with momentum and weight decay."""
        images, labels = self.data(client)
        weights = {name: tensor.detach().clone() for name, tensor in start.items()}
        velocity = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        rate = self.training.lr * self.training.lr_decay ** (round - 1)
        for rows in self.batches(client, round):
            live = {name: tensor.requires_grad_() for name, tensor in weights.items()}
            gradients = torch.autograd.grad(loss(live, images[rows], labels[rows]), list(live.values()))
            for name, gradient in zip(list(weights), gradients, strict=True):
                weight = weights[name].detach()
                velocity[name] = (
                    self.training.momentum * velocity[name] + gradient + self.training.weight_decay * weight
                )
                weights[name] = weight - rate * velocity[name]
        return {name: tensor.detach() for name, tensor in weights.items()}

    def squared_gradients(
        self, model: Mapping[str, Tensor], client: str, size: int, limit: int | None = None, round: int = 0
    ) -> Model:
        """Return the mean over batches of ``size`` of the squared gradient of a batch's mean loss.

        Rows are in stored order, or in the random one of a round.
        """
        images, labels = self.data(client)
        if round:
            generator = seeds.rng(self.simulation.settings.seed, "fisher", task=1, round=round, client=client)
            order = torch.randperm(len(labels), generator=generator)
            images, labels = images[order], labels[order]
        if limit is not None:
            images, labels = images[:limit], labels[:limit]
        live = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.items()}
        total, count = zeros(model), 0
        for start in range(0, len(labels), size):
            loss = self.cross_entropy(live, images[start : start + size], labels[start : start + size])
            for name, gradient in zip(list(live), torch.autograd.grad(loss, list(live.values())), strict=True):
                total[name] = total[name] + gradient**2
            count += 1
        return {name: tensor / count for name, tensor in total.items()}

    def by_count(self, models: Mapping[str, Model]) -> Model:
        """Return sum_i n_i w_i / sum_i n_i."""
        return average(list(models.values()), [self.size(client) for client in models])

    def value_and_gradient(
        self, loss: BatchLoss, client: str, rows: Sequence[int], model: Model
    ) -> tuple[float, Model]:
        """Return a loss by hand on some of a client's rows, and its gradient."""
        images, labels = self.data(client)
        live = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.items()}
        value = loss(live, images[list(rows)], labels[list(rows)])
        return value.item(), dict(zip(live, torch.autograd.grad(value, list(live.values())), strict=True))

    def asked(self, objective: Loss, client: str, rows: Sequence[int], model: Model) -> tuple[float, Model]:
        """Return the same of an objective of FedKeep's, in float64."""
        images, labels = self.data(client)
        index = torch.tensor(list(rows))
        live = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.items()}
        value = objective(Student(self, live), [Batch({"input": images[index], "label": labels[index]}, index)])
        return value.item(), dict(zip(live, torch.autograd.grad(value, list(live.values())), strict=True))


class Student:
    """The network in training, as FedKeep's objectives see it, in float64."""

    def __init__(self, hand: Hand, weights: Mapping[str, Tensor]) -> None:
        self.hand = hand
        self._weights = weights

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    def logits(self, batch: Batch) -> Tensor:
        return self.hand.logits(self._weights, batch.data["input"])

    def features(self, batch: Batch) -> Tensor:
        return self.hand.features(self._weights, batch.data["input"])

    def teacher_logits(self, model: Weights, batch: Batch) -> Tensor:
        return self.hand.taught(doubled(model), batch.data["input"])

    def teacher_features(self, model: Weights, batch: Batch) -> Tensor:
        return self.hand.features(doubled(model), batch.data["input"]).detach()


# Models


def doubled(model: Weights) -> Model:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in model.items()}


def zeros(model: Mapping[str, Tensor]) -> Model:
    return {name: torch.zeros_like(tensor) for name, tensor in model.items()}


def combined(*terms: tuple[float, Mapping[str, Tensor]]) -> Model:
    """Return a sum of models, each times its factor."""
    return {name: torch.stack([factor * model[name] for factor, model in terms]).sum(0) for name in terms[0][1]}


def average(models: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None) -> Model:
    weights = [1.0] * len(models) if weights is None else list(weights)
    return combined(*((w / sum(weights), model) for w, model in zip(weights, models, strict=True)))


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two models."""
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def assert_same(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-4, atol: float = 3e-6
) -> None:
    """Compare a model in float32 with one computed by hand."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name].double(), tensor.double(), rtol=rtol, atol=atol)


def run_rounds(method: Algorithm[Any, Any], rounds: int, **changes: Any) -> Simulation:
    """Return a simulation after some rounds."""
    simulation = tiny.simulation(method, rounds=rounds, **changes)
    tiny.run_rounds(simulation)
    return simulation


# Losses of single examples, [b]


def softmax(logits: Tensor, tau: float = 1.0) -> Tensor:
    exponentials = (logits / tau).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def each_cross_entropy(logits: Tensor, labels: Tensor, tau: float = 1.0) -> Tensor:
    p = softmax(logits, tau)
    return torch.stack([-p[i, y].log() for i, y in enumerate(labels.tolist())])


def each_divergence(teacher: Tensor, student: Tensor, tau: float = 1.0) -> Tensor:
    """KL(p^T || p^S) over all classes."""
    p, q = softmax(teacher, tau), softmax(student, tau)
    return (p * (p.log() - q.log())).sum(-1)


def without_target(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logits of the classes that are not the label, [b, classes - 1]."""
    kept = [[c for c in range(logits.shape[1]) if c != y] for y in labels.tolist()]
    return torch.stack([logits[i, columns] for i, columns in enumerate(kept)])


def each_nontarget(teacher: Tensor, student: Tensor, labels: Tensor, tau: float = 1.0) -> Tensor:
    """NT: the divergence over the classes that are not the label."""
    return each_divergence(without_target(teacher, labels), without_target(student, labels), tau)


def each_target(teacher: Tensor, student: Tensor, labels: Tensor, tau: float = 1.0) -> Tensor:
    """TC: the binary divergence of (p_y, 1 - p_y)."""
    losses = []
    for i, y in enumerate(labels.tolist()):
        p, q = softmax(teacher[i], tau)[y], softmax(student[i], tau)[y]
        losses.append(p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())
    return torch.stack(losses)


def entropies(logits: Tensor) -> list[float]:
    """Return the entropy of each example's softmax at temperature 1, in nats."""
    p = softmax(logits)
    return [-sum(x * math.log(x) for x in row) for row in p.tolist()]


def returning(hand: Hand, rounds: int) -> set[str]:
    """Return the clients that are drawn more than once."""
    sampled = list(itertools.chain.from_iterable(cohort for _, cohort in hand.cohorts(rounds)))
    return {client for client in sampled if sampled.count(client) > 1}


# Methods taught by the received model


def hand_of(**changes: Any) -> Hand:
    """Return the tiny federation, to be run by hand."""
    return Hand(tiny.simulation(FedAvg(), **changes))


def taught_by(hand: Hand, teacher: Mapping[str, Tensor], distillation: Lesson) -> BatchLoss:
    return lambda w, x, y: distillation(hand.taught(teacher, x), hand.logits(w, x), y)


def rounds_of(hand: Hand, rounds: int, lesson_of: Callable[[str], Lesson]) -> list[Model]:
    """Return the model after each round of a method taught by the received model and averaged by examples."""
    model, left = hand.initial, []
    for number, cohort in hand.cohorts(rounds):
        model = hand.by_count({c: hand.train(c, number, model, taught_by(hand, model, lesson_of(c))) for c in cohort})
        left.append(model)
    return left


def compare(method: Any, expected: Sequence[Model], **changes: Any) -> None:
    """Run a method and compare it with the hand's model after each round."""
    compare_rounds(tiny.simulation(method, rounds=len(expected), **changes), expected)


def compare_rounds(simulation: Simulation, expected: Sequence[Model]) -> None:
    """Compare a simulation with the hand's model after each of its next rounds."""
    for model in expected:
        tiny.run_rounds(simulation, 1)
        assert_same(simulation.server.model, model)


def objective_at(method: Any, client: str, round: int, **changes: Any) -> tuple[Loss, Model]:
    """Return what a client minimised in a round, and the model that it received."""
    simulation = tiny.simulation(method, rounds=round, cohort_size=6, **changes)
    fits = record_fits(simulation)
    tiny.run_rounds(simulation)
    (objective, model) = next((one.loss, one.model) for one in fits if (one.round, one.client) == (round, client))
    return objective, doubled(model)


def elsewhere(model: Model) -> Model:
    """Return a student that has moved away from its teacher."""
    generator = torch.Generator().manual_seed(4)
    return {n: t + 0.3 * torch.randn(t.shape, generator=generator, dtype=torch.float64) for n, t in model.items()}


def assert_objective(hand: Hand, method: Any, distillation: Lesson, rows: Sequence[int], **changes: Any) -> None:
    """Compare value and gradient of what client 2 minimises in round 2 with the loss by hand, on these of its rows."""
    objective, received = objective_at(method, "2", 2, **changes)
    student = elsewhere(received)
    value, gradient = hand.asked(objective, "2", rows, student)
    expected, slope = hand.value_and_gradient(taught_by(hand, received, distillation), "2", rows, student)
    assert value == pytest.approx(expected, rel=1e-6)
    assert_same(gradient, slope, rtol=1e-5, atol=1e-8)
