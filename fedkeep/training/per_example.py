"""Gradients by example: how many are in memory at once, the diagonal Fisher information, and DP-SGD.

DP-SGD (Abadi et al., 2016): each example's gradient is clipped, and noise is added to their sum. Gradients by example
come from `torch.func`, since Opacus' own need a network that is called with a batch, and FedKeep's losses see the
network through a model view. Epsilon comes from Opacus (`fedkeep.metrics.dp_sgd_epsilon`). Batches are drawn as that
accountant assumes: each example is in a batch with the same probability, independently of the others.
"""

from collections.abc import Mapping
from math import ceil
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn.functional import log_softmax
from torch.optim.sgd import sgd

from fedkeep._utils import progress, seeds
from fedkeep._utils.noise_stream import NoiseStream
from fedkeep.errors import ConfigError
from fedkeep.interface import Fit, Training
from fedkeep.interface.privacy import Privacy
from fedkeep.losses import Batch
from fedkeep.losses.base import check_scalar
from fedkeep.models import Weights
from fedkeep.training.local_training import NetworkView, TrainJob, autocast, clip_factors, prepare
from fedkeep.training.model_runner import ModelRunner

MAX_BYTES = 2**28
"""Bytes of the gradients that are computed together."""
MAX_EXAMPLES = 64
MIXES_EXAMPLES = "batch norm mixes the examples of a batch. Choose a network with group norm or without norm"
"""Why DP-SGD refuses a network."""


def examples_at_once(parameters: Mapping[str, Tensor]) -> int:
    """Return of how many examples the gradients are computed together.

    With more than a million parameters they are fewer than `MAX_EXAMPLES`, and their sums differ in the last bits.
    """
    each = sum(parameter.nbytes for parameter in parameters.values())
    return min(max(MAX_BYTES // max(each, 1), 1), MAX_EXAMPLES)


def gradient_bytes(parameters: Mapping[str, Tensor]) -> int:
    """Return about how many bytes the gradients by example take, with their squares and what computes them."""
    return 3 * examples_at_once(parameters) * sum(parameter.nbytes for parameter in parameters.values())


def fisher(network: nn.Module, model: Weights, images: Tensor, labels: Tensor, batch: int) -> Weights:
    """Compute the mean over batches of the squared gradient of the mean ln p(label | image).

    ``network``: A network of the model's form, in evaluation mode.
    ``images``: Normalised images, float32 [n, channels, height, width].
    ``labels``: Their labels, int64 [n].
    ``batch``: Number of examples in a batch; with 1 this is the diagonal of the empirical Fisher information matrix.
    Returns: A tensor for each parameter, of the parameter's shape; zeros without examples.
    """
    first = {id(weight): name for name, weight in reversed([*network.named_parameters()])}
    # A weight with two names is one parameter; a buffer that is not in the state dict stays the network's own.
    shared = {name: first[id(weight)] for name, weight in network.named_parameters(remove_duplicate=False)}
    parameters = {name: model[name] for name in first.values() if name in model}
    buffers = {name: model[name] for name, _ in network.named_buffers() if name in model}

    def log_likelihood(weights: Weights, images: Tensor, labels: Tensor) -> Tensor:
        whole = {name: weights[same] for name, same in shared.items() if same in weights} | buffers
        logits = functional_call(network, whole, (images,), tie_weights=False)
        return log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).mean()

    gradient = grad(log_likelihood)

    def by_example(weights: Weights, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        try:
            return cast(dict[str, Tensor], vmap(gradient, (None, 0, 0))(weights, images, labels))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # what PyTorch cannot vectorise, such as a recurrent layer
            found = [gradient(weights, *one) for one in zip(images, labels, strict=True)]
            return {name: torch.stack([one[name] for one in found]) for name in weights}

    if batch == 1:
        images, labels = images.unsqueeze(1), labels.unsqueeze(1)  # vectorised over batches of one
        gradients, rows = by_example, examples_at_once(parameters)
    else:
        gradients, rows = gradient, batch
    total = {name: torch.zeros_like(weight) for name, weight in parameters.items()}
    parts = zip(torch.split(images, rows), torch.split(labels, rows), strict=True) if len(labels) else ()
    for some_images, some_labels in parts:
        for name, gradient_of in gradients(parameters, some_images, some_labels).items():
            total[name] += gradient_of.square().sum(0) if batch == 1 else gradient_of.square()
    mean = {name: summed / max(ceil(len(labels) / batch), 1) for name, summed in total.items()}
    return {name: mean[same] for name, same in shared.items() if name in model and same in mean}


def sample_rate(job: TrainJob, training: Training) -> float:
    """Return the probability with which an example is in a batch.

    Returns: Batch size over number of examples; 1 for fewer examples than a batch has.
    """
    return min(1.0, (job.streams[0].batch_size or training.batch_size) / max(job.num_examples, 1))


def private_fit(runner: ModelRunner, job: TrainJob, training: Training, privacy: Privacy, noise: NoiseStream) -> Fit:
    """Carry out one local training with DP-SGD, in as many steps as its epochs have batches.

    ``noise``: What batches and noise are drawn from. Who knows its key can take the noise off again.
    Returns: The trained weights. The loss is 0, since the true one would tell about the examples.
    """
    _check(runner, job)
    steps = job.most_steps(training.batch_size)
    if not steps:
        return Fit(job.model, job.num_examples, 0, 0.0)
    stepper, trained_weights = prepare(runner, job, training)
    momenta: list[Tensor | None] = [*stepper.momenta] or [None] * len(stepper.parameters)
    rate = sample_rate(job, training)
    expected, deviation = rate * job.num_examples, privacy.noise_multiplier * privacy.max_grad_norm
    with seeds.temporary_seed(job.seed, runner.device), torch.no_grad():
        for number in range(steps):
            progress.report("step", number, steps, inside=True)
            batch = job.streams[0].sample(rate, noise)
            total = clipped_sum(runner, job, batch, stepper.weights, training, privacy)
            gradients = [noise.gaussian(gradient, deviation) / expected for gradient in total]
            sgd(
                stepper.parameters,
                gradients,
                momenta,
                weight_decay=training.weight_decay,
                momentum=training.momentum,
                lr=stepper.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
    runner.classifier_input = None
    return Fit(trained_weights(), job.num_examples, steps, 0.0)


def clipped_sum(
    runner: ModelRunner,
    job: TrainJob,
    batch: Batch,
    parameters: Mapping[str, Tensor],
    training: Training,
    privacy: Privacy,
) -> list[Tensor]:
    """Return the sum of the examples' gradients, each clipped to a norm.

    ``job``: The training, with its loss.
    ``batch``: The examples; there may be none.
    ``parameters``: The trained parameters by name.
    """
    network = runner.train_network
    # A weight with a second name is trained under its first.
    trained = {id(weight) for name, weight in network.named_parameters() if name in parameters}
    constants = {
        name: tensor
        for name, tensor in network.state_dict(keep_vars=True).items()
        if name not in parameters and id(tensor) not in trained
    }

    def loss(weights: dict[str, Tensor], data: dict[str, Tensor], index: Tensor) -> Tensor:
        one = Batch({name: column.unsqueeze(0) for name, column in data.items()}, index.unsqueeze(0))

        def forward(images: Tensor) -> Tensor:
            logits: Tensor = functional_call(network, {**constants, **weights}, (images,))
            return logits

        with autocast(training.precision, runner.device):
            value = job.loss(NetworkView(runner, weights, forward), [one])
        check_scalar(value, job.loss)
        return value

    total = [torch.zeros_like(parameter) for parameter in parameters.values()]
    by_example = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")
    rows = examples_at_once(parameters)
    for start in range(0, len(batch.index), rows):
        end = start + rows
        data = {name: column[start:end] for name, column in batch.data.items()}
        try:
            gradients, _ = by_example(dict(parameters), data, batch.index[start:end])
        except RuntimeError as error:
            raise ConfigError(
                "the network or this method's loss cannot be computed example by example, as DP-SGD needs (PyTorch has "
                f"no such way for recurrent layers, for one): {error}"
            ) from error
        found = list(gradients.values())
        factors = clip_factors(found, privacy.max_grad_norm)
        for kept, gradient in zip(total, found, strict=True):
            kept += torch.einsum("b,b...->...", factors, gradient)
    return total


def _check(runner: ModelRunner, job: TrainJob) -> None:
    """Refuse what DP-SGD's guarantee would not cover."""
    reason = ""
    if runner.has_batch_norm:
        reason = MIXES_EXAMPLES
    elif len(job.streams) > 1:
        reason = f"this method trains on {len(job.streams)} data sets at once, and epsilon would cover one"
    elif job.parametrization is not None:
        reason = "this method computes the network's weights from other tensors, whose steps are not noised"
    if reason:
        raise ConfigError(f"privacy.noise_multiplier: {reason}.")
