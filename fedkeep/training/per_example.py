"""Gradients by example: how many are in memory at once, and the diagonal Fisher information made of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import log_softmax

from fedkeep.models import Weights

MOST_BYTES = 2**28
"""Bytes of the gradients that are computed together."""
MOST_EXAMPLES = 64


def examples_at_once(parameters: Mapping[str, Tensor]) -> int:
    """Return of how many examples the gradients are computed together.

    With more than a million parameters they are fewer than `MOST_EXAMPLES`, and their sums differ in the last bits.
    """
    each = sum(parameter.nbytes for parameter in parameters.values())
    return min(max(MOST_BYTES // max(each, 1), 1), MOST_EXAMPLES)


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
    if batch == 1:
        images, labels = images.unsqueeze(1), labels.unsqueeze(1)  # vectorised over batches of one
        gradients, rows = vmap(gradient, (None, 0, 0)), examples_at_once(parameters)
    else:
        gradients, rows = gradient, batch
    total = {name: torch.zeros_like(weight) for name, weight in parameters.items()}
    if not len(labels):
        return {name: total[same] for name, same in shared.items() if name in model and same in total}
    for some_images, some_labels in zip(torch.split(images, rows), torch.split(labels, rows), strict=True):
        for name, gradient_of in gradients(parameters, some_images, some_labels).items():
            total[name] += gradient_of.square().sum(0) if batch == 1 else gradient_of.square()
    mean = {name: summed / ceil(len(labels) / batch) for name, summed in total.items()}
    return {name: mean[same] for name, same in shared.items() if name in model and same in mean}
