"""Label skew by client: clients of equal size, each with its own Dirichlet mixture of classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedkeep.data.partition.base import Deal, Integers, Scheme, even_sizes, grouped, rows_by_class, stream
from fedkeep.options import option

_CHUNK = 1 << 20  # table entries looked at together; the result does not depend on it


@dataclass(frozen=True)
class ClientwiseDirichlet(Scheme):
    """Give each client an equal part, its classes drawn from its own prior Dir(alpha).

    Priors ``p_i ~ Dir(alpha)`` over the classes; then, until all is dealt, a client drawn uniformly from those below
    their quota gets one example of a class drawn from ``p_i``, redrawn while that class is used up. Sizes differ by
    at most one.

    Reference: the code of Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021. The procedure
    here is the same in distribution, without its loop over examples.
    """

    name: ClassVar[str] = "dirichlet-per-client"
    alpha: float = option(
        0.5, "concentration of the clients' class mixtures: the smaller, the more they differ", low=1e-6
    )

    def deal(self, labels: Integers, classes: int, train: Mapping[str, Tensor], seed: int) -> Deal:
        """Return one draw; it needs no retries."""
        by_class = rows_by_class(labels, classes, seed)
        quotas = even_sizes(len(labels), self.clients)
        return grouped(
            by_class, draw_owners(np.bincount(labels, minlength=classes), quotas, self.alpha, seed), self.clients
        )


def draw_owners(sizes: Integers, quotas: Integers, alpha: float, seed: int) -> Integers:
    """Return the client of each example, int64 [sum], examples ordered by class.

    Parameters
    ----------
    sizes : int64 [classes], examples of each class.
    quotas : int64 [clients], examples that each client gets; the same sum as ``sizes``.
    alpha : concentration of the clients' priors.
    seed : the run's seed.
    """
    generator = stream(seed, "shares")
    shape = (len(quotas), len(sizes))
    # Gamma(a) is Gamma(a + 1) times U^(1/a): as logarithms, no prior underflows, so the rarest class can still be drawn
    # when nothing else is left.
    prior = np.log(generator.standard_gamma(alpha + 1.0, shape)) + np.log1p(-generator.random(shape)) / alpha
    clients = _turns(quotas, stream(seed, "order"))
    labels = _labels(clients, sizes, prior, generator)
    return clients[np.argsort(labels, kind="stable")]


def _turns(quotas: Integers, generator: np.random.Generator) -> Integers:
    """Return which client is served in each step, int64 [sum of quotas].

    Clients drawn uniformly among those with quota left are the order of arrivals of independent Poisson processes of
    one rate, each stopped at its quota.
    """
    steps = int(quotas.max())
    arrivals = generator.standard_exponential((len(quotas), steps)).cumsum(axis=1)
    wanted = np.arange(steps) < quotas[:, None]
    client = np.repeat(np.arange(len(quotas)), quotas)
    return client[np.argsort(arrivals[wanted], kind="stable")]


def _labels(
    clients: Integers, sizes: Integers, prior: npt.NDArray[np.float64], generator: np.random.Generator
) -> Integers:
    """Return the class drawn in each step, int64 [steps].

    All steps draw at once; where a class runs out, the later steps that drew it draw again among the classes that are
    left then. That is what redrawing step by step gives, since the other draws stay as they would have been.
    """
    classes = len(sizes)
    left, open_ = sizes.copy(), sizes > 0
    drawn = _draw(clients, prior, open_, generator)
    step = 0
    while step < len(clients):
        ahead = drawn[step:]
        order = np.argsort(ahead.astype(np.uint16) if classes <= 1 << 16 else ahead, kind="stable")
        found = np.bincount(ahead, minlength=classes)
        starts = np.cumsum(found) - found
        # As many steps as examples are left, so at least one open class is drawn to its end.
        ending = np.flatnonzero(open_ & (found >= left))
        ends = order[starts[ending] + left[ending] - 1]
        last = int(ends.min())
        label = int(ending[ends.argmin()])
        left -= np.bincount(ahead[: last + 1], minlength=classes)
        open_[label] = False
        step += last + 1
        again = step + np.flatnonzero(drawn[step:] == label)
        if len(again):
            drawn[again] = _draw(clients[again], prior, open_, generator)
    return drawn


def _draw(
    clients: Integers, prior: npt.NDArray[np.float64], open_: npt.NDArray[np.bool_], generator: np.random.Generator
) -> Integers:
    """Return one class for each step from its client's prior among the open classes, int64 [steps]."""
    log_share = np.where(open_, prior, -np.inf)
    share = np.exp(log_share - log_share.max(axis=1, keepdims=True))
    ends = np.cumsum(share, axis=1)
    ends /= ends[:, -1:]
    points = generator.random(len(clients))
    drawn = np.empty(len(clients), np.int64)
    size = max(1, _CHUNK // len(open_))
    for start in range(0, len(clients), size):
        part = slice(start, start + size)
        drawn[part] = (ends[clients[part]] <= points[part, None]).sum(axis=1)
    return drawn
