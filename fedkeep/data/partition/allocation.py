"""Divide each class among its owners in Dirichlet shares, and draw again until no client is too small.

ExDir, the class-wise Dirichlet scheme and the hybrid scheme share it. Attempts are drawn many at a time and on counts
only; rows are assigned after one is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedkeep._utils import progress
from fedkeep.data.partition.base import Integers, random_stream

Floats = npt.NDArray[np.float64]

# Number of shares that are drawn at a time: large enough to hide NumPy's cost per call, small enough for the CPU cache.
_BATCH = 1 << 17
# Number of attempts after which a hopeless request is given up (see `allocate`), and what is called hopeless: a smaller
# probability that one of all the attempts succeeds.
_PROBE = 1000
_HOPELESS = 0.01


@dataclass(frozen=True)
class Allocation:
    """Result of a search for acceptable counts.

    ``counts``: int64 ``[clients, classes]``; None if no attempt was acceptable.
    ``attempts``: Number of draws, the accepted one included.
    ``best``: Examples of the smallest client in the best draw.
    ``mean_too_small``: Mean number of clients that were too small, if the search was given up for that; otherwise None.
    """

    counts: Integers | None
    attempts: int
    best: int
    mean_too_small: float | None = None

    def failure(self, min_size: int, remedy: str) -> str:
        """Return an error text: why nothing was accepted and what to do; ``remedy`` is the scheme's own."""
        advice = [remedy, "use fewer clients"]
        if min_size > 1:
            advice.insert(0, f"lower min_size (to {self.best} or less)" if self.best else "lower min_size")
        odds = ""
        if self.mean_too_small is None:
            advice.append("allow more attempts")
        else:
            odds = f" On average {self.mean_too_small:.0f} clients were too small, so more attempts would not help."
        todo = f"{', '.join(advice[:-1])}, or {advice[-1]}."
        return (
            f"no draw out of {self.attempts} gave every client {min_size} example{'s' if min_size > 1 else ''}; "
            f"in the best one, the smallest client had {self.best}.{odds} {todo[0].upper()}{todo[1:]}"
        )


def allocate(
    sizes: Integers,
    owners: npt.NDArray[np.bool_],
    *,
    alpha: float,
    cap: float,
    min_size: int,
    attempts: int,
    seed: int,
    shares_at_a_time: int = _BATCH,
) -> Allocation:
    """Draw counts until every client has ``min_size`` examples; accept the first draw that does.

    In each attempt, for the classes in order: shares ``v ~ Dir(alpha)`` over the owners of the class; owners that
    already hold at least ``cap`` get zero (checked with the counts so far, so the cap can be overshot); renormalise;
    cut by ``floor(cumsum(v) * class size)``, what rounding leaves going to the last owner. If every owner is capped
    they share equally. (Masking Dir over all clients and renormalising is Dir over the owners, so only the owners'
    shares are drawn.)

    The search ends after the first 1,000 draws if the other attempts together would succeed with probability below 1 %,
    estimated from the number of clients that were too small in each (see `_log_acceptance`). A long search reports its
    progress.

    The shares of attempt after attempt come from one stream in order, so the result does not depend on how many
    attempts are drawn at a time.

    ``sizes``: int64 ``[classes]``, examples of each class.
    ``owners``: bool ``[clients, classes]``, which client may hold which class; every class has an owner.
    ``alpha``: Concentration of the Dirichlet distribution.
    ``min_size``: Examples that the smallest client must have.
    """
    clients, classes = owners.shape
    members = [np.flatnonzero(owners[:, label]) for label in range(classes)]
    stops = np.cumsum([len(member) for member in members])
    shares, ties = random_stream(seed, "shares"), random_stream(seed, "ties")
    largest = max(1, shares_at_a_time // int(stops[-1]))
    tried, batch, best = 0, 1, 0
    too_small: list[Integers] = []
    while tried < attempts:
        batch = min(batch, (attempts if tried >= _PROBE else min(attempts, _PROBE)) - tried)
        weights = shares.standard_gamma(alpha, (batch, int(stops[-1])))
        tie = ties.random((batch, classes))
        held = np.zeros((batch, clients))
        given = []
        for label, member in enumerate(members):
            chosen = slice(None) if len(member) == clients else member
            under = held[:, chosen] < cap
            part = _cut(weights[:, stops[label] - len(member) : stops[label]], under, tie[:, label], int(sizes[label]))
            held[:, chosen] += part
            given.append(part)
        smallest = held.min(axis=1)
        best = max(best, int(smallest.max()))
        accepted = np.flatnonzero(smallest >= min_size)
        if len(accepted):
            first = int(accepted[0])
            counts = np.zeros((clients, classes), np.int64)
            for label, member in enumerate(members):
                counts[member, label] = given[label][first]
            return Allocation(counts, tried + first + 1, int(smallest[first]))
        tried += batch
        progress.report("draws of a partition", tried, attempts)
        if tried <= _PROBE:
            too_small.append((held < min_size).sum(axis=1))
        if tried == _PROBE:
            counts_too_small = np.concatenate(too_small)
            if np.log(attempts) + _log_acceptance(counts_too_small) < np.log(_HOPELESS):
                return Allocation(None, tried, best, mean_too_small=float(counts_too_small.mean()))
        batch = min(2 * batch, largest)
    return Allocation(None, tried, best)


def _log_acceptance(too_small: Integers) -> float:
    """Estimate the logarithm of the probability that no client is too small, from draws of which none succeeded.

    The number of clients that are too small has about a binomial distribution of its mean m and variance v if v < m,
    Poisson's if they are equal, and a negative binomial one if v > m: no client is too small with probability
    (m / v) ** (m^2 / (v - m)), exp(-m) in the limit.

    ``too_small``: int64 ``[draws]``, how many clients were too small in each.
    """
    mean, variance = float(too_small.mean()), float(too_small.var())
    if variance == 0:
        return -float("inf")  # as many were too small in every draw
    if abs(variance - mean) < 1e-3 * mean:
        return -mean
    return mean * mean / (variance - mean) * float(np.log(mean / variance))


def _cut(weights: Floats, under: npt.NDArray[np.bool_], tie: Floats, size: int) -> Floats:
    """Return the number of examples of one class for each owner, whole numbers ``[attempts, owners]``.

    ``weights``: ``[attempts, owners]``, Gamma(alpha) draws; divided by their sum they are Dirichlet shares.
    ``under``: bool ``[attempts, owners]``, which owners are below the cap.
    ``tie``: ``[attempts]``, uniform draws for the case that all weights of owners below the cap are zero.
    """
    ends = np.cumsum(weights * under, axis=1)
    for attempt in np.flatnonzero(ends[:, -1] <= 0):
        open_ = np.flatnonzero(under[attempt])
        if len(open_) == 0:
            share = np.ones(weights.shape[1])
        else:
            # Small alpha can underflow to zero everywhere. The largest of the true draws then takes practically
            # everything, and which one that is, is uniform.
            share = np.zeros(weights.shape[1])
            share[open_[int(tie[attempt] * len(open_))]] = 1.0
        ends[attempt] = np.cumsum(share)
    # Dividing the running sums by the last of them makes the last exactly 1, so rounding never leaves an example over.
    cuts = np.floor(ends / ends[:, -1:] * size)
    return np.diff(cuts, axis=1, prepend=0.0)
