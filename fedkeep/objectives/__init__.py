"""Objectives: the distillation kernel, weight rules, and terms of a local loss, as pure functions of tensors."""

from fedkeep.data import Data
from fedkeep.objectives.base import NOTHING, Answer, Batch, Objective, Student, Sum
from fedkeep.objectives.cross_entropy import CrossEntropy
from fedkeep.objectives.distillation import Distillation, Lesson
from fedkeep.objectives.weighting import PerTeacher, WeightRule

__all__ = [
    "NOTHING",
    "Answer",
    "Batch",
    "CrossEntropy",
    "Data",
    "Distillation",
    "Lesson",
    "Objective",
    "PerTeacher",
    "Student",
    "Sum",
    "WeightRule",
]
