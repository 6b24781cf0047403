"""Losses that change what another loss sees: some of the classes, or rotated images.

Cross-entropy among the new classes is ``ClassSubset(CrossEntropy(), old)``, and distillation of the old ones
``ClassSubset(Distillation(...), 0, old, any_label=True)``: classes outside do not compete, and their rows of the
classifier get no gradient. Classes are numbered in order of arrival.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedkeep.data import Data
from fedkeep.errors import ConfigError
from fedkeep.losses.base import ZERO_LOSS, Batch, Loss, ModelView, TeacherOutputs
from fedkeep.losses.classification import CrossEntropy
from fedkeep.models import Weights

ROTATIONS = 4


@dataclass(frozen=True, eq=False)
class ClassSubset(Loss):
    """A loss that sees the logits of classes ``start`` to ``stop - 1`` only, and numbers them from 0.

    ``term``: What is computed on the subset.
    ``start``: The first class.
    ``stop``: One beyond the last class; None stands for the end.
    ``any_label``: Whether examples of other classes take part, which needs a ``stop``. Their label becomes the nearest
        inside: for terms that do not look at labels, such as the full divergence from a teacher.
    """

    term: Loss
    start: int = 0
    stop: int | None = None
    any_label: bool = False

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        if self._has_one_class:
            return next(iter(model.weights.values())).new_zeros(())
        # The images stay the same tensors: a model view recognises by them what it has computed already.
        relabelled = [replace(batch, data=self._relabelled(batch.data)) for batch in batches]
        return self.term(_SubsetView(model, slice(self.start, self.stop)), relabelled)

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if self._has_one_class:
            return ZERO_LOSS
        subset = _SubsetOutputs(outputs, slice(self.start, self.stop))
        return replace(self, term=self.term.cache_teachers(subset, self._relabelled(data), dataset_index))

    @property
    def _has_one_class(self) -> bool:
        """Whether there is one class only, which has probability 1 whatever the logits."""
        return self.stop is not None and self.stop - self.start == 1

    def _relabelled(self, data: Data) -> Data:
        if "label" not in data:
            return data
        label = data["label"] - self.start
        if self.any_label and self.stop is not None:
            label = label.clamp(0, self.stop - self.start - 1)
        return {**data, "label": label}


@dataclass(frozen=True)
class _SubsetView:
    """A model view of whose logits, and those of its teachers, only some columns are visible."""

    model: ModelView
    classes: slice

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.model.weights

    def logits(self, batch: Batch) -> Tensor:
        return self.model.logits(batch)[..., self.classes]

    def features(self, batch: Batch) -> Tensor:
        return self.model.features(batch)

    def teacher_logits(self, model: Weights, batch: Batch) -> Tensor:
        return self.model.teacher_logits(model, batch)[..., self.classes]

    def teacher_features(self, model: Weights, batch: Batch) -> Tensor:
        return self.model.teacher_features(model, batch)


@dataclass(frozen=True)
class _SubsetOutputs:
    """The same columns of teachers' outputs on a whole data set."""

    outputs: TeacherOutputs
    classes: slice

    def __call__(self, model: Weights) -> Tensor:
        return self.outputs(model)[..., self.classes]

    def features(self, model: Weights) -> Tensor:
        return self.outputs.features(model)

    def for_data(self, data: Data) -> TeacherOutputs:
        return replace(self, outputs=self.outputs.for_data(data))


@dataclass(frozen=True, eq=False)
class Rotated(Loss):
    """A term on the first data set's images in all four rotations; the classifier has four rows for each class.

    As in PASS (Zhu et al., 2021). A batch becomes four times as long, and row i of the data rows 4 i to 4 i + 3. Put
    all terms that see images into one `Rotated`: the network then sees each image once.
    """

    term: Loss

    def __call__(self, model: ModelView, batches: Sequence[Batch]) -> Tensor:
        batch = Batch(_rotate_data(batches[0].data), _repeat_for_rotations(batches[0].index))
        return self.term(model, [batch, *batches[1:]])

    def cache_teachers(self, outputs: TeacherOutputs, data: Data, dataset_index: int) -> Loss:
        if dataset_index:
            return self
        rotated = _rotate_data(data)
        return replace(self, term=self.term.cache_teachers(outputs.for_data(rotated), rotated, dataset_index))


def replace_cross_entropy(loss: Loss, make: Callable[[CrossEntropy, slice], Loss], seen: slice = slice(None)) -> Loss:
    """Return a loss with others in the place of its cross-entropies; ``make`` is also told which classes each sees."""
    if type(loss) is CrossEntropy:  # one derived from it computes something else
        return make(loss, seen)
    if isinstance(loss, ClassSubset):
        seen = slice(loss.start, loss.stop)
    parts: dict[str, Any] = {}
    for name in (field.name for field in fields(loss)):
        part = getattr(loss, name)
        if isinstance(part, Loss):
            parts[name] = replace_cross_entropy(part, make, seen)
        elif isinstance(part, tuple) and part and all(isinstance(each, Loss) for each in part):
            parts[name] = tuple(replace_cross_entropy(each, make, seen) for each in part)
    return replace(loss, **parts) if parts else loss


def rotate(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate images by 0, 90, 180 and 270 degrees.

    ``images``: [b, channels, side, side].
    ``labels``: int64 [b].
    Returns: [4 b, channels, side, side], the four rotations of each image one after another, and the label 4 y + k of
        the k-th rotation of class y.
    """
    height, width = images.shape[-2:]
    if height != width:
        raise ConfigError(
            f"images are {height} pixels high and {width} wide, and a method that turns them needs square ones. Crop "
            "the data set, or use another method."
        )
    rotated = torch.stack([images.rot90(k, (-2, -1)) for k in range(ROTATIONS)], dim=1).flatten(0, 1)
    return rotated, _repeat_for_rotations(labels)


def _repeat_for_rotations(numbers: Tensor) -> Tensor:
    return (ROTATIONS * numbers[:, None] + torch.arange(ROTATIONS, device=numbers.device)).flatten()


def _rotate_data(data: Data) -> Data:
    images, labels = rotate(data["input"], data["label"])
    return {"input": images, "label": labels}
