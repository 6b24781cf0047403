"""Settings of local training, and the types of what can be passed to `Party.fit`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fedkeep.errors import ConfigError
from fedkeep.models import Weights
from fedkeep.options import Options, build, option, options_of

OptimizerName = Literal["sgd", "adam", "adamw"]
LRSchedule = Literal["exponential", "cosine"]
Precision = Literal["float32", "bfloat16"]
EpochEndsWith = Literal["first", "shortest"]
"""When an epoch over several data sets ends: with the first data set, or with the shortest one."""
_USED_WITH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "lr_min": ("lr_schedule", ("cosine",)),
    "lr_rounds": ("lr_schedule", ("cosine",)),
    "betas": ("optimizer", ("adam", "adamw")),
}
"""Of which option's values an option is; with others it would do nothing."""
Parametrization: TypeAlias = Callable[[Weights], Weights]
"""A differentiable function that computes a network's weights from the tensors that are trained."""


@dataclass(frozen=True)
class Training(Options):
    """Settings of a client's optimizer; `SGD`, `Adam` and `AdamW` have PyTorch's default values.

    The optimizer starts afresh in every local training. The schedule of the learning rate goes by rounds, and begins
    again with each task. The last batch of an epoch may be smaller; it is not dropped.
    """

    epochs: int = option(5, "passes over a client's data in each local training", low=1)
    batch_size: int = option(64, "examples in a batch", low=1)
    lr: float = option(0.01, "learning rate in the first round", low=0.0)
    lr_decay: float = option(1.0, "factor on the learning rate after every round", low=0.0, high=1.0)
    momentum: float = option(0.0, "momentum of SGD; starts at zero in every local training", low=0.0, high=1.0)
    weight_decay: float = option(
        0.0, "on all parameters: an L2 penalty with SGD and Adam, decoupled with AdamW", low=0.0
    )
    max_grad_norm: float | None = option(None, "largest norm of the gradient; none: no clipping", low=1e-12)
    precision: Precision = option(
        "float32",
        "of the layers in a training step; bfloat16 is faster for convolutions, and less exact; weights stay float32",
    )
    optimizer: OptimizerName = option("sgd", "as of torch.optim: SGD, Adam or AdamW")
    betas: tuple[float, ...] = option((0.9, 0.999), "decays of Adam's two averages", low=0.0, high=0.9999999)
    lr_schedule: LRSchedule = option(
        "exponential", "by rounds, as of torch.optim.lr_scheduler: ExponentialLR or CosineAnnealingLR"
    )
    lr_min: float = option(0.0, "cosine: learning rate at the end", low=0.0)
    loss: str = option(
        "cross-entropy",
        "of clients' labels, in the place of the cross-entropy: a function or module of your own, as module.name of "
        "what --use names",
    )
    class_weights: Literal["none", "balanced"] | tuple[float, ...] = option(
        "none",
        "of the cross-entropy, as of torch.nn.CrossEntropyLoss: a number for each class, in the order of their names; "
        "balanced: inverse to the examples of each class that the client trains on, generated ones too",
        low=1e-12,
    )
    lr_rounds: int = option(0, "cosine: rounds until lr_min; 0: all rounds of the run, or of the task", low=0)

    def check(self) -> None:
        """Refuse options that the optimizer or the schedule does not have, so that none is silently ignored."""
        if len(self.betas) != 2:
            raise ConfigError(f"training.betas are two numbers, such as [0.9, 0.999], not {list(self.betas)}.")
        if self.optimizer != "sgd" and self.momentum:
            raise ConfigError(f"training.momentum is of SGD; {self.optimizer} has betas. Set momentum to 0.")
        if self.lr_schedule == "cosine" and self.lr_decay != 1.0:
            raise ConfigError("training.lr_decay has no effect with lr_schedule = cosine. Set it to 1.")
        if self.loss != "cross-entropy" and self.class_weights != "none":
            raise ConfigError("training.class_weights are of the cross-entropy. Weigh classes in training.loss itself.")
        defaults = {name: field.default for name, field in options_of(Training).items()}
        for name, (of, values) in _USED_WITH.items():
            if getattr(self, name) != defaults[name] and getattr(self, of) not in values:
                raise ConfigError(
                    f"training.{name} has no effect with {of} = {getattr(self, of)}. Leave it out, or set "
                    f"training.{of} to {' or '.join(values)}."
                )

    def lr_in_round(self, round: int) -> float:
        """Return the learning rate of a round.

        Parameters
        ----------
        round : int
            The round of the task, or of a run without tasks, counted from 1.

        Returns
        -------
        float
            The learning rate.
        """
        if self.lr_schedule == "cosine":
            share = min((round - 1) / max(self.lr_rounds, 1), 1.0)
            return self.lr_min + (self.lr - self.lr_min) * (1 + math.cos(math.pi * share)) / 2
        return self.lr * self.lr_decay ** (round - 1)

    def num_steps(self, examples: int, *, batch_norm: bool) -> int:
        """Return how many optimizer steps a training with these epochs and this batch size takes.

        Parameters
        ----------
        examples : int
            Number of examples in the first data set.
        batch_norm : bool
            Whether the network has batch norm. It cannot learn from one example alone, so a last batch of one is merged
            into the batch before it.

        Returns
        -------
        int
            The number of steps; 0 without anything to learn from.
        """
        batches, last = math.ceil(examples / self.batch_size), examples % self.batch_size
        return self.epochs * (batches - 1 if batch_norm and last == 1 else batches)


def SGD(lr: float = 0.01, **options: Any) -> Training:
    """Return settings of local training with `torch.optim.SGD`."""
    return build(Training, {"lr": lr, **options}, "SGD")


def Adam(lr: float = 0.001, **options: Any) -> Training:
    """Return settings of local training with `torch.optim.Adam`."""
    return build(Training, {"lr": lr, "optimizer": "adam", **options}, "Adam")


def AdamW(lr: float = 0.001, weight_decay: float = 0.01, **options: Any) -> Training:
    """Return settings of local training with `torch.optim.AdamW`.

    ``weight_decay``: The weight decay, which is decoupled from the gradient.
    """
    return build(Training, {"lr": lr, "weight_decay": weight_decay, "optimizer": "adamw", **options}, "AdamW")
