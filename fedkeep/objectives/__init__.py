"""Objectives: the distillation kernel, weight rules, and terms of a local loss, as pure functions of tensors."""

from fedkeep.data import Data
from fedkeep.objectives.base import NOTHING, Answer, Batch, Objective, Student, Sum
from fedkeep.objectives.compensation import CompensatedEntropy
from fedkeep.objectives.contrast import Contrast
from fedkeep.objectives.cross_entropy import CrossEntropy, WeightedCrossEntropy
from fedkeep.objectives.distillation import Distillation, Form, Lesson, Scale
from fedkeep.objectives.features import Bounding, FeatureError
from fedkeep.objectives.joint import Joint
from fedkeep.objectives.penalties import Absolute, Quadratic, Slope
from fedkeep.objectives.prototypes import FeatureDistance, PrototypeEntropy, Prototypes
from fedkeep.objectives.rotations import Rotated
from fedkeep.objectives.slices import AmongAll, Head, Scaled, Slice
from fedkeep.objectives.supcon import SupCon
from fedkeep.objectives.tsd import TSD
from fedkeep.objectives.weighting import (
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
