"""Prototypes: conditioning from which a frozen generator generates a class, found by clients and averaged (FedDCL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fedkeep.errors import DataError, ValueRefused
from fedkeep.generation.diffusion.generator import Generator, check_frozen
from fedkeep.options import Options, option

AverageRule = Literal["uniform", "holders", "count"]
"""Which clients count in the mean of a class's prototypes: all, those with examples of it, or these by their number."""


@dataclass(frozen=True)
class PrototypeSearch(Options):
    """How a client searches for prototypes (FedDCL, eq. 4).

    FedDCL names steps and batches, but no optimizer; AdamW with a learning rate of 0.02 and a weight decay of 0.01 is
    what the code of DDDR has, on which it builds. The decay would also shrink the prototypes of classes that a client
    does not hold, so it is 0 here.
    """

    steps: int = option(50, "optimizer steps in a round", low=1)
    batch_size: int = option(128, "images a step; 12 for the latent model", low=1)
    optimizer: Literal["adamw", "sgd"] = option("adamw", "new in every round")
    lr: float | None = option(None, "learning rate; none: 0.02 for adamw and 0.01 for sgd", low=0.0)
    weight_decay: float = option(0.0, "of the prototypes", low=0.0)

    def build_optimizer(self, prototypes: Tensor) -> torch.optim.Optimizer:
        """Return the optimizer of one round."""
        cls, lr = (torch.optim.AdamW, 0.02) if self.optimizer == "adamw" else (torch.optim.SGD, 0.01)
        optimizer: torch.optim.Optimizer = cls(
            [prototypes], lr=lr if self.lr is None else self.lr, weight_decay=self.weight_decay
        )
        return optimizer


@dataclass(frozen=True, eq=False)
class PrototypeSearchResult:
    """The result of `search_prototypes`.

    ``prototypes``: [classes, ...]. Those of classes without an image are as they were given, unless weight decay is on.
    ``counts``: int64 [classes], the images of each class.
    ``losses``: The loss of each step; empty without images.
    """

    prototypes: Tensor
    counts: Tensor
    losses: tuple[float, ...]


def search_prototypes(
    generator: Generator,
    prototypes: Tensor,
    images: Tensor,
    labels: Tensor,
    settings: PrototypeSearch,
    rng: torch.Generator,
) -> PrototypeSearchResult:
    """Search for the prototypes with which a frozen generator denoises images best.

    The loss is the mean squared error of the noise, E || e - e(x_t, t, p_y) ||^2 / d (FedDCL, eq. 4). Batches mix all
    classes, and only the prototypes are trained.

    ``generator``: Its weights must not change, which is checked.
    ``prototypes``: [classes, ...], where the search begins; not modified.
    ``images``: uint8 [n, channels, height, width] of the generator's shape; n may be 0.
    ``labels``: int64 [n], the row of each image's prototype.
    ``settings``: Steps, batch size and optimizer.
    ``rng``: Draws batches, timesteps and noise, on the CPU.
    """
    generator.check_images(images)
    generator.check_prototypes(prototypes)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(prototypes):
        raise DataError(f"labels must lie in 0..{len(prototypes) - 1}, one row of the prototypes for each class.")
    counts = torch.bincount(labels.cpu(), minlength=len(prototypes))
    trained = prototypes.detach().to(generator.device, torch.float32, copy=True).requires_grad_(True)
    losses: list[float] = []
    if len(images):
        optimizer = settings.build_optimizer(trained)
        with check_frozen(generator):
            for _ in range(settings.steps):
                loss = _denoising_loss(generator, trained, images, labels, settings.batch_size, rng)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.item())
    return PrototypeSearchResult(trained.detach().to(prototypes.device), counts, tuple(losses))


def _denoising_loss(
    generator: Generator, prototypes: Tensor, images: Tensor, labels: Tensor, batch_size: int, rng: torch.Generator
) -> Tensor:
    chosen = torch.randint(len(images), (batch_size,), generator=rng)
    clean = generator.encode(images[chosen.to(images.device)], rng)
    timesteps = torch.randint(generator.noise_schedule.num_timesteps, (batch_size,), generator=rng).to(generator.device)
    noise = torch.randn(clean.shape, generator=rng).to(generator.device)
    rows = labels[chosen.to(labels.device)].to(generator.device)
    conditioning = generator.conditioning(prototypes[rows], rng)
    noisy = generator.noise_schedule.add_noise(clean, noise, timesteps)
    return mse_loss(generator.predict_noise(noisy, timesteps, conditioning), noise)


def average_prototypes(sent: Tensor, replies: Sequence[Tensor], counts: Sequence[Tensor], rule: AverageRule) -> Tensor:
    """Return the mean of the clients' prototypes (FedDCL, eq. 5). A class that nobody holds keeps what was sent.

    ``uniform`` is eq. 5 as printed: all clients count, and those without examples count with what they were sent.
    ``holders`` and ``count`` leave these out.

    ``sent``: [classes, ...], what the server sent to the clients.
    ``replies``: Each client's prototypes, [classes, ...].
    ``counts``: Each client's number of examples of each class, int64 [classes].
    """
    for reply, count in zip(replies, counts, strict=True):
        if reply.shape != sent.shape or count.shape != sent.shape[:1]:
            raise ValueRefused(
                f"prototypes {list(reply.shape)} with counts {list(count.shape)} cannot be averaged with those of "
                f"{list(sent.shape)}: all clients must use one generator, and count every class."
            )
    if not replies:
        return sent
    held = torch.stack(list(counts)).to(sent.device)
    by_rule = {"uniform": torch.ones_like(held), "holders": held > 0, "count": held}[rule]
    shape = (len(replies), len(sent), *(1,) * (sent.dim() - 1))
    weights = by_rule.to(torch.float64).reshape(shape)
    total = weights.sum(0)
    mean = (weights * torch.stack(list(replies)).double()).sum(0) / total.clamp(min=1)
    is_held = (held.sum(0) > 0).reshape(shape[1:])
    return torch.where(is_held, mean.to(sent.dtype), sent)


def check_held(counts: Tensor, label_names: Sequence[str]) -> None:
    """Raise `DataError` if no client holds an example of some class, so that no search can find its prototype.

    ``counts``: int64 [classes], of all clients together.
    """
    missing = [name for name, count in zip(label_names, counts.tolist(), strict=True) if not count]
    if missing:
        raise DataError(
            f"no client holds an example of {', '.join(map(repr, missing))}, so that no prototype can be found. Leave "
            "such classes out, or use another partition."
        )
