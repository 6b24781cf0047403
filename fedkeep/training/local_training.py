"""Local training: the one loop in which the recipe's network learns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.sgd import sgd

from fedkeep import seeds
from fedkeep.data import Augmentation
from fedkeep.devices import sent
from fedkeep.engine.forms import form
from fedkeep.errors import ConfigError
from fedkeep.interface import Data, Fit, Training
from fedkeep.interface.training import Composition, PassEnds, Precision, Watch
from fedkeep.models import Weights
from fedkeep.models.custom import split
from fedkeep.models.weights import load_into, weights_of
from fedkeep.objectives import Batch, Objective
from fedkeep.training.model_runner import ModelRunner

Normalise = Callable[[Tensor], Tensor]


class ModelView:
    """The network in training as objectives see it (`fedkeep.objectives.Student`), for one step.

    Parameters
    ----------
    weights : the parameters by name, live.
    forward : runs the network with them; the trained network itself, or a call that lends it stacked weights.
    """

    def __init__(
        self, networks: ModelRunner, weights: Mapping[str, Tensor], forward: Callable[[Tensor], Tensor]
    ) -> None:
        self.networks = networks
        self.weights = weights
        self._forward = forward
        self._answers: list[tuple[Tensor, Tensor]] = []
        self._read: list[tuple[Tensor, Tensor]] = []

    def logits(self, batch: Batch) -> Tensor:
        # A sum of objectives asks several times for the same images; a list of one or two is quicker than hashing.
        for images, known in self._answers:
            if images is batch.data["image"]:
                return known
        answer = self._forward(batch.data["image"])
        self._answers.append((batch.data["image"], answer))
        if self.networks.read is not None:
            self._read.append((batch.data["image"], self.networks.read))
        return answer

    def features(self, batch: Batch) -> Tensor:
        split(self.networks.trained)  # says what is missing
        self.logits(batch)
        for images, read in self._read:
            if images is batch.data["image"]:
                return read
        raise ConfigError(
            f"{type(self.networks.trained).__name__} did not use its classifier in forward, so its features are "
            "unknown. Let forward(images) be classifier(features(images))."
        )

    def frozen_features(self, model: Weights, batch: Batch) -> Tensor:
        return self.networks.features(model, batch.data["image"])

    def frozen(self, model: Weights, batch: Batch) -> Tensor:
        return self.networks.logits(model, batch.data["image"])


@dataclass(frozen=True)
class BatchStream:
    """One data set as `fit` draws it: rows in a new random order every pass, images normalised once or augmented.

    ``batch_size`` is its own; 0 for the recipe's.
    """

    data: Data
    normalise: Normalise
    augmentation: Augmentation
    order: torch.Generator
    noise: torch.Generator
    layout: torch.memory_format = torch.contiguous_format
    batch_size: int = 0

    def batches(self, size: int, merge_last: bool) -> Iterator[Batch]:
        """Yield one pass over the data. ``merge_last`` joins a last batch of one to the one before it."""
        count, size = len(self.data["image"]), self.batch_size or size
        order = sent(torch.randperm(count, generator=self.order), self.data["image"].device)
        # Gathering a pass at once leaves only views to the steps, which is quicker than a gather in each.
        rows = {name: column[order] for name, column in self.data.items()}
        starts = list(range(0, count, size))
        if merge_last and len(starts) > 1 and count - starts[-1] == 1:
            starts.pop()
        ends = [*starts[1:], count]
        return (self._batch(rows, order, a, b) for a, b in zip(starts, ends, strict=True))

    def first(self, count: int) -> Batch:
        """Return the first rows as a batch, for a trial: nothing is drawn, and nothing augmented."""
        rows = torch.arange(count, device=self.data["image"].device)
        return replace(self, augmentation=Augmentation())._batch(self.data, rows, 0, count)

    def _batch(self, rows: Mapping[str, Tensor], order: Tensor, start: int, end: int) -> Batch:
        data = {name: column[start:end] for name, column in rows.items()}
        made = data.pop("made", None)
        if data["image"].dtype == torch.uint8:
            if self.augmentation:
                data["image"] = self.augmentation(data["image"], self.normalise, self.noise, made)
            else:
                data["image"] = self.normalise(data["image"])
        if data["image"].ndim == 4:
            data["image"] = data["image"].contiguous(memory_format=self.layout)
        return Batch(data, order[start:end])


@dataclass(frozen=True, eq=False)
class TrainJob:
    """One training: a copy of ``model`` on the first source, with one batch of every other source beside each of its
    own.

    Attributes
    ----------
    passes : over the first source.
    round : for the learning rate of the round.
    seed : of what the network itself draws, such as dropout.
    pass_ends : with the first source, the others starting over; or with the shortest, all starting over then.
    composition : computes the network's weights from what is trained; None where these are the same.
    watch : sees every step before it is taken.
    """

    model: Weights
    objective: Objective
    sources: Sequence[BatchStream]
    passes: int
    round: int
    seed: int
    pass_ends: PassEnds = "first"
    composition: Composition | None = None
    watch: Watch | None = None

    @property
    def examples(self) -> int:
        """Rows of the first source."""
        return len(self.sources[0].data["image"])

    @property
    def kind(self) -> Hashable:
        """What it has in common with trainings whose steps are the same, but for the numbers in their tensors."""
        return tuple(form(dict(source.data), True) for source in self.sources), form(self.objective)

    def steps(self, size: int, merge_last: bool) -> Iterator[list[Batch]]:
        """Yield the batches of each optimiser step, one of every source.

        Raises
        ------
        ValueError
            If a source beside the first has no examples.
        """
        for number, source in enumerate(self.sources[1:], start=2):
            if not len(source.data["image"]):
                raise ValueError(
                    f"data set {number} of this fit has no examples to draw beside the first; leave it out"
                )
        others = [_endless(source, size, merge_last) for source in self.sources[1:]]
        for _ in range(self.passes):
            if self.pass_ends == "shortest":
                others = [source.batches(size, merge_last) for source in self.sources[1:]]
            own = self.sources[0].batches(size, merge_last)
            yield from map(list, zip(own, *others, strict=False))


class SGDStepper:
    """Weights in training: takes one step of stochastic gradient descent after another.

    The steps are those of torch.optim.SGD bit for bit, without what an optimiser does to be of use to everybody: a
    small network's step takes two thirds of the time.

    Parameters
    ----------
    weights : what is trained, by name. forward : runs the network with them. lr : the learning rate.

    Attributes
    ----------
    losses : the sum over all steps.
    """

    def __init__(
        self,
        networks: ModelRunner,
        weights: Mapping[str, Tensor],
        forward: Callable[[Tensor], Tensor],
        training: Training,
        lr: float,
    ) -> None:
        self.networks = networks
        self.weights = weights
        self.parameters = [weight for weight in weights.values() if weight.requires_grad]
        self.momenta = [torch.zeros_like(weight) for weight in self.parameters] if training.momentum else []
        self.training = training
        self.lr = lr
        self.losses = torch.zeros((), device=networks.device)
        self._forward = forward

    def step(self, objective: Objective, batches: list[Batch], watch: Watch | None = None) -> None:
        """Take a step on one batch of every source."""
        training = self.training
        with autocast(training.precision, self.networks.device):
            loss = objective(ModelView(self.networks, self.weights, self._forward), batches)
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        moved = [number for number, gradient in enumerate(found) if gradient is not None]
        parameters = [self.parameters[number] for number in moved]
        gradients = [_laid_like(self.parameters[number], found[number]) for number in moved]
        if watch is not None:
            for parameter, gradient in zip(self.parameters, found, strict=True):
                parameter.grad = gradient
            watch(self.weights)
        with torch.no_grad():
            if training.clip is not None:
                gradients = _clipped(gradients, training.clip)
            sgd(
                parameters,
                gradients,
                [self.momenta[number] for number in moved] if training.momentum else [None] * len(moved),
                fused=True,
                weight_decay=training.weight_decay,
                momentum=training.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            self.losses += loss


def _laid_like(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient as it is read beside its weight, in the same order of memory."""
    return gradient if gradient.stride() == weight.stride() else torch.empty_like(weight).copy_(gradient)


def _clipped(gradients: list[Tensor], limit: float) -> list[Tensor]:
    """Return gradients as torch.nn.utils.clip_grad_norm_ leaves them, not in place: one may be that of two weights."""
    factor = (limit / (nn.utils.get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
    return list(torch._foreach_mul(gradients, factor))


def fit(networks: ModelRunner, assignment: TrainJob, training: Training) -> Fit:
    """Carry out one training, step by step."""
    model, merge_last = assignment.model, networks.has_batch_norm
    if assignment.examples == 0 or (merge_last and assignment.examples == 1):
        return Fit(
            model, assignment.examples, 0, 0.0
        )  # nothing to learn from; batch norm cannot learn from one example
    learner, left = _learner(networks, assignment, training)
    steps = 0
    with seeds.borrowed(assignment.seed, networks.device):
        for batches in assignment.steps(training.batch_size, merge_last):
            learner.step(assignment.objective, batches, assignment.watch)
            steps += 1
    networks.read = None  # it holds on to all that autograd kept of the last step
    return Fit(left(), assignment.examples, steps, learner.losses.item() / max(steps, 1))


def _learner(
    networks: ModelRunner, assignment: TrainJob, training: Training
) -> tuple[SGDStepper, Callable[[], dict[str, Tensor]]]:
    """Return what takes the steps of a training, and what tells the weights that they left."""
    network = networks.trained.train()
    if assignment.composition is not None:
        weights, forward, left = _composed(networks, assignment.model, assignment.composition)
        return SGDStepper(networks, weights, forward, training, training.lr_at(assignment.round)), left
    load_into(network, assignment.model)
    left = partial(weights_of, network)
    weights = dict(network.named_parameters())
    return SGDStepper(networks, weights, network, training, training.lr_at(assignment.round)), left


def _composed(
    networks: ModelRunner, model: Weights, composition: Composition
) -> tuple[dict[str, Tensor], Callable[[Tensor], Tensor], Callable[[], dict[str, Tensor]]]:
    """Return what is trained of a model from which the network's weights are computed, what runs it, and what tells
    all of it in the end."""
    buffers = {name for name, _ in networks.trained.named_buffers()}
    held = {name: tensor.detach().to(networks.device, copy=True) for name, tensor in model.items()}
    load_into(networks.trained, composition(held))  # what it lacks would be taken from the training before
    weights = {name: tensor.requires_grad_() for name, tensor in held.items() if name not in buffers}

    def forward(images: Tensor) -> Tensor:
        logits: Tensor = functional_call(networks.trained, dict(composition(held)), (images,), tie_weights=False)
        return logits

    return weights, forward, lambda: {name: tensor.detach() for name, tensor in held.items()}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which layers compute as autocast as a recipe asks."""
    return nullcontext() if precision == "float32" else torch.autocast(device.type, getattr(torch, precision))


def _endless(source: BatchStream, size: int, merge_last: bool) -> Iterator[Batch]:
    while True:
        yield from source.batches(size, merge_last)
