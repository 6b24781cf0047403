"""Differential privacy of what leaves a client: the options, and how what is spent is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedkeep.options import Options, option

_PREFIX = "private "
COUNTS_TOLD = _PREFIX + "label counts"
"""The use of randomness that stands for one telling of noised label counts."""
CHANGE_TOLD = _PREFIX + "change"
"""The use of randomness that stands for one telling of a noised change, as of prototypes."""
MEANS_TOLD = _PREFIX + "means"
"""The use of randomness that stands for one telling of noised means over the server's examples, as of confidences."""
FROM_LABEL_COUNTS = "from label counts"
"""Marks, in `typing.Annotated`, a field of a reply that follows from `Client.label_counts` alone."""


@dataclass(frozen=True)
class Privacy(Options):
    """Differential privacy of one example, in what leaves a client, or of a whole client, in means; and secure sums."""

    noise_multiplier: float = option(
        0.0,
        "DP-SGD in local training: noise of a step (its standard deviation over max_grad_norm); 0: off",
        low=0.0,
    )
    max_grad_norm: float = option(1.0, "DP-SGD: norm to which the gradient of each example is clipped", low=1e-12)
    delta: float = option(1e-5, "DP-SGD: delta for which epsilon is computed; below 1 / examples", low=1e-15, high=0.5)
    counts_epsilon: float = option(
        0.0, "epsilon of the label counts, and of what follows from them, that a client tells; 0: exact", low=0.0
    )
    prototypes_noise_multiplier: float = option(
        0.0, "noise on the prototypes that a client sends, over max_prototype_change; 0: exact", low=0.0
    )
    max_prototype_change: float = option(
        1.0, "norm to which a client's change of all prototypes together is clipped, if they are noised", low=1e-12
    )
    confidences_epsilon: float = option(
        0.0,
        "epsilon, in each round, of confidences on the server's examples that clients are sent; 0: exact",
        low=0.0,
    )
    client_noise_multiplier: float = option(
        0.0, "central DP: noise on the mean update, over max_update_norm / clients of the mean; 0: off", low=0.0
    )
    secure_aggregation: bool = option(
        False, "whether the server sees sums of models only, by SecAgg; for methods that only average"
    )
    clipping_range: float = option(
        1024.0, "secure aggregation: largest change of a weight; a client with a larger one is lost", low=1e-6, high=1e9
    )
    max_update_norm: float = option(1.0, "central DP: norm to which each client's update is clipped", low=1e-12)


def steps_name(sample_rate: float) -> str:
    """Return the name under which steps of DP-SGD are counted among a client's uses of randomness.

    Parameters
    ----------
    sample_rate : float
        The probability with which an example is in a batch.

    Returns
    -------
    str
        The name.
    """
    return f"{_PREFIX}steps at {sample_rate!r}"


def spent(uses: Mapping[str, int]) -> dict[str, int]:
    """Return the part of a client's uses of randomness that spends its privacy.

    Parameters
    ----------
    uses : Mapping[str, int]
        Number of uses by purpose.

    Returns
    -------
    dict[str, int]
        The part.
    """
    return {name: count for name, count in uses.items() if name.startswith(_PREFIX)}


def sample_rate_of(name: str) -> float | None:
    """Return the sample rate in a name that `steps_name` made; None for another name.

    Parameters
    ----------
    name : str
        The name.

    Returns
    -------
    float or None
        The sample rate.
    """
    prefix = f"{_PREFIX}steps at "
    return float(name.removeprefix(prefix)) if name.startswith(prefix) else None
