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

from fedkeep._utils import seeds
from fedkeep._utils.devices import to_device
from fedkeep.data import Augmentation
from fedkeep.errors import ConfigError
from fedkeep.interface import Data, Fit, Training
from fedkeep.interface.pytree import tree_signature
from fedkeep.interface.training import EpochEndsWith, Parametrization, Precision, StepCallback
from fedkeep.losses import Batch, Loss
from fedkeep.models import Weights
from fedkeep.models.custom import split_classifier
from fedkeep.models.weights import load_weights, state_dict_copy
from fedkeep.training.model_runner import ModelRunner

Normalise = Callable[[Tensor], Tensor]


class NetworkView:
    """The network in training as a loss sees it (`fedkeep.losses.NetworkView`), for one step.

    Parameters
    ----------
    runner : ModelRunner
        Runs frozen models.
    weights : Mapping[str, Tensor]
        The parameters that are trained, by name.
    forward : Callable[[Tensor], Tensor]
        Runs the network with them: the trained network itself, or a call that lends it stacked weights.
    """

    def __init__(self, runner: ModelRunner, weights: Mapping[str, Tensor], forward: Callable[[Tensor], Tensor]) -> None:
        self.runner = runner
        self.weights = weights
        self._forward = forward
        self._logits: list[tuple[Tensor, Tensor]] = []
        self._features: list[tuple[Tensor, Tensor]] = []

    def logits(self, batch: Batch) -> Tensor:
        # A sum of losses asks several times for the same images; a list of one or two is quicker than hashing.
        for images, logits in self._logits:
            if images is batch.data["image"]:
                return logits
        logits = self._forward(batch.data["image"])
        self._logits.append((batch.data["image"], logits))
        if self.runner.classifier_input is not None:
            self._features.append((batch.data["image"], self.runner.classifier_input))
        return logits

    def features(self, batch: Batch) -> Tensor:
        split_classifier(self.runner.train_network)  # says what is missing
        self.logits(batch)
        for images, features in self._features:
            if images is batch.data["image"]:
                return features
        raise ConfigError(
            f"{type(self.runner.train_network).__name__} did not use its classifier in forward, so its features are "
            "unknown. Let forward(images) be classifier(features(images))."
        )

    def teacher_features(self, model: Weights, batch: Batch) -> Tensor:
        return self.runner.features(model, batch.data["image"])

    def teacher_logits(self, model: Weights, batch: Batch) -> Tensor:
        return self.runner.logits(model, batch.data["image"])


@dataclass(frozen=True)
class BatchStream:
    """One data set as `fit` draws it: rows in a new random order every pass, images normalised once or augmented.

    Attributes
    ----------
    data : Data
        Columns of one length.
    normalise : Callable[[Tensor], Tensor]
        Maps uint8 images to what the network takes.
    augmentation : Augmentation
        Of images that are still uint8.
    order, noise : torch.Generator
        Draw the rows' order and the augmentation.
    layout : torch.memory_format
        Of batches of images.
    batch_size : int
        Of this data set; 0 for the recipe's.
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
        order = to_device(torch.randperm(count, generator=self.order), self.data["image"].device)
        # Gathering a pass at once leaves only views to the steps, which is quicker than a gather in each.
        rows = {name: column[order] for name, column in self.data.items()}
        starts = list(range(0, count, size))
        if merge_last and len(starts) > 1 and count - starts[-1] == 1:
            starts.pop()
        ends = [*starts[1:], count]
        return (self._batch(rows, order, a, b) for a, b in zip(starts, ends, strict=True))

    def first(self, count: int) -> Batch:
        """Return the first rows as a batch, for a trial step: nothing is drawn, and nothing augmented."""
        rows = torch.arange(count, device=self.data["image"].device)
        return replace(self, augmentation=Augmentation())._batch(self.data, rows, 0, count)

    def _batch(self, rows: Mapping[str, Tensor], order: Tensor, start: int, end: int) -> Batch:
        data = {name: column[start:end] for name, column in rows.items()}
        made = data.pop("generated", None)
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
    """One local training: a copy of ``model`` learns from the first stream, with a batch of every other beside each.

    Attributes
    ----------
    model : Weights
        What the training starts from.
    objective : Objective
        The loss of a step.
    streams : Sequence[BatchStream]
        The data sets.
    epochs : int
        Over the first stream.
    round : int
        For the learning rate of the round.
    seed : int
        Of what the network itself draws, such as dropout.
    epoch_ends_with : PassEnds
        ``"first"``: a pass ends with the first stream, the others start over. ``"shortest"``: it ends with the
        shortest, and all start over then.
    parametrization : Composition, optional
        Computes the network's weights from what is trained; None where these are the same.
    watch : Watch, optional
        Sees every step before it is taken.
    """

    model: Weights
    objective: Loss
    streams: Sequence[BatchStream]
    epochs: int
    round: int
    seed: int
    epoch_ends_with: EpochEndsWith = "first"
    parametrization: Parametrization | None = None
    step_callback: StepCallback | None = None

    @property
    def examples(self) -> int:
        """Rows of the first stream."""
        return len(self.streams[0].data["image"])

    @property
    def signature(self) -> Hashable:
        """Equal for jobs whose steps are the same but for the numbers in their tensors."""
        columns = [[(name, c.dtype, c.shape[1:]) for name, c in stream.data.items()] for stream in self.streams]
        return tuple(map(tuple, columns)), tree_signature(self.objective)

    def steps(self, size: int, merge_last: bool) -> Iterator[list[Batch]]:
        """Yield the batches of each optimiser step, one of every stream.

        Raises
        ------
        ValueError
            If a stream beside the first has no examples.
        """
        for number, stream in enumerate(self.streams[1:], start=2):
            if not len(stream.data["image"]):
                raise ValueError(
                    f"data set {number} of this fit has no examples to draw beside the first; leave it out"
                )
        others = [_endless(stream, size, merge_last) for stream in self.streams[1:]]
        for _ in range(self.epochs):
            if self.epoch_ends_with == "shortest":
                others = [stream.batches(size, merge_last) for stream in self.streams[1:]]
            own = self.streams[0].batches(size, merge_last)
            yield from map(list, zip(own, *others, strict=False))


class SGDStepper:
    """Takes steps of stochastic gradient descent on some weights.

    The steps are those of torch.optim.SGD bit for bit, without the overhead of an optimiser that serves every purpose:
    a small network's step takes two thirds of the time.

    Parameters
    ----------
    runner : ModelRunner
        Whose network is trained.
    weights : Mapping[str, Tensor]
        The weights by name; those that require a gradient are trained.
    forward : Callable[[Tensor], Tensor]
        Runs the network with them.
    training : Training
        Settings of the steps.
    lr : float
        Learning rate.

    Attributes
    ----------
    loss_sum : Tensor
        Sum of the losses of all steps.
    """

    def __init__(
        self,
        runner: ModelRunner,
        weights: Mapping[str, Tensor],
        forward: Callable[[Tensor], Tensor],
        training: Training,
        lr: float,
    ) -> None:
        self.runner = runner
        self.weights = weights
        self.parameters = [weight for weight in weights.values() if weight.requires_grad]
        self.momenta = [torch.zeros_like(weight) for weight in self.parameters] if training.momentum else []
        self.training = training
        self.lr = lr
        self.loss_sum = torch.zeros((), device=runner.device)
        self._forward = forward

    def step(self, objective: Loss, batches: list[Batch], step_callback: StepCallback | None = None) -> None:
        """Take a step on one batch of every stream."""
        training = self.training
        with autocast(training.precision, self.runner.device):
            loss = objective(NetworkView(self.runner, self.weights, self._forward), batches)
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        moved = [number for number, gradient in enumerate(found) if gradient is not None]
        parameters = [self.parameters[number] for number in moved]
        gradients = [_strided_like(self.parameters[number], found[number]) for number in moved]
        if step_callback is not None:
            for parameter, gradient in zip(self.parameters, found, strict=True):
                parameter.grad = gradient
            step_callback(self.weights)
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
            self.loss_sum += loss


def _strided_like(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient with the strides of its weight, so that the update reads both in one order."""
    return gradient if gradient.stride() == weight.stride() else torch.empty_like(weight).copy_(gradient)


def _clipped(gradients: list[Tensor], limit: float) -> list[Tensor]:
    """Return gradients as torch.nn.utils.clip_grad_norm_ leaves them, not in place: one may be that of two weights."""
    factor = (limit / (nn.utils.get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
    return list(torch._foreach_mul(gradients, factor))


def fit(runner: ModelRunner, job: TrainJob, training: Training) -> Fit:
    """Carry out one local training, step by step."""
    merge_last = runner.has_batch_norm
    if job.examples == 0 or (merge_last and job.examples == 1):
        # There is nothing to learn from; batch norm cannot learn from one example.
        return Fit(job.model, job.examples, 0, 0.0)
    stepper, trained_weights = _prepare(runner, job, training)
    steps = 0
    with seeds.temporary_seed(job.seed, runner.device):
        for batches in job.steps(training.batch_size, merge_last):
            stepper.step(job.objective, batches, job.step_callback)
            steps += 1
    runner.classifier_input = None  # it holds on to all that autograd kept of the last step
    return Fit(trained_weights(), job.examples, steps, stepper.loss_sum.item() / max(steps, 1))


def _prepare(
    runner: ModelRunner, job: TrainJob, training: Training
) -> tuple[SGDStepper, Callable[[], dict[str, Tensor]]]:
    """Return what takes the steps of a job, and a function that returns the weights that they left."""
    network = runner.train_network.train()
    if job.parametrization is not None:
        weights, forward, trained_weights = _compose(runner, job.model, job.parametrization)
    else:
        load_weights(network, job.model)
        weights, forward, trained_weights = dict(network.named_parameters()), network, partial(state_dict_copy, network)
    return SGDStepper(runner, weights, forward, training, training.lr_at(job.round)), trained_weights


def _compose(
    runner: ModelRunner, model: Weights, parametrization: Parametrization
) -> tuple[dict[str, Tensor], Callable[[Tensor], Tensor], Callable[[], dict[str, Tensor]]]:
    """Return what is trained of a model from which the network's weights are computed, what runs it, and a function
    that returns all of it in the end."""
    network = runner.train_network
    buffers = {name for name, _ in network.named_buffers()}
    held = {name: tensor.detach().to(runner.device, copy=True) for name, tensor in model.items()}
    load_weights(network, parametrization(held))  # what it lacks would be taken from the training before
    weights = {name: tensor.requires_grad_() for name, tensor in held.items() if name not in buffers}

    def forward(images: Tensor) -> Tensor:
        logits: Tensor = functional_call(network, dict(parametrization(held)), (images,), tie_weights=False)
        return logits

    return weights, forward, lambda: {name: tensor.detach() for name, tensor in held.items()}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which layers compute as autocast as a recipe asks."""
    return nullcontext() if precision == "float32" else torch.autocast(device.type, getattr(torch, precision))


def _endless(stream: BatchStream, size: int, merge_last: bool) -> Iterator[Batch]:
    while True:
        yield from stream.batches(size, merge_last)
