"""What is served: the model that travels, or an average of models that the server has seen anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedkeep.interface import Fit
from fedkeep.models import Weights
from fedkeep.models.weights import mean

EvaluationModel = Literal["last", "round", "moving"]
"""``last``: what the method serves, which is the model that travels unless it says so. ``round``: the mean of the
round's graduates, all models that clients of a sequence sent on; with parallel clients, what the server made of them.
``moving``: the moving average of those over rounds."""


def round_mean(model: Weights, fits: Sequence[tuple[str, Fit]], sequential: bool) -> Weights:
    """Return the mean of a round's graduates, all alike; ``model`` for parallel methods and for a round without any.

    A client that was asked twice graduates with its last model; one without examples has nothing to graduate with.
    """
    graduates = {client: fit.model for client, fit in fits if fit.steps}
    return mean(list(graduates.values())) if sequential and graduates else model
