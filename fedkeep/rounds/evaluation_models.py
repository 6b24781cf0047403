"""The evaluation models: which of the last model, the mean of the round and the moving average are evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fedkeep.interface import Algorithm

EvaluationModel = Literal["last", "round", "moving"]
"""What is evaluated.

``last``: `Server.eval_model` if the method sets it, otherwise the global model. ``round``: for sequential methods the
mean of the models that clients returned in a round, all with equal weights, but for those of clients without examples;
for parallel methods the global model. ``moving``: the moving
average of the ``round`` models.
"""


def distinct_models(chosen: Sequence[EvaluationModel], algorithm: Algorithm[Any, Any]) -> tuple[EvaluationModel, ...]:
    """Return the evaluation models of a method, each model once.

    ``chosen``: Those that the recipe names (``run.evaluation_models``).
    ``algorithm``: The method. The global model of a parallel one is the mean of its round already, so that ``round`` is
        left out where ``last`` is chosen too. Of one that says itself which model counts (`Algorithm.sets_eval_model`)
        only ``last`` is left.
    """
    if algorithm.sets_eval_model:
        return ("last",)
    return tuple(which for which in chosen if algorithm.sequential or which != "round" or "last" not in chosen)
