"""The evaluation model: the global model, or an average of models that the server has received anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedkeep.interface import Fit
from fedkeep.models import Weights
from fedkeep.models.weights import mean

EvaluationModel = Literal["last", "round", "moving"]
"""What is evaluated.

``last``: `Server.eval_model` if the method sets it, otherwise the global model. ``round``: for sequential methods the
mean of the models that the clients of a round returned, for parallel methods the global model. ``moving``: the moving
average of the ``round`` models.
"""


def distinct_models(chosen: Sequence[EvaluationModel], sequential: bool) -> tuple[EvaluationModel, ...]:
    """Return the evaluation models of a method, each model once.

    Parameters
    ----------
    chosen : Sequence[EvaluationModel]
        Those that the recipe names (``run.evaluation_models``).
    sequential : bool
        Whether the method is sequential. The global model of a parallel method is the mean of its round already, so
        that ``round`` is left out where ``last`` is chosen too.

    Returns
    -------
    tuple[EvaluationModel, ...]
        The models, in the recipe's order.
    """
    return tuple(which for which in chosen if sequential or which != "round" or "last" not in chosen)


def round_mean(model: Weights, fits: Sequence[tuple[str, Fit]]) -> Weights:
    """Compute the mean of the models that the clients of a sequential method returned, with equal weights.

    For a client that was asked twice its last model counts; a client without examples does not count.

    Parameters
    ----------
    model : Weights
        The global model, which is returned for a round without client models.
    fits : Sequence[tuple[str, Fit]]
        Client ids and results of local training, in the order of the cohort.

    Returns
    -------
    Weights
        The mean.
    """
    client_models = {client: fit.model for client, fit in fits if fit.num_steps}
    return mean(list(client_models.values())) if client_models else model
