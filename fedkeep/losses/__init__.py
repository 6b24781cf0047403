"""Objectives: the distillation kernel, weight rules, and terms of a local loss, as pure functions of tensors."""

from fedkeep.data import Data
from fedkeep.losses.base import NOTHING
from fedkeep.losses.base import Answer
from fedkeep.losses.base import Batch
from fedkeep.losses.base import Objective
from fedkeep.losses.base import Student
from fedkeep.losses.base import Sum
from fedkeep.losses.compensation import CompensatedEntropy
from fedkeep.losses.contrast import Contrast
from fedkeep.losses.cross_entropy import CrossEntropy
from fedkeep.losses.cross_entropy import WeightedCrossEntropy
from fedkeep.losses.distillation import Distillation
from fedkeep.losses.distillation import Form
from fedkeep.losses.distillation import Lesson
from fedkeep.losses.distillation import Scale
from fedkeep.losses.features import Bounding
from fedkeep.losses.features import FeatureError
from fedkeep.losses.joint import Joint
from fedkeep.losses.penalties import Absolute
from fedkeep.losses.penalties import Quadratic
from fedkeep.losses.penalties import Slope
from fedkeep.losses.prototypes import FeatureDistance
from fedkeep.losses.prototypes import PrototypeEntropy
from fedkeep.losses.prototypes import Prototypes
from fedkeep.losses.rotations import Rotated
from fedkeep.losses.slices import Scaled
from fedkeep.losses.slices import Slice
from fedkeep.losses.supcon import SupCon
from fedkeep.losses.tsd import TSD
from fedkeep.losses.weighting import ByEntropyAndLabel
from fedkeep.losses.weighting import ExampleRule
from fedkeep.losses.weighting import PerTeacher
from fedkeep.losses.weighting import WeightRule
from fedkeep.losses.weighting import Whole
from fedkeep.losses.weighting import WholeByClass
from fedkeep.losses.weighting import WholeByConfidence
from fedkeep.losses.weighting import WholeByEntropy
from fedkeep.objectives.slices import AmongAll
from fedkeep.objectives.slices import Head

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
