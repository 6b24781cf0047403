"""Metrics: pure functions of class-wise counts and accuracies. Accuracies are fractions; papers print percent."""

from fedkeep.metrics.accuracy import accuracy, balanced_accuracy, class_accuracy
from fedkeep.metrics.consistency import consistency, drift
from fedkeep.metrics.forgetting import forgetting, forgetting_tasks
from fedkeep.metrics.locality import kold
from fedkeep.metrics.summary import best, last, over_seeds, paired, rounds_to, tail
from fedkeep.metrics.tasks import (
    FORGETTING,
    accuracy_after,
    average_incremental_accuracy,
    backward_transfer,
    class_forgetting,
    forward_transfer,
    task_accuracies,
)

__all__ = [
    "FORGETTING",
    "accuracy",
    "accuracy_after",
    "average_incremental_accuracy",
    "backward_transfer",
    "balanced_accuracy",
    "best",
    "class_accuracy",
    "class_forgetting",
    "consistency",
    "drift",
    "forgetting",
    "forgetting_tasks",
    "forward_transfer",
    "kold",
    "last",
    "over_seeds",
    "paired",
    "rounds_to",
    "tail",
    "task_accuracies",
]
