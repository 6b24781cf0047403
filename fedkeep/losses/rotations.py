"""Every class learned as four, one for each rotation of its images, as in PASS (Zhu et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedkeep.data import Data
from fedkeep.errors import ConfigError
from fedkeep.losses.base import Answer, Batch, Objective, Student

ROTATIONS = 4


def rotated(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return images turned by 0, 90, 180 and 270 degrees, one after the other, and labels 4 y + k of the k-th turn.

    Parameters
    ----------
    images : [b, channels, side, side]. labels : int64 [b].

    Raises
    ------
    ConfigError
        For images that are not square.
    """
    height, width = images.shape[-2:]
    if height != width:
        raise ConfigError(
            f"images are {height} pixels high and {width} wide, and a method that turns them needs square ones. Crop "
            "the data set, or use another method."
        )
    turned = torch.stack([images.rot90(k, (-2, -1)) for k in range(ROTATIONS)], dim=1).flatten(0, 1)
    return turned, _four_of_each(labels)


def _four_of_each(numbers: Tensor) -> Tensor:
    return (ROTATIONS * numbers[:, None] + torch.arange(ROTATIONS, device=numbers.device)).flatten()


@dataclass(frozen=True, eq=False)
class Rotated(Objective):
    """An objective on the first data set's images in all four rotations; the classifier has four rows for each class.

    A batch becomes four times as long, and row i of the data rows 4 i to 4 i + 3. Terms that see images belong into
    one of these together: the network then sees each once.
    """

    term: Objective

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        batch = Batch(_rotated_data(batches[0].data), _four_of_each(batches[0].index))
        return self.term(student, [batch, *batches[1:]])

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        if on:
            return self
        turned = _rotated_data(data)
        return replace(self, term=self.term.settle(answer.about(turned), turned, on))


def _rotated_data(data: Data) -> Data:
    images, labels = rotated(data["image"], data["label"])
    return {"image": images, "label": labels}
