"""Local training: the only loop that trains the recipe's network."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedkeep._utils import progress, seeds
from fedkeep._utils.noise_stream import NoiseStream
from fedkeep._utils.torch_state import to_device
from fedkeep.data import Augmentation
from fedkeep.errors import ConfigError
from fedkeep.interface import Data, Fit, Training
from fedkeep.interface.pytree import tree_signature, tree_tensors
from fedkeep.interface.training_settings import EpochEndsWith, Parametrization, Precision
from fedkeep.losses import Batch, Loss
from fedkeep.losses.base import check_scalar
from fedkeep.models import Weights
from fedkeep.models.custom import split_classifier
from fedkeep.models.weights import load_weights, state_dict_copy, tied_parameters
from fedkeep.training.cuda_graph import CapturedSteps, can_capture, capture_on
from fedkeep.training.model_runner import IN_PLACE, ModelRunner

Normalise = Callable[[Tensor], Tensor]
MAX_CAPTURED = 4  # kinds of local training whose captured steps are kept: a client may train in several ways


class NetworkView:
    """The network in one training step, as a loss sees it; implements `fedkeep.losses.ModelView`.

    ``weights``: The trained parameters by name.
    ``forward``: Runs the network with these parameters: the training network itself, or a functional call with stacked
        weights.
    """

    def __init__(self, runner: ModelRunner, weights: Mapping[str, Tensor], forward: Callable[[Tensor], Tensor]) -> None:
        self.runner = runner
        self.weights = weights
        self._forward = forward
        self._logits: list[tuple[Tensor, Tensor]] = []
        self._features: list[tuple[Tensor, Tensor]] = []

    def logits(self, batch: Batch) -> Tensor:
        if not isinstance(batch, Batch):
            raise ConfigError(f"a model's logits takes a batch, such as batches[0], not a {type(batch).__name__}.")
        # A sum of losses needs the same images several times. Comparing with the one or two in a list beats hashing.
        for images, logits in self._logits:
            if images is batch.data["input"]:
                return logits
        logits = self._forward(batch.data["input"])
        self._logits.append((batch.data["input"], logits))
        if self.runner.classifier_input is not None:
            self._features.append((batch.data["input"], self.runner.classifier_input))
        return logits

    def features(self, batch: Batch) -> Tensor:
        split_classifier(self.runner.train_network)  # raises an error that says what is missing
        self.logits(batch)
        for images, features in self._features:
            if images is batch.data["input"]:
                return features
        raise ConfigError(
            f"{type(self.runner.train_network).__name__} did not use its classifier in forward, so its features are "
            "unknown. Let forward(images) be classifier(features(images))."
        )

    def teacher_features(self, model: Weights, batch: Batch) -> Tensor:
        return self.runner.features(model, batch.data["input"])

    def teacher_logits(self, model: Weights, batch: Batch) -> Tensor:
        return self.runner.logits(model, batch.data["input"])


@dataclass(frozen=True)
class BatchStream:
    """One data set as `fit` reads it: in batches, in a new random order in every pass, normalised or augmented.

    ``data``: Columns of one length.
    ``normalise``: Maps uint8 images to the network's input.
    ``augmentation``: Random changes of images that are still uint8.
    ``order``: Random generator for the order of the examples.
    ``noise``: Random generator for the augmentation.
    ``layout``: Memory layout of image batches.
    ``batch_size``: Batch size of this data set; 0 for the recipe's.
    """

    data: Data
    normalise: Normalise
    augmentation: Augmentation
    order: torch.Generator
    noise: torch.Generator
    layout: torch.memory_format = torch.contiguous_format
    batch_size: int = 0

    def batches(self, size: int, merge_last: bool) -> Iterator[Batch]:
        """Make one pass over the data.

        ``merge_last``: Whether a last batch of one example is merged into the batch before it.
        """
        count, size = len(self.data["input"]), self.batch_size or size
        order = to_device(torch.randperm(count, generator=self.order), self.data["input"].device)
        # Gathering once per pass leaves only views to the steps, which is faster than gathering in each.
        rows = {name: column.index_select(0, order) for name, column in self.data.items()}
        starts = list(range(0, count, size))
        if merge_last and count == 1:  # batch norm needs two: the only example is there twice
            rows = {name: torch.cat((column, column)) for name, column in rows.items()}
            order, count = order.repeat(2), 2
        if merge_last and len(starts) > 1 and count - starts[-1] == 1:
            starts.pop()
        ends = [*starts[1:], count]
        return (self._batch(rows, order, a, b) for a, b in zip(starts, ends, strict=True))

    def first(self, count: int) -> Batch:
        """Return the first examples as a batch, to try a step, without using a random generator."""
        rows = torch.arange(count, device=self.data["input"].device)
        return replace(self, augmentation=Augmentation())._batch(
            {name: column[:count].clone() for name, column in self.data.items()}, rows, 0, count
        )

    def sample(self, probability: float, noise: NoiseStream) -> Batch:
        """Return a batch in which each example is with the same probability, independently of the others.

        Returns: The batch, which may be empty.
        """
        chosen = (noise.uniform(len(self.data["input"])) < probability).nonzero().squeeze(1)
        order = to_device(chosen, self.data["input"].device)
        return self._batch({name: c.index_select(0, order) for name, c in self.data.items()}, order, 0, len(order))

    def _batch(self, rows: Mapping[str, Tensor], order: Tensor, start: int, end: int) -> Batch:
        data = {name: column[start:end] for name, column in rows.items()}
        generated = data.pop("generated", None)
        if data["input"].dtype == torch.uint8:
            if self.augmentation:
                data["input"] = self.augmentation(data["input"], self.normalise, self.noise, generated)
            else:
                data["input"] = self.normalise(data["input"])
        if data["input"].ndim == 4:
            data["input"] = data["input"].contiguous(memory_format=self.layout)
        return Batch(data, order[start:end])


@dataclass(frozen=True, eq=False)
class TrainJob:
    """One local training: what to train, with which loss, on which data.

    ``model``: The weights from which training starts.
    ``loss``: The loss of a step.
    ``streams``: The data sets; each step takes one batch of each.
    ``epochs``: Number of passes over the first data set.
    ``round``: The round, on which the learning rate depends.
    ``seed``: Seed of the network's random numbers, such as dropout.
    ``epoch_ends_with``: When an epoch over several data sets ends (see `Party.fit`).
    ``parametrization``: Computes the network's weights from the trained tensors; None if they are the same.
    """

    model: Weights
    loss: Loss
    streams: Sequence[BatchStream]
    epochs: int
    round: int
    seed: int
    epoch_ends_with: EpochEndsWith = "first"
    parametrization: Parametrization | None = None

    @property
    def num_examples(self) -> int:
        """Number of examples in the first data set."""
        return len(self.streams[0].data["input"])

    @property
    def signature(self) -> Hashable:
        """A hashable value that is equal for jobs whose steps differ only in the numbers in their tensors."""
        columns = [[(name, c.dtype, c.shape[1:]) for name, c in stream.data.items()] for stream in self.streams]
        return tuple(map(tuple, columns)), tree_signature(self.loss)

    def most_steps(self, size: int) -> int:
        """Return how many batches the epochs have: the steps with DP-SGD; else there may be a few fewer."""
        return self.epochs * ceil(self.num_examples / (self.streams[0].batch_size or size))

    def steps(self, size: int, merge_last: bool) -> Iterator[list[Batch]]:
        """Yield the batches of each optimizer step.

        ``merge_last``: Whether a last batch of one example is merged into the batch before it.
        Yields: One batch of each data set.
        """
        for number, stream in enumerate(self.streams[1:], start=2):
            if not len(stream.data["input"]):
                raise ValueError(
                    f"data set {number} of this fit has no examples to train on beside the first; leave it out"
                )
        others = [_endless(stream, size, merge_last) for stream in self.streams[1:]]
        for _ in range(self.epochs):
            if self.epoch_ends_with == "shortest":
                others = [stream.batches(size, merge_last) for stream in self.streams[1:]]
            first = self.streams[0].batches(size, merge_last)
            yield from map(list, zip(first, *others, strict=False))


@dataclass(eq=False, repr=False)
class SGDStepper:
    """Takes steps of SGD, or of the optimizer that the settings name.

    The steps equal those of `torch.optim.SGD` bit for bit (with momentum, of the fused one). Without the overhead of a
    general optimizer, a step of a small network takes two thirds of the time.

    ``weights``: The weights by name; only those that require a gradient are kept, and trained.
    ``forward``: Runs the network with these weights.
    ``loss_sum``: Sum of the losses of all steps so far, a scalar.
    """

    runner: ModelRunner
    weights: Mapping[str, Tensor]
    forward: Callable[[Tensor], Tensor]
    training: Training
    lr: float

    def __post_init__(self) -> None:
        training = self.training
        self.weights = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        self.parameters = list(self.weights.values())
        self.momenta = [torch.zeros_like(weight) for weight in self.parameters] if training.momentum else []
        self.optimizer: torch.optim.Optimizer | None = None
        if training.optimizer != "sgd":
            kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
            first, second = training.betas
            self.optimizer = kind(self.parameters, self.lr, (first, second), weight_decay=training.weight_decay)
        self.loss_sum = torch.zeros((), device=self.runner.device)

    def restart(self) -> None:
        """Begin another training with SGD, as a new stepper would."""
        for tensor in (*self.momenta, self.loss_sum):
            tensor.zero_()

    def step(self, loss: Loss, batches: list[Batch]) -> None:
        """Take one step.

        ``batches``: One batch of each data set.
        """
        training = self.training
        versions = [column._version for batch in batches for column in batch.data.values()]
        with autocast(training.precision, self.runner.device):
            value = loss(NetworkView(self.runner, self.weights, self.forward), batches)
        if versions != [column._version for batch in batches for column in batch.data.values()]:
            raise ConfigError(IN_PLACE.format(f"the network or the loss {type(loss).__name__}"))
        check_scalar(value, loss)
        found = torch.autograd.grad(value, self.parameters, allow_unused=True) if value.requires_grad else ()
        used = [number for number, gradient in enumerate(found) if gradient is not None]
        if not used:
            raise ConfigError(
                f"the loss {type(loss).__name__} does not depend on the weights that are trained. Compute it from "
                "model.logits, model.features or model.weights, without detach() or item()."
            )
        parameters = [self.parameters[number] for number in used]
        gradients = [_strided_like(self.parameters[number], found[number]) for number in used]
        self.runner.classifier_input = None  # it keeps this step's autograd graph alive
        with torch.no_grad():
            if training.max_grad_norm is not None:
                gradients = clip_gradients(gradients, training.max_grad_norm)
            self.loss_sum += value
            if self.optimizer is not None:
                _step(self.optimizer, parameters, gradients)
                return
            torch._fused_sgd_(
                parameters,
                gradients,
                [self.momenta[number] for number in used] if training.momentum else [],
                weight_decay=training.weight_decay,
                momentum=training.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )


def _step(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Let an optimizer of PyTorch take a step; a parameter that the loss did not use keeps its value."""
    optimizer.zero_grad(set_to_none=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _strided_like(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient with the strides of its weight, so that the update reads both in one order."""
    return gradient if gradient.stride() == weight.stride() else torch.empty_like(weight).copy_(gradient)


def clip_gradients(gradients: list[Tensor], limit: float) -> list[Tensor]:
    """Scale gradients as `torch.nn.utils.clip_grad_norm_` does, but not in place.

    Autograd may return one tensor as the gradient of two weights.

    ``limit``: The largest norm of all of them together.
    """
    factor = (limit / (nn.utils.get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
    return list(torch._foreach_mul(gradients, factor))


def clip_factors(gradients: Sequence[Tensor], limit: float) -> Tensor:
    """Return for each row of gradients [m, ...] by what `torch.nn.utils.clip_grad_norm_` would multiply it, [m]."""
    norms = torch.stack([gradient.reshape(len(gradient), -1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors: Tensor = (limit / (norms + 1e-6)).clamp(max=1.0)
    return factors


def fit(runner: ModelRunner, job: TrainJob, training: Training) -> Fit:
    """Carry out one local training."""
    merge_last = runner.has_batch_norm
    if job.num_examples == 0 or (merge_last and job.num_examples == 1):
        # Nothing to learn from: batch norm cannot learn from one example.
        return Fit(job.model, job.num_examples, 0, 0.0)
    stepper, trained_weights = prepare(runner, job, training)
    captured = _captured_steps(runner, stepper, job)
    if captured is not None:
        stepper = captured.stepper
    take = captured or partial(stepper.step, job.loss)
    steps, most = 0, job.most_steps(training.batch_size)
    with seeds.temporary_seed(job.seed, runner.device):
        for batches in job.steps(training.batch_size, merge_last):
            take(batches)
            steps += 1
            progress.report("step", steps, most, inside=True)
    return Fit(trained_weights(), job.num_examples, steps, stepper.loss_sum.item() / max(steps, 1))


def _captured_steps(runner: ModelRunner, stepper: SGDStepper, job: TrainJob) -> CapturedSteps | None:
    """Return what captures steps on a GPU and replays them; None where steps cannot be captured."""
    capture = capture_on(runner.device)
    plain = job.parametrization is None and stepper.optimizer is None
    if capture is None or not plain or not can_capture(runner.train_network, job.loss):
        return None
    # Of a tensor on the CPU the numbers may be captured, not where they are.
    elsewhere = any(tensor.device.type != runner.device.type for tensor, _ in tree_tensors(job.loss))
    same = job.signature, stepper.training, stepper.lr, *stepper.weights, object() if elsewhere else None
    kept = runner.captured
    kept[same] = steps = kept.pop(same, None) or CapturedSteps(stepper, capture)
    while len(kept) > MAX_CAPTURED:  # the one that was used longest ago goes
        del kept[next(iter(kept))]
    steps.restart(job.loss)
    return steps


def prepare(
    runner: ModelRunner, job: TrainJob, training: Training
) -> tuple[SGDStepper, Callable[[], dict[str, Tensor]]]:
    """Return a stepper, and a function that returns the trained weights."""
    network = runner.train_network.train()
    if job.parametrization is not None:
        weights, forward, trained_weights = _compose(runner, job.model, job.parametrization)
    else:
        load_weights(network, job.model)
        weights, forward, trained_weights = dict(network.named_parameters()), network, partial(state_dict_copy, network)
    return SGDStepper(runner, weights, forward, training, training.lr_in_round(job.round)), trained_weights


def _compose(
    runner: ModelRunner, model: Weights, parametrization: Parametrization
) -> tuple[dict[str, Tensor], Callable[[Tensor], Tensor], Callable[[], dict[str, Tensor]]]:
    """Prepare the training of a model from which the network's weights are computed.

    Returns the trained tensors by name, a function that runs the network with them, and one that returns the whole
    model.
    """
    network = runner.train_network
    if tied := tied_parameters(network):
        raise ConfigError(
            f"this method computes the network's weights from other tensors, and {tied[0]} stands at several places. "
            "Choose a network without tied weights."
        )
    buffers = {name for name, _ in network.named_buffers(remove_duplicate=False)}
    tensors = {name: tensor.detach().to(runner.device, copy=True) for name, tensor in model.items()}
    load_weights(network, parametrization(tensors))  # raises if a weight is missing: it would keep an old value
    weights = {name: tensor.requires_grad_() for name, tensor in tensors.items() if name not in buffers}

    def forward(images: Tensor) -> Tensor:
        logits: Tensor = functional_call(network, dict(parametrization(tensors)), (images,), tie_weights=False)
        return logits

    return weights, forward, lambda: {name: tensor.detach() for name, tensor in tensors.items()}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a training step runs the network's layers.

    Returns: `torch.autocast`, or a context that does nothing for float32.
    """
    return nullcontext() if precision == "float32" else torch.autocast(device.type, getattr(torch, precision))


def _endless(stream: BatchStream, size: int, merge_last: bool) -> Iterator[Batch]:
    while True:
        yield from stream.batches(size, merge_last)
