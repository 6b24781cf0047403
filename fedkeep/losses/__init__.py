"""Losses of local training: the distillation kernel, weight rules, and terms, as pure functions of tensors."""

from fedkeep.data import Data
from fedkeep.losses.base import ZERO_LOSS, Batch, Loss, ModelView, Scaled, Sum
from fedkeep.losses.classification import TSD, CompensatedCrossEntropy, CrossEntropy, WeightedCrossEntropy
from fedkeep.losses.decoupled import upcast
from fedkeep.losses.distillation import (
    Distillation,
    EntropyAndLabelWeighting,
    FullKL,
    FullKLByClass,
    FullKLByConfidence,
    FullKLByEntropy,
    Head,
    PerTeacher,
    Scale,
    SubsetDistillation,
    WeightRule,
    soft_label_loss,
)
from fedkeep.losses.features import BoundingLoss, FeatureDistance, FeatureMSE, ModelContrastive, SupCon
from fedkeep.losses.penalties import L1Penalty, LinearTerm, QuadraticPenalty
from fedkeep.losses.prototypes import PrototypeCrossEntropy, Prototypes
from fedkeep.losses.wrappers import ClassSubset, Rotated

__all__ = [
    "TSD",
    "ZERO_LOSS",
    "Batch",
    "BoundingLoss",
    "ClassSubset",
    "CompensatedCrossEntropy",
    "CrossEntropy",
    "Data",
    "Distillation",
    "EntropyAndLabelWeighting",
    "FeatureDistance",
    "FeatureMSE",
    "FullKL",
    "FullKLByClass",
    "FullKLByConfidence",
    "FullKLByEntropy",
    "Head",
    "L1Penalty",
    "LinearTerm",
    "Loss",
    "ModelContrastive",
    "ModelView",
    "PerTeacher",
    "PrototypeCrossEntropy",
    "Prototypes",
    "QuadraticPenalty",
    "Rotated",
    "Scale",
    "Scaled",
    "SubsetDistillation",
    "Sum",
    "SupCon",
    "WeightRule",
    "WeightedCrossEntropy",
    "soft_label_loss",
    "upcast",
]
