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
