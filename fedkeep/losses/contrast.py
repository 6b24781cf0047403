"""The model-contrastive term of MOON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from fedkeep.data import Data
from fedkeep.losses.base import Answer, Batch, Objective, Student
from fedkeep.models import Weights


@dataclass(frozen=True, eq=False)
class Contrast(Objective):
    """weight * mean of -ln [e^{s(z, z_t)/tau} / (e^{s(z, z_t)/tau} + e^{s(z, z_a)/tau})], s the cosine.

    z are the student's features, z_t those of the model ``towards``, z_a those of the model ``away`` (Li et al., 2021,
    "Model-contrastive federated learning", eq. 3).
    """

    towards: Weights
    away: Weights
    weight: float
    tau: float

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        towards, away = (student.frozen_features(model, batches[0]) for model in (self.towards, self.away))
        return self.weight * _contrast(student.features(batches[0]), towards, away, self.tau)

    def settle(self, answer: Answer, data: Data, on: int) -> Objective:
        if on:
            return self
        return SettledContrast(answer.features(self.towards), answer.features(self.away), self.weight, self.tau)


@dataclass(frozen=True, eq=False)
class SettledContrast(Objective):
    """The same with the frozen models' features as columns [n, width] over the first data set."""

    columns: ClassVar[tuple[str, ...]] = ("towards", "away")

    towards: Tensor
    away: Tensor
    weight: float
    tau: float

    def __call__(self, student: Student, batches: Sequence[Batch]) -> Tensor:
        rows = batches[0].index
        return self.weight * _contrast(student.features(batches[0]), self.towards[rows], self.away[rows], self.tau)


def _contrast(own: Tensor, towards: Tensor, away: Tensor, tau: float) -> Tensor:
    near_and_far = torch.stack((cosine_similarity(own, towards), cosine_similarity(own, away)), dim=-1) / tau
    return cross_entropy(near_and_far, near_and_far.new_zeros(len(own), dtype=torch.int64))
