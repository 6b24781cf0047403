"""Train a classifier on one data set, without a federation, to evaluate generated images."""

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
    """Train a classifier.

    ``data``: The columns ``"input"``, uint8 [n, channels, height, width], and ``"label"``, int64 [n].
    ``normalise``: Maps uint8 images to the network's input.
    ``training``: The settings of SGD, except for the number of epochs.
    ``steps``: Smallest number of optimizer steps; the last epoch is completed.
    Returns: A function that maps uint8 images, [n, channels, height, width], to logits, [n, classes].
    """
    _, channels, height, width = data["input"].shape
    runner = ModelRunner(lambda: architecture.build((channels, height, width), classes), seed, torch.device(device))
    normalised = {"input": normalise(data["input"].to(device)), "label": data["label"].to(device)}
    order, noise = (seeds.rng(seed, purpose) for purpose in ("batches", "augmentation"))
    stream = BatchStream(normalised, normalise, Augmentation(), order, noise, runner.layout)
    epochs = ceil(steps / ceil(len(data["label"]) / training.batch_size))
    noise_seed = seeds.derive(seed, "network noise")
    trained = fit(runner, TrainJob(runner.initial, CrossEntropy(), [stream], epochs, 1, noise_seed), training)
    return lambda images: runner.logits(trained.model, normalise(images.to(device)))
