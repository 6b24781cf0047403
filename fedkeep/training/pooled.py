"""Pooled training: a few passes over all clients' training examples, from which the rounds of a run then begin."""

import math
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from fedkeep._utils import progress, seeds
from fedkeep.data import Augmentation, Data
from fedkeep.losses.decoupled import upcast
from fedkeep.models import Weights
from fedkeep.models.weights import check_finite, diverged, load_weights, state_dict_copy
from fedkeep.options import Options, option
from fedkeep.training.local_training import BatchStream, Normalise
from fedkeep.training.model_runner import ModelRunner


@dataclass(frozen=True)
class PooledTraining(Options):
    """Settings of SGD on the cross-entropy of all clients' training examples; its learning rate falls to 0 as a cosine.

    Images are augmented as in the clients' own training.
    """

    passes: int = option(0, "passes over all clients' training examples before the first round; 0: none", low=0)
    lr: float = option(0.02, "learning rate of the first step", low=0.0)
    momentum: float = option(0.9, "momentum of SGD", low=0.0, high=1.0)
    batch_size: int = option(64, "examples in a step", low=1)
    weight_decay: float = option(0.0, "weight decay of SGD", low=0.0)


def train_on_pool(
    runner: ModelRunner,
    data: Data,
    normalise: Normalise,
    augmentation: Augmentation,
    settings: PooledTraining,
    seed: int,
) -> Weights:
    """Train a runner's network on pooled examples."""
    network, size, count = runner.train_network.train(), settings.batch_size, len(data["label"])
    load_weights(network, runner.initial)
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(trained, settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)
    alone = runner.has_batch_norm and count > size and count % size == 1  # it joins the batch before it
    most = settings.passes * math.ceil(count / size)
    total, done = most - settings.passes * alone, 0
    for number in range(settings.passes):
        order, noise = (seeds.rng(seed, f"pooled {what}", use=number) for what in ("order", "noise"))
        stream = BatchStream(data, normalise, augmentation, order, noise, runner.layout)
        for batch in stream.batches(size, runner.has_batch_norm):
            with seeds.temporary_seed(seeds.derive(seed, "pooled training", use=done), runner.device):
                loss = cross_entropy(upcast(network(batch.data["input"])), batch.data["label"])
            optimizer.param_groups[0]["lr"] = settings.lr * (1 + math.cos(math.pi * done / total)) / 2
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
            if not math.isfinite(loss.item()):
                raise diverged(f"the loss of step {done} is {loss.item()}")
            progress.report("pooled training, step", done, most)
    weights = state_dict_copy(network, with_frozen=True)
    check_finite(weights)
    return weights
