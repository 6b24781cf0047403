"""Cross-entropies with the labels: the plain one, weighted ones, and two for class-incremental learning.

`CompensatedCrossEntropy` is GLFC's (Dong et al., 2022). `TSD` is the task semantics distillation of FedSKF
(Electronics 2024, 13, 1772), which is a binary cross-entropy to labels and old predictions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy

from fedkeep.data import Data
from fedkeep.errors import ConfigError
from fedkeep.losses.base import Batch, Loss, ModelView, TeacherOutputs
from fedkeep.losses.decoupled import upcast
from fedkeep.models import Weights

TSDReading = Literal["recombined_sigmoid", "recombined_softmax", "glfc"]


@dataclass(frozen=True, eq=False)
class CrossEntropy(Loss):
    """Mean over the batch of -ln p(label), p the softmax of the logits divided by ``tau``.

    Attributes
    ----------
    dataset_index : int
        Which of the data sets of `fit` it reads, from 0.
    tau : float
        The softmax temperature.
    """

    dataset_index: int = 0
    tau: float = 1.0

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset_index]
        logits = upcast(model.logits(batch))
        return cross_entropy(logits if self.tau == 1.0 else logits / self.tau, batch.data["label"])


OWN_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
"""What users gave as ``training.loss``, by the names that recipes have for it."""


@dataclass(frozen=True, eq=False)
class LabelLoss(Loss):
    """What stands in the place of a `CrossEntropy` whose recipe gives ``training.loss`` or ``training.class_weights``.

    ``function``: Maps logits [b, classes] and labels to a scalar; None: the cross-entropy.
    ``weight``: [classes], as of `torch.nn.CrossEntropyLoss`.
    ``name``: Of the function, for errors.
    """

    function: Callable[[Tensor, Tensor], Tensor] | None
    weight: Tensor | None
    dataset_index: int = 0
    tau: float = 1.0
    name: str = ""

    @property
    def compares_examples(self) -> bool:
        return self.weight is not None  # the mean is divided by the weights of the batch

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[self.dataset_index]
        logits, labels = upcast(model.logits(batch)) / self.tau, batch.data["label"]
        if self.function is None:
            return cross_entropy(logits, labels, self.weight)
        value = self.function(logits, labels)
        if not isinstance(value, Tensor) or value.ndim:
            what = f"one of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ConfigError(
                f"training.loss: {self.name} must return a scalar tensor, such as the mean over the batch, not {what}."
            )
        return value


@dataclass(frozen=True, eq=False)
class WeightedCrossEntropy(Loss):
    """Mean over the batch of -v(label) ln p(label); not divided by the sum of the weights.

    ``weight``: [classes], v.
    """

    weight: Tensor

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        logits, labels = upcast(model.logits(batches[0])), batches[0].data["label"]
        return (self.weight.to(labels.device)[labels] * cross_entropy(logits, labels, reduction="none")).mean()


@dataclass(frozen=True, eq=False)
class CompensatedCrossEntropy(Loss):
    """Mean over the batch and the classes of binary cross-entropies, with the gradient compensation of GLFC's code.

    The weight of an example is g = 1 - sigmoid(its label's logit), divided by the mean g of the batch's examples of the
    first ``old`` classes or, for the others, by that of the others. So old and new classes count alike, however many
    examples they have. No gradient flows through the weights. Before there are old classes all weigh the same.

    ``old``: The number of old classes.
    """

    old: int

    @property
    def compares_examples(self) -> bool:
        return self.old > 0

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        logits, labels = upcast(model.logits(batches[0])), batches[0].data["label"]
        one_hot = _one_hot(labels, logits.shape[-1], logits.dtype)
        losses = binary_cross_entropy_with_logits(logits, one_hot, reduction="none").mean(-1)
        if not self.old:
            return losses.mean()
        g = ((1 - logits.detach().sigmoid()) * one_hot).sum(-1)
        is_old = (labels < self.old).to(logits.dtype)
        weights = _divided_by_mean(g, is_old) + _divided_by_mean(g, 1 - is_old)
        return (weights * losses).mean()


def tsd_loss(old: Tensor, student: Tensor, labels: Tensor, reading: TSDReading) -> Tensor:
    """Compute the task semantics distillation (FedSKF, eq. 8).

    With the old model's logits for the old classes beside the student's for the new ones, it is a binary cross-entropy
    to the labels. As printed the old half is a constant, so the term teaches nothing about old classes; its source,
    GLFC (Dong et al., 2022), means something else. So there are three readings.

    ``old``: [b, old classes], the frozen model's logits.
    ``student``: [b, classes], the student's logits.
    ``labels``: int64 [b].
    ``reading``: ``recombined_sigmoid``, as printed: of [old logits; the student's new ones] through a sigmoid each, to
        the one-hot labels. ``recombined_softmax``: of the same through a softmax, where the old logits compete with the
        new ones. ``glfc``: of all the student's logits to [sigmoid of the old logits; one-hot labels], as in GLFC's
        code.
    """
    old, student = upcast(old.detach()), upcast(student)
    known = old.shape[-1]
    one_hot = _one_hot(labels, student.shape[-1], student.dtype)
    if reading == "glfc":
        target = torch.cat((old.sigmoid(), one_hot[:, known:]), dim=-1)
        losses = binary_cross_entropy_with_logits(student, target, reduction="none")
    else:
        recombined = torch.cat((old, student[:, known:]), dim=-1)
        if reading == "recombined_sigmoid":
            losses = binary_cross_entropy_with_logits(recombined, one_hot, reduction="none")
        else:
            p = recombined.softmax(-1)
            safe = p.nan_to_num(0.5)  # `binary_cross_entropy` raises on NaN, where a loss that is NaN loses the client
            losses = binary_cross_entropy(safe, one_hot, reduction="none") + (p - safe).detach()
    return losses.mean()


@dataclass(frozen=True, eq=False)
class TSD(Loss):
    """`tsd_loss` on the first data set.

    ``teacher``: The old model; empty once its outputs are cached.
    ``known``: How many classes the teacher knows: the first ones.
    ``reading``: Which reading of the equation.
    ``teacher_logits``: [n, known], the cached outputs.
    """

    per_example_fields: ClassVar[tuple[str, ...]] = ("teacher_logits",)

    teacher: Weights
    known: int
    reading: TSDReading = "recombined_sigmoid"
    teacher_logits: Tensor | None = None

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = batches[0]
        cached = self.teacher_logits
        old = model.teacher_logits(self.teacher, batch) if cached is None else cached[batch.index]
        return tsd_loss(old[:, : self.known], model.logits(batch), batch.data["label"], self.reading)

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if dataset_index or self.teacher_logits is not None:
            return self
        return replace(self, teacher={}, teacher_logits=outputs(self.teacher)[:, : self.known])


def _one_hot(labels: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    # Not `one_hot`, which reads the values and so cannot run under `vmap`.
    return (labels[:, None] == torch.arange(classes, device=labels.device)).to(dtype)


def _divided_by_mean(values: Tensor, members: Tensor) -> Tensor:
    """Return values [b] divided by their mean among ``members`` (1 or 0), and 0 elsewhere."""
    mean = (values * members).sum() / members.sum().clamp(min=1)
    return values * members / mean.clamp(min=torch.finfo(values.dtype).tiny)
