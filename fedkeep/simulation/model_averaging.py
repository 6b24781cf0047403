"""The evaluation model: the model that travels, or an average of models that the server has seen anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedkeep.interface import Fit
from fedkeep.models import Weights
from fedkeep.models.weights import mean

EvaluationModel = Literal["last", "round", "moving"]
"""``last``: the model that the method names, which is the one that travels unless it says so. ``round``: the
mean of the models that the clients of a sequence sent on in a round; with parallel clients, what the
server made of them.
``moving``: the moving average of those over rounds."""


def round_mean(model: Weights, fits: Sequence[tuple[str, Fit]], sequential: bool) -> Weights:
    """Return the mean of a round's client models, all with equal weight.

    A client that was asked twice counts with its last model; one without examples does not count.

    Parameters
    ----------
    model : Weights
        Returned for parallel methods, and for a round without client models.
    fits : Sequence[tuple[str, Fit]]
        Clients, and what their training returned, in the cohort's order.
    sequential : bool
        Whether the method's clients train one after another.
    """
    client_models = {client: fit.model for client, fit in fits if fit.num_steps}
    return mean(list(client_models.values())) if sequential and client_models else model
