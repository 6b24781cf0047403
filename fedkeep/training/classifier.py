"""A classifier trained alone, without a federation: what judges generated images."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep.data import Augmentation, Data
from fedkeep.interface import Training
from fedkeep.losses import CrossEntropy
from fedkeep.models import Architecture
from fedkeep.training.local_training import BatchStream, Normalise, TrainJob, fit
from fedkeep.training.model_runner import ModelRunner


def train_classifier(
    architecture: Architecture,
    data: Data,
    classes: int,
    normalise: Normalise,
    training: Training,
    *,
    steps: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Callable[[Tensor], Tensor]:
    """Return a function that maps uint8 images [n, channels, height, width] to logits [n, classes].

    Parameters
    ----------
    data : ``"image"``, uint8, and ``"label"``, int64.
    normalise : turns images into what the network takes.
    training : as at a client; its epochs do not count.
    steps : of the optimiser, at least; whole passes are made.
    """
    _, channels, height, width = data["image"].shape
    runner = ModelRunner(lambda: architecture.build((channels, height, width), classes), seed, torch.device(device))
    normalised = {"image": normalise(data["image"].to(device)), "label": data["label"].to(device)}
    order, noise = (seeds.generator(seed, purpose) for purpose in ("batches", "augmentation"))
    stream = BatchStream(normalised, normalise, Augmentation(), order, noise, runner.layout)
    epochs = ceil(steps / ceil(len(data["label"]) / training.batch_size))
    noise_seed = seeds.derive(seed, "network noise")
    learned = fit(runner, TrainJob(runner.initial, CrossEntropy(), [stream], epochs, 1, noise_seed), training)
    return lambda images: runner.logits(learned.model, normalise(images.to(device)))
