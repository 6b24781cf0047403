"""Metrics: pure functions of class-wise counts and accuracies. Accuracies are fractions; papers print percent."""

from fedkeep.metrics.accountant import dp_sgd_epsilon
from fedkeep.metrics.accuracy import (
    accuracy,
    balanced_accuracy,
    chance_accuracy,
    class_accuracy,
    forgetting,
    is_at_chance,
)
from fedkeep.metrics.local_models import consistency, drift, kold
from fedkeep.metrics.scores import calibration_error, chance_auroc, scores
from fedkeep.metrics.statistics import (
    LEVEL,
    Interval,
    best,
    block_interval,
    last,
    mean_std,
    paired,
    rounds_to,
    t_interval,
    window_rounds,
)
from fedkeep.metrics.tasks import (
    FORGETTING,
    accuracy_after,
    average_incremental_accuracy,
    backward_transfer,
    class_forgetting,
    forgetting_tasks,
    task_accuracies,
)

__all__ = [
    "FORGETTING",
    "LEVEL",
    "Interval",
    "accuracy",
    "accuracy_after",
    "average_incremental_accuracy",
    "backward_transfer",
    "balanced_accuracy",
    "best",
    "block_interval",
    "calibration_error",
    "chance_accuracy",
    "chance_auroc",
    "class_accuracy",
    "class_forgetting",
    "consistency",
    "dp_sgd_epsilon",
    "drift",
    "forgetting",
    "forgetting_tasks",
    "is_at_chance",
    "kold",
    "last",
    "mean_std",
    "paired",
    "rounds_to",
    "scores",
    "t_interval",
    "task_accuracies",
    "window_rounds",
]
