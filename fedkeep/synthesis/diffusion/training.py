"""How a pixel-space generator is trained: denoising, with a moving average, resumable at any kill to the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fedkeep._utils import seeds
from fedkeep.data import Data
from fedkeep.data.dataset import format_shape
from fedkeep.data.dedup import image_hashes
from fedkeep.errors import DataError, RunError
from fedkeep.models.resumable_training import OnStep, check_finite, restore_training, save_training, train_resumably
from fedkeep.models.weights import load_weights, state_dict_copy
from fedkeep.options import Options, as_table, option
from fedkeep.synthesis.diffusion.generator import hash_of
from fedkeep.synthesis.diffusion.pixel import (
    CARD,
    CHECKPOINT,
    Card,
    PixelGenerator,
    as_signal,
    load_generator,
    write_seen,
)


@dataclass(frozen=True)
class GeneratorTraining(Options):
    """Adam on the squared error of the noise, with a learning rate that falls in equal steps."""

    steps: int = option(20000, "optimiser steps", low=1)
    batch_size: int = option(128, "images a step; classes are drawn evenly, however many images each has", low=1)
    lr: float = option(1e-3, "learning rate of the first step", low=0.0)
    lr_end: float = option(0.01, "share of it that is left at the last step", low=0.0, high=1.0)
    null: float = option(0.1, "probability that an image's class is not told, which guidance needs", low=0.0, high=1.0)
    average: float = option(0.999, "decay of the weights' moving average, which is what is kept", low=0.0, high=1.0)
    checkpoint: float = option(60.0, "seconds from one checkpoint to the next; changes no result", low=0.0)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.lr * (1 - (1 - self.lr_end) * step / max(1, self.steps - 1))


def train_generator(
    card: Card,
    data: Data,
    settings: GeneratorTraining,
    folder: Path,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    half: bool = False,
    on_step: OnStep | None = None,
) -> PixelGenerator:
    """Train a generator, or go on where the folder's checkpoint was taken, and save it into the folder.

    Every step draws from generators of its own, so that a resume ends in the same weights, on a CPU to the bit.

    Parameters
    ----------
    card : what to train, for which classes; its ``training`` is filled in.
    data : ``"image"``, uint8 [n, channels, height, width] of the card's shape, ``"label"``, int64 [n], and, where the
        card has several codes of a class, ``"code"``, int64 [n].
    folder : receives checkpoints, and the generator when it is done; in the regime ``same_classes`` also which images
        it learned from, so that runs keep them from their clients.
    half : save 16 bits a weight; the generator is then what was saved.

    Raises
    ------
    DataError
        For images of another size, or a class without images.
    RunError
        If the folder holds another generator, or the checkpoint of another training, or if this one diverges.
    """
    if (folder / CARD).is_file():
        raise RunError(f"{folder} holds a generator already. Name another folder, or remove this one first.")
    if card.regime == "same_classes":
        card = replace(card, seen=write_seen(folder, torch.unique(image_hashes(data["image"]))))
    run, path = _Run(card, data, settings, seed, torch.device(device)), folder / CHECKPOINT
    train_resumably(run, settings.steps, path, settings.checkpoint, on_step)
    check_finite(run.average)
    run.result().save(folder, half=half)
    path.unlink(missing_ok=True)
    return load_generator(folder, device)


class _Run:
    """A training between two steps."""

    def __init__(self, card: Card, data: Data, settings: GeneratorTraining, seed: int, device: torch.device) -> None:
        self.card, self.settings, self.seed, self.device = card, settings, seed, device
        with seeds.temporary_seed(seeds.derive(seed, "generator weights")):
            self.network = card.unet.build(card.shape, card.rows)
        self.network.to(device).train()
        self.average = state_dict_copy(self.network)
        self.optimiser = torch.optim.Adam(self.network.parameters(), settings.lr, fused=True)
        self.losses: list[float] = []
        self.draws = _Draws(data, card, settings, seed)
        self.identity = {
            "unet": as_table(card.unet),
            "noise": as_table(card.noise),
            "training": {name: value for name, value in as_table(settings).items() if name != "checkpoint"},
            "label_names": list(card.label_names),
            "seed": seed,
            "data": hash_of({name: data[name] for name in ("image", "label", "code") if name in data}),
        }

    def step(self) -> float:
        """Take one step; return its loss."""
        number = len(self.losses)
        images, classes, times, noise = (drawn.to(self.device) for drawn in self.draws(number))
        noisy = self.card.noise.add(images, noise, times)
        loss = mse_loss(self.network(noisy, times, self.network.table[classes]), noise)
        self.optimiser.param_groups[0]["lr"] = self.settings.lr_at(number)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        # A short average at first, so that the initial weights do not stay in it.
        decay = min(self.settings.average, (1 + number) / (10 + number))
        new = state_dict_copy(self.network)
        torch._foreach_lerp_(list(self.average.values()), [new[name] for name in self.average], 1 - decay)
        self.losses.append(loss.item())
        return self.losses[-1]

    def result(self) -> PixelGenerator:
        """Return the moving average as a generator."""
        last = self.losses[-100:]
        training = as_table(self.settings) | {
            "seed": self.seed,
            "images": len(self.draws.labels),
            "loss": round(sum(last) / len(last), 6),
        }
        return PixelGenerator(replace(self.card, training=training), self.average, self.device)

    def save(self, path: Path) -> None:
        """Write all that the next step depends on, as one file that is whole or not there."""
        models = {"weights": self.network.state_dict(), "average": self.average}
        save_training(path, self.identity, models, self.optimiser, self.losses)

    def restore(self, path: Path) -> None:
        """Go to where a checkpoint was taken; raise `RunError` as `restore_training` does."""
        models, self.losses = restore_training(path, self.identity, self.optimiser)
        load_weights(self.network, models["weights"])
        self.average = {name: tensor.to(self.device) for name, tensor in models["average"].items()}


class _Draws:
    """What each step sees: images with their classes, times and noise, from the step's number alone."""

    def __init__(self, data: Data, card: Card, settings: GeneratorTraining, seed: int) -> None:
        self.images, self.labels = data["image"].cpu(), data["label"].cpu()
        if ("code" in data) != (card.codes > 1):
            raise DataError(
                f"the card has {card.codes} codes a class. Give a column 'code' if these are several, else none."
            )
        self.codes, self.nothing = data.get("code", self.labels).cpu(), card.rows
        if tuple(self.images.shape[1:]) != card.shape:
            raise DataError(
                f"these images are {format_shape(tuple(self.images.shape[1:]))}, and the generator shall draw "
                f"{format_shape(card.shape)} (channels, height, width). Give it images of one size."
            )
        counts = torch.bincount(self.labels, minlength=len(card.label_names))
        empty = [name for name, count in zip(card.label_names, counts.tolist(), strict=True) if not count]
        if empty:
            raise DataError(f"there are no images of {', '.join(map(repr, empty))}. Leave such classes out.")
        self.counts = counts
        self.order = self.labels.argsort(stable=True)
        self.first = torch.tensor([0, *accumulate(counts.tolist())])[:-1]
        self.size, self.null, self.times, self.seed = settings.batch_size, settings.null, card.noise.times, seed

    def __call__(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return images in -1..1 [b, ...], rows of the class table [b], times [b] and noise [b, ...]."""
        rng = seeds.generator(self.seed, "generator step", use=step)
        classes = torch.randint(len(self.counts), (self.size,), generator=rng)
        share = torch.rand(self.size, generator=rng, dtype=torch.float64)
        place = (share * self.counts[classes]).long()
        chosen = self.order[self.first[classes] + place]
        images = as_signal(self.images[chosen])
        times = torch.randint(self.times, (self.size,), generator=rng)
        noise = torch.randn(images.shape, generator=rng)
        told = torch.rand(self.size, generator=rng) >= self.null
        return images, torch.where(told, self.codes[chosen], self.nothing), times, noise
