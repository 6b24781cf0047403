"""The evaluation models: which of the last model, the mean of the round and the moving average are evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

EvaluationModel = Literal["last", "round", "moving"]
"""What is evaluated.

``last``: `Server.eval_model` if the method sets it, otherwise the global model. ``round``: for sequential methods the
mean of the models that clients returned in a round, all with equal weights, but for those of clients without examples;
for parallel methods the global model. ``moving``: the moving
average of the ``round`` models.
"""


def distinct_models(chosen: Sequence[EvaluationModel], *, sequential: bool, own: bool) -> tuple[EvaluationModel, ...]:
    """Return the evaluation models of a method, each model once.

    Parameters
    ----------
    chosen : Sequence[EvaluationModel]
        Those that the recipe names (``run.evaluation_models``).
    sequential : bool
        Whether the method is sequential. The global model of a parallel method is the mean of its round already, so
        that ``round`` is left out where ``last`` is chosen too.
    own : bool
        Whether the method says itself which model counts (`Algorithm.sets_eval_model`): only ``last`` is left.

    Returns
    -------
    tuple[EvaluationModel, ...]
        The models, in the recipe's order.
    """
    if own:
        return ("last",)
    return tuple(which for which in chosen if sequential or which != "round" or "last" not in chosen)
