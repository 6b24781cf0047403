"""Pooled training: a few passes over all clients' training examples, from which the rounds of a run then begin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedkeep._utils import seeds
from fedkeep.data import Augmentation, Data
from fedkeep.losses import Batch
from fedkeep.losses.decoupled import upcast
from fedkeep.models import Weights
from fedkeep.models.resumable_training import OnStep, check_finite, restore_training, save_training, train_resumably
from fedkeep.models.weights import load_weights, state_dict_copy
from fedkeep.options import Options, option
from fedkeep.training.local_training import BatchStream
from fedkeep.training.model_runner import ModelRunner

SAVE_SECONDS = 60.0


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
    normalise: Callable[[Tensor], Tensor],
    augmentation: Augmentation,
    settings: PooledTraining,
    seed: int,
    *,
    checkpoint: Path,
    identity: Mapping[str, Any],
    on_step: OnStep | None = None,
) -> Weights:
    """Train a runner's network on pooled examples, or resume that from its checkpoint, to the same bits on a CPU.

    ``identity`` is what distinguishes this training from others, as JSON can represent it.
    """
    run = _PooledRun(runner, data, normalise, augmentation, settings, seed, identity)
    train_resumably(run, settings.passes * run.steps_in_pass, checkpoint, SAVE_SECONDS, on_step)
    weights = state_dict_copy(runner.train_network, with_frozen=True)
    check_finite(weights)
    checkpoint.unlink(missing_ok=True)
    return weights


class _PooledRun:
    """A training between two steps; implements `ResumableTraining`."""

    def __init__(
        self,
        runner: ModelRunner,
        data: Data,
        normalise: Callable[[Tensor], Tensor],
        augmentation: Augmentation,
        settings: PooledTraining,
        seed: int,
        identity: Mapping[str, Any],
    ) -> None:
        self.runner, self.data, self.settings, self.seed = runner, data, settings, seed
        self.normalise, self.augmentation, self.identity = normalise, augmentation, identity
        self.network = runner.train_network.train()
        load_weights(self.network, runner.initial)
        trained = [weight for weight in self.network.parameters() if weight.requires_grad]
        self.optimiser = torch.optim.SGD(
            trained, settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
        self.losses: list[float] = []
        count, size = len(data["label"]), settings.batch_size
        alone = runner.has_batch_norm and count > size and count % size == 1  # it joins the batch before it
        self.steps_in_pass = math.ceil(count / size) - alone
        self._pass: Iterator[Batch] = iter(())

    def step(self) -> float:
        number, total = len(self.losses), self.settings.passes * self.steps_in_pass
        if number % self.steps_in_pass == 0:
            self._pass = self._batches(number // self.steps_in_pass)
        batch = next(self._pass)
        with seeds.temporary_seed(seeds.derive(self.seed, "pooled training", use=number), self.runner.device):
            loss = cross_entropy(upcast(self.network(batch.data["input"])), batch.data["label"])
        self.optimiser.param_groups[0]["lr"] = self.settings.lr * (1 + math.cos(math.pi * number / total)) / 2
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def save(self, path: Path) -> None:
        save_training(path, self.identity, {"weights": state_dict_copy(self.network)}, self.optimiser, self.losses)

    def restore(self, path: Path) -> None:
        models, self.losses = restore_training(path, self.identity, self.optimiser)
        load_weights(self.network, models["weights"])
        done, rest = divmod(len(self.losses), self.steps_in_pass)
        self._pass = self._batches(done)
        for _ in range(rest):
            next(self._pass)

    def _batches(self, number: int) -> Iterator[Batch]:
        """Return the batches of a pass, counted from 0, which depend on the seed and its number alone."""
        order, noise = (seeds.rng(self.seed, f"pooled {what}", use=number) for what in ("order", "noise"))
        stream = BatchStream(self.data, self.normalise, self.augmentation, order, noise, self.runner.layout)
        return stream.batches(self.settings.batch_size, self.runner.has_batch_norm)
