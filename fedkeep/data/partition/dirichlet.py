"""Label skew by Dirichlet distributions: over the clients for each class, or over the classes for each client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedkeep.data.partition.allocation import allocate
from fedkeep.data.partition.base import (
    Assignment,
    Integers,
    Scheme,
    clients_by_class,
    even_sizes,
    group_by_client,
    random_stream,
    rows_by_class,
)
from fedkeep.options import option

_CHUNK = 1 << 20  # table entries looked at together; the result does not depend on it


@dataclass(frozen=True)
class Dirichlet(Scheme):
    """Divide each class among all clients with shares from Dir(alpha) (LDA).

    A client that already holds its equal part ``n / clients`` gets nothing of the later classes (it may overshoot
    with the class that takes it there), and everything is redrawn until each client has ``min_size`` examples.

    References: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019; the cap and
    the minimum as in the code of Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022, and of FedNTD.

    Small ``alpha`` with few classes takes many attempts: about 27,000 for CIFAR-10, 100 clients and alpha 0.05.
    """

    name: ClassVar[str] = "dirichlet"
    alpha: float = option(0.5, "concentration of the shares: the smaller, the more the clients differ", low=1e-6)
    min_size: int = option(10, "examples that each client has at least", low=1)
    self_balancing: bool = option(True, "give nothing more to clients that hold their equal part already")
    max_attempts: int = option(2_000_000, "draws to try before giving up", low=1)

    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients; see `Scheme.assign`."""
        self.require_examples(len(labels), self.min_size)
        found = allocate(
            np.bincount(labels, minlength=num_classes),
            np.ones((self.num_clients, num_classes), dtype=bool),
            alpha=self.alpha,
            cap=len(labels) / self.num_clients if self.self_balancing else np.inf,
            min_size=self.min_size,
            attempts=self.max_attempts,
            seed=seed,
        )
        if found.counts is None:
            raise self.error(found.failure(self.min_size, "raise alpha"))
        return group_by_client(
            rows_by_class(labels, num_classes, seed), clients_by_class(found.counts), self.num_clients, found.attempts
        )


@dataclass(frozen=True)
class DirichletPerClient(Scheme):
    """Give each client an equal part, its classes drawn from its own prior Dir(alpha).

    Priors ``p_i ~ Dir(alpha)`` over the classes; then, until no example is left, a client drawn uniformly from those
    below their quota gets one example of a class drawn from ``p_i``, redrawn while that class is used up. Sizes differ
    by at most one.

    Reference: the code of Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021. The procedure
    here is the same in distribution, without its loop over examples.
    """

    name: ClassVar[str] = "dirichlet-per-client"
    alpha: float = option(
        0.5, "concentration of the clients' class mixtures: the smaller, the more they differ", low=1e-6
    )

    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients; see `Scheme.assign`."""
        by_class = rows_by_class(labels, num_classes, seed)
        quotas = even_sizes(len(labels), self.num_clients)
        return group_by_client(
            by_class,
            draw_clients(np.bincount(labels, minlength=num_classes), quotas, self.alpha, seed),
            self.num_clients,
        )


def draw_clients(sizes: Integers, quotas: Integers, alpha: float, seed: int) -> Integers:
    """Draw the client of each example.

    ``sizes``: int64 ``[classes]``, examples of each class.
    ``quotas``: int64 ``[clients]``, examples that each client gets; the same sum as ``sizes``.
    Returns: int64 ``[sum]``, the clients of the examples in the order of their classes.
    """
    rng = random_stream(seed, "shares")
    shape = (len(quotas), len(sizes))
    # Gamma(a) is Gamma(a + 1) times U^(1/a): as logarithms, no prior underflows, so the rarest class can still be drawn
    # when nothing else is left.
    prior = np.log(rng.standard_gamma(alpha + 1.0, shape)) + np.log1p(-rng.random(shape)) / alpha
    clients = _client_of_step(quotas, random_stream(seed, "order"))
    labels = _draw_labels(clients, sizes, prior, rng)
    return clients[np.argsort(labels, kind="stable")]


def _client_of_step(quotas: Integers, rng: np.random.Generator) -> Integers:
    """Return which client draws in each step, int64 [sum of quotas].

    Clients drawn uniformly among those with quota left are the order of arrivals of independent Poisson processes of
    one rate, each stopped at its quota.
    """
    steps = int(quotas.max())
    arrivals = rng.standard_exponential((len(quotas), steps)).cumsum(axis=1)
    wanted = np.arange(steps) < quotas[:, None]
    client = np.repeat(np.arange(len(quotas)), quotas)
    return client[np.argsort(arrivals[wanted], kind="stable")]


def _draw_labels(
    clients: Integers, sizes: Integers, prior: npt.NDArray[np.float64], rng: np.random.Generator
) -> Integers:
    """Return the class drawn in each step, int64 [steps].

    All steps draw at once; where a class runs out, the later steps that drew it draw again among the classes that are
    left then. That is what redrawing step by step gives, since the other draws stay as they would have been.
    """
    classes = len(sizes)
    left, open_ = sizes.copy(), sizes > 0
    drawn = _draw_from_priors(clients, prior, open_, rng)
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
            drawn[again] = _draw_from_priors(clients[again], prior, open_, rng)
    return drawn


def _draw_from_priors(
    clients: Integers, prior: npt.NDArray[np.float64], open_: npt.NDArray[np.bool_], rng: np.random.Generator
) -> Integers:
    """Return one class for each step from its client's prior among the open classes, int64 [steps]."""
    log_share = np.where(open_, prior, -np.inf)
    share = np.exp(log_share - log_share.max(axis=1, keepdims=True))
    ends = np.cumsum(share, axis=1)
    ends /= ends[:, -1:]
    points = rng.random(len(clients))
    drawn = np.empty(len(clients), np.int64)
    size = max(1, _CHUNK // len(open_))
    for start in range(0, len(clients), size):
        part = slice(start, start + size)
        drawn[part] = (ends[clients[part]] <= points[part, None]).sum(axis=1)
    return drawn
