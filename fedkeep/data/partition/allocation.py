"""Class by class, cut the examples among the owners of the class in Dirichlet shares, until no client is too small.

The common part of ExDir and of the class-wise Dirichlet scheme. Attempts are drawn many at a time and on counts only;
rows are dealt after one is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedkeep.data.partition.base import Integers, stream

Floats = npt.NDArray[np.float64]

# About this many shares are drawn at a time: large enough to hide NumPy's cost per call, small enough for the cache.
_BATCH = 1 << 17
# After so many attempts a hopeless request is given up (see `allocate`).
_PROBE = 1000


@dataclass(frozen=True)
class Allocation:
    """How a search for acceptable counts ended.

    Attributes
    ----------
    counts : int64 [clients, classes], or None if no attempt was acceptable.
    attempts : how many draws were looked at, the accepted one included.
    best : examples of the smallest client in the best draw.
    hopeless : mean number of clients that were too small, if that is why the search ended early, else None.
    """

    counts: Integers | None
    attempts: int
    best: int
    hopeless: float | None = None

    def failure(self, min_size: int, change: str) -> str:
        """Return why nothing was accepted and what to do; ``change`` names the scheme's own remedy."""
        advice = [change, "use fewer clients"]
        if min_size > 1:
            advice.insert(0, f"lower min_size (to {self.best} or less)" if self.best else "lower min_size")
        odds = ""
        if self.hopeless is None:
            advice.append("allow more attempts")
        else:
            odds = f" On average {self.hopeless:.0f} clients were too small, so more attempts would not help."
        todo = f"{', '.join(advice[:-1])}, or {advice[-1]}."
        return (
            f"no draw out of {self.attempts} gave every client {min_size} example{'s' if min_size > 1 else ''}; "
            f"in the best one, the smallest client had {self.best}.{odds} {todo[0].upper()}{todo[1:]}"
        )


def allocate(
    sizes: Integers, owners: npt.NDArray[np.bool_], *, alpha: float, cap: float, min_size: int, attempts: int, seed: int
) -> Allocation:
    """Draw counts until every client has ``min_size`` examples; accept the first draw that does.

    In each attempt, for the classes in order: shares ``v ~ Dir(alpha)`` over the owners of the class; owners that
    already hold at least ``cap`` get zero (checked with the counts so far, so the cap can be overshot); renormalise;
    cut by ``floor(cumsum(v) * class size)``, what rounding leaves going to the last owner. If every owner is capped
    they share equally. (Masking Dir over all clients and renormalising is Dir over the owners, so only the owners'
    shares are drawn.)

    The number of clients that are too small is close to Poisson, so with a mean of ``m`` a draw is accepted with
    probability of about ``exp(-m)``. If after the first 1,000 draws ``m`` is above ``ln(attempts) + 20``, all the
    attempts together would succeed with probability below ``exp(-20)``, and the search ends there.

    The shares of attempt after attempt come from one stream in order, so the result does not depend on how many
    attempts are drawn at a time.

    Parameters
    ----------
    sizes : int64 [classes], examples of each class.
    owners : bool [clients, classes], who may hold what; every class has an owner.
    alpha : concentration of the Dirichlet distribution.
    cap : size from which a client gets nothing more.
    min_size : examples that the smallest client must have.
    attempts : how many draws are tried at most.
    seed : the run's seed.
    """
    clients, classes = owners.shape
    members = [np.flatnonzero(owners[:, label]) for label in range(classes)]
    stops = np.cumsum([len(member) for member in members])
    shares, ties = stream(seed, "shares"), stream(seed, "ties")
    largest = max(1, _BATCH // int(stops[-1]))
    tried, batch, best, short = 0, 1, 0, 0
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
        short += int((held < min_size).sum()) if tried <= _PROBE else 0
        if tried == _PROBE and short / _PROBE > np.log(attempts) + 20:
            return Allocation(None, tried, best, hopeless=short / _PROBE)
        batch = min(2 * batch, largest)
    return Allocation(None, tried, best)


def _cut(weights: Floats, under: npt.NDArray[np.bool_], tie: Floats, size: int) -> Floats:
    """Return how many examples of one class each owner gets, whole numbers [attempts, owners].

    Parameters
    ----------
    weights : [attempts, owners], Gamma(alpha) draws; divided by their sum they are Dirichlet shares.
    under : [attempts, owners], who is below the cap.
    tie : [attempts], uniform draws for the case that all weights that count are zero.
    size : examples of the class.
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
