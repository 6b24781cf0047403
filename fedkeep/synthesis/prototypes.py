"""Prototypes: what a frozen generator has to be told to draw a class, found by the clients and averaged (FedDCL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fedkeep.errors import DataError, ValueRefused
from fedkeep.options import Options, option
from fedkeep.synthesis.generator import Generator, unchanged

Average = Literal["uniform", "holders", "count"]
"""Who counts in the mean of a class's prototypes: all, those who hold examples of it, or these by how many."""


@dataclass(frozen=True)
class Inversion(Options):
    """How a client looks for prototypes (FedDCL, Eq. 4).

    FedDCL names steps and batches, not the optimiser; AdamW with 0.02 and a weight decay of 0.01 is what the code of
    DDDR, its base, has. The decay would also shrink the rows of classes that a client does not hold, so it is 0 here.
    """

    steps: int = option(50, "optimiser steps in a round", low=1)
    batch_size: int = option(128, "images a step; the latent model's 12", low=1)
    optimiser: Literal["adamw", "sgd"] = option("adamw", "fresh in every round; sgd is the literal reading")
    lr: float | None = option(None, "learning rate; none: 0.02 for adamw and 0.01 for sgd", low=0.0)
    weight_decay: float = option(0.0, "of the prototypes", low=0.0)

    def build(self, prototypes: Tensor) -> torch.optim.Optimizer:
        """Return the optimiser of one round."""
        make, lr = (torch.optim.AdamW, 0.02) if self.optimiser == "adamw" else (torch.optim.SGD, 0.01)
        optimiser: torch.optim.Optimizer = make(
            [prototypes], lr=lr if self.lr is None else self.lr, weight_decay=self.weight_decay
        )
        return optimiser


@dataclass(frozen=True, eq=False)
class Inverted:
    """What a search found.

    Attributes
    ----------
    prototypes : [classes, ...]; rows of classes without an image are as they were given (unless weight decay is on).
    counts : int64 [classes], the images of each class.
    losses : of each step; empty without images.
    """

    prototypes: Tensor
    counts: Tensor
    losses: tuple[float, ...]


def invert(
    generator: Generator, prototypes: Tensor, images: Tensor, labels: Tensor, settings: Inversion, rng: torch.Generator
) -> Inverted:
    """Look for the prototypes that let a frozen generator see images through noise.

    The loss is the mean of the squared error of the noise, E || e - e(x_t, t, p_y) ||^2 / d (FedDCL, Eq. 4); batches
    mix all classes, and only the prototypes learn.

    Parameters
    ----------
    generator : stays as it is, which is checked.
    prototypes : [classes, ...], where to begin; left as it is.
    images : uint8 [n, channels, height, width] of the generator's size; may be none.
    labels : int64 [n], each image's row of the prototypes.
    rng : of batches, times and noise, on the CPU.

    Raises
    ------
    DataError
        For images of another size, or labels without a row.
    ValueRefused
        For prototypes of another size.
    RunError
        If the generator changed.
    """
    generator.check_images(images)
    generator.check_prototypes(prototypes)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(prototypes):
        raise DataError(f"labels must lie in 0..{len(prototypes) - 1}, one row of the prototypes for each class.")
    counts = torch.bincount(labels.cpu(), minlength=len(prototypes))
    rows = prototypes.detach().to(generator.device, torch.float32, copy=True).requires_grad_(True)
    losses: list[float] = []
    if len(images):
        optimiser = settings.build(rows)
        with unchanged(generator):
            for _ in range(settings.steps):
                loss = _loss(generator, rows, images, labels, settings.batch_size, rng)
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                losses.append(loss.item())
    return Inverted(rows.detach().to(prototypes.device), counts, tuple(losses))


def _loss(
    generator: Generator, rows: Tensor, images: Tensor, labels: Tensor, batch: int, rng: torch.Generator
) -> Tensor:
    chosen = torch.randint(len(images), (batch,), generator=rng)
    clean = generator.encode(images[chosen.to(images.device)], rng)
    times = torch.randint(generator.noise.times, (batch,), generator=rng).to(generator.device)
    noise = torch.randn(clean.shape, generator=rng).to(generator.device)
    told = generator.conditions(rows[labels[chosen.to(labels.device)].to(generator.device)], rng)
    return mse_loss(generator.predict(generator.noise.add(clean, noise, times), times, told), noise)


def average(received: Tensor, replies: Sequence[Tensor], counts: Sequence[Tensor], rule: Average) -> Tensor:
    """Return the mean of the clients' prototypes (FedDCL, Eq. 5); a class that nobody holds keeps what was sent.

    ``uniform`` is Eq. 5 as printed: all clients count, those without examples with the row that they were sent.
    ``holders`` and ``count`` leave these out.

    Parameters
    ----------
    received : [classes, ...], what the clients were sent.
    replies : of each client, as large.
    counts : of each client, int64 [classes], its examples of each class.

    Raises
    ------
    ValueRefused
        For replies or counts of another size.
    """
    for reply, count in zip(replies, counts, strict=True):
        if reply.shape != received.shape or count.shape != received.shape[:1]:
            raise ValueRefused(
                f"prototypes {list(reply.shape)} with counts {list(count.shape)} cannot be averaged with those of "
                f"{list(received.shape)}: all clients must use one generator, and count every class."
            )
    if not replies:
        return received
    held = torch.stack(list(counts)).to(received.device)
    by_rule = {"uniform": torch.ones_like(held), "holders": held > 0, "count": held}[rule]
    shape = (len(replies), len(received), *(1,) * (received.dim() - 1))
    weights = by_rule.to(torch.float64).reshape(shape)
    total = weights.sum(0)
    mean = (weights * torch.stack(list(replies)).double()).sum(0) / total.clamp(min=1)
    somebody = (held.sum(0) > 0).reshape(shape[1:])
    return torch.where(somebody, mean.to(received.dtype), received)


def check_held(counts: Tensor, label_names: Sequence[str]) -> None:
    """Raise `DataError` if nobody holds an example of some class: nothing could find its prototype.

    Parameters
    ----------
    counts : int64 [classes], of all clients together.
    """
    missing = [name for name, count in zip(label_names, counts.tolist(), strict=True) if not count]
    if missing:
        raise DataError(
            f"no client holds an example of {', '.join(map(repr, missing))}, so that no prototype can be found. Leave "
            "such classes out, or use another partition."
        )
