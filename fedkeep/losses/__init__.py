"""Objectives: the distillation kernel, weight rules, and terms of a local loss, as pure functions of tensors."""

from fedkeep.data import Data
from fedkeep.losses.base import NOTHING, Answer, Batch, Objective, Student, Sum
from fedkeep.losses.compensation import CompensatedEntropy
from fedkeep.losses.contrast import Contrast
from fedkeep.losses.cross_entropy import CrossEntropy, WeightedCrossEntropy
from fedkeep.losses.distillation import Distillation, Form, Lesson, Scale
from fedkeep.losses.features import Bounding, FeatureError
from fedkeep.losses.joint import Joint
from fedkeep.losses.penalties import Absolute, Quadratic, Slope
from fedkeep.losses.prototypes import FeatureDistance, PrototypeEntropy, Prototypes
from fedkeep.losses.rotations import Rotated
from fedkeep.losses.slices import AmongAll, Head, Scaled, Slice
from fedkeep.losses.supcon import SupCon
from fedkeep.losses.tsd import TSD
from fedkeep.losses.weighting import (
    ByEntropyAndLabel,
    ExampleRule,
    PerTeacher,
    WeightRule,
    Whole,
    WholeByClass,
    WholeByConfidence,
    WholeByEntropy,
)

__all__ = [
    "NOTHING",
    "TSD",
    "Absolute",
    "AmongAll",
    "Answer",
    "Batch",
    "Bounding",
    "ByEntropyAndLabel",
    "CompensatedEntropy",
    "Contrast",
    "CrossEntropy",
    "Data",
    "Distillation",
    "ExampleRule",
    "FeatureDistance",
    "FeatureError",
    "Form",
    "Head",
    "Joint",
    "Lesson",
    "Objective",
    "PerTeacher",
    "PrototypeEntropy",
    "Prototypes",
    "Quadratic",
    "Rotated",
    "Scale",
    "Scaled",
    "Slice",
    "Slope",
    "Student",
    "Sum",
    "SupCon",
    "WeightRule",
    "WeightedCrossEntropy",
    "Whole",
    "WholeByClass",
    "WholeByConfidence",
    "WholeByEntropy",
]
