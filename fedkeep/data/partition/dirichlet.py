"""Label skew by Dirichlet distributions: over the clients for each class, or over the classes for each client."""

from __future__ import annotations

import heapq
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
    left = _LeftPriors(prior, sizes > 0)
    drawn = left.draw(clients, rng)
    steps_of = np.split(np.argsort(drawn, kind="stable"), np.cumsum(np.bincount(drawn, minlength=len(sizes)))[:-1])

    def end(label: int) -> int:
        """Return the step that draws the last example of a class, as the draws are now."""
        return int(steps_of[label][sizes[label] - 1])

    may_end = [(end(c), c) for c in range(len(sizes)) if 0 < sizes[c] <= len(steps_of[c])]
    heapq.heapify(may_end)
    while may_end:
        step, label = heapq.heappop(may_end)
        if not left.open[label] or step != end(label):
            continue  # further draws have brought its end forward
        left.close(label)
        again = steps_of[label][sizes[label] :]
        if not len(again):
            continue
        labels = left.draw(clients[again], rng)
        drawn[again] = labels
        order = np.argsort(labels, kind="stable")
        found, starts = np.unique(labels[order], return_index=True)
        for other, more in zip(found.tolist(), np.split(again[order], starts[1:]), strict=True):
            steps_of[other] = np.sort(np.concatenate((steps_of[other], more)), kind="stable")
            if len(steps_of[other]) >= sizes[other]:
                heapq.heappush(may_end, (end(other), other))
    return drawn


class _LeftPriors:
    """The clients' priors among the classes of which examples are left."""

    def __init__(self, prior: npt.NDArray[np.float64], is_open: npt.NDArray[np.bool_]) -> None:
        self.open = is_open
        self._log_share = np.where(is_open, prior, -np.inf)
        self._highest = self._log_share.max(axis=1)
        self._share = np.exp(self._log_share - self._highest[:, None])
        self._stale = np.zeros(len(prior), dtype=bool)  # the highest share of these clients is gone

    def close(self, label: int) -> None:
        """Take a class out."""
        self.open[label] = False
        self._stale |= self._log_share[:, label] == self._highest
        self._log_share[:, label] = -np.inf
        self._share[:, label] = 0.0

    def draw(self, clients: Integers, rng: np.random.Generator) -> Integers:
        """Return one class for each step from its client's prior, int64 [steps]."""
        points = rng.random(len(clients))
        drawn = np.empty(len(clients), np.int64)
        order = np.argsort(clients, kind="stable")
        users, starts = np.unique(clients[order], return_index=True)
        if len(stale := users[self._stale[users]]):
            self._highest[stale] = self._log_share[stale].max(axis=1)
            self._share[stale] = np.exp(self._log_share[stale] - self._highest[stale, None])
            self._stale[stale] = False
        for client, steps in zip(users.tolist(), np.split(order, starts[1:]), strict=True):
            ends = np.cumsum(self._share[client])
            ends /= ends[-1]
            drawn[steps] = np.searchsorted(ends, points[steps], side="right")
        return drawn
