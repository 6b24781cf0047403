"""Label skew by Dirichlet distributions: over clients, over classes, among owners of classes, beside IID clients."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedkeep._utils import progress
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
    sizes: Integers, owners: npt.NDArray[np.bool_], *, alpha: float, cap: float, min_size: int, attempts: int, seed: int
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
    largest = max(1, _BATCH // int(stops[-1]))
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


def _divide(
    scheme: Dirichlet | ExDir | Hybrid,
    sizes: Integers,
    owners: npt.NDArray[np.bool_],
    cap: float,
    seed: int,
    remedy: str,
) -> tuple[Integers, int]:
    """Return the client of each example in the order of `rows_by_class`, and the attempts; raise if none succeeded."""
    minimum = scheme.min_size
    found = allocate(
        sizes, owners, alpha=scheme.alpha, cap=cap, min_size=minimum, attempts=scheme.max_attempts, seed=seed
    )
    if found.counts is None:
        raise scheme.error(found.failure(minimum, remedy))
    return clients_by_class(found.counts), found.attempts


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
        cap = len(labels) / self.num_clients if self.self_balancing else np.inf
        owners = np.ones((self.num_clients, num_classes), dtype=bool)
        clients, attempts = _divide(self, np.bincount(labels, minlength=num_classes), owners, cap, seed, "raise alpha")
        return group_by_client(rows_by_class(labels, num_classes, seed), clients, self.num_clients, attempts)


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
    alpha: float = option(0.5, "concentration of the clients' classes: the smaller, the more they differ", low=1e-6)

    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients; see `Scheme.assign`."""
        quotas = even_sizes(len(labels), self.num_clients)
        clients = draw_clients(np.bincount(labels, minlength=num_classes), quotas, self.alpha, seed)
        return group_by_client(rows_by_class(labels, num_classes, seed), clients, self.num_clients)


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


@dataclass(frozen=True)
class ExDir(Scheme):
    """Draw which classes each client owns, then divide each class among its owners with shares from Dir(alpha).

    The paper's ExDir(C, alpha) is ``classes_per_client`` and ``alpha`` here. Ownership: ``classes_per_client`` distinct
    classes for each client, uniformly, redrawn as a whole until every class has at least ``max(floor(classes_per_client
    * num_clients / C) div 5, 1)`` owners. Shares: as `Dirichlet`, among the owners only and with the same cap
    of ``n / num_clients``, redrawn (not the ownership) until each client has ``min_size`` examples. If all owners of a
    class are at the cap they share it equally.

    A share may round to nothing, so a client holds *at most* ``classes_per_client`` classes.

    Reference: Li & Lyu, "Convergence Analysis of Sequential Federated Learning on Heterogeneous Data", NeurIPS 2023,
    and its code.
    """

    name: ClassVar[str] = "exdir"
    classes_per_client: int = option(2, "classes that each client owns", low=1)
    alpha: float = option(0.5, "concentration of the shares: the smaller, the more the clients' sizes differ", low=1e-6)
    min_size: int = option(10, "examples that each client has at least", low=1)
    max_attempts: int = option(100_000, "draws to try before giving up, of the ownership and of the shares", low=1)

    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients; see `Scheme.assign`."""
        self._check_request(len(labels), num_classes)
        owners, cap = self._draw_owners(num_classes, seed), len(labels) / self.num_clients
        remedy = "raise alpha or classes_per_client"
        clients, attempts = _divide(self, np.bincount(labels, minlength=num_classes), owners, cap, seed, remedy)
        return group_by_client(rows_by_class(labels, num_classes, seed), clients, self.num_clients, attempts)

    def _check_request(self, examples: int, num_classes: int) -> None:
        if self.classes_per_client > num_classes:
            raise self.error(
                f"a client cannot own {self.classes_per_client} classes of {num_classes}. Set classes_per_client to "
                f"at most {num_classes}."
            )
        if self.classes_per_client * self.num_clients < num_classes:
            raise self.error(
                f"{self.num_clients} clients with {self.classes_per_client} classes each cannot cover {num_classes} "
                "classes. "
                f"Set classes_per_client to at least {-(-num_classes // self.num_clients)}, or use more clients."
            )
        self.require_examples(examples, self.min_size)

    def _draw_owners(self, num_classes: int, seed: int) -> npt.NDArray[np.bool_]:
        """Return which client owns which class, bool ``[clients, num_classes]``; every class has enough owners."""
        least = max(self.classes_per_client * self.num_clients // num_classes // 5, 1)
        keys = random_stream(seed, "owners")
        for _ in range(self.max_attempts):
            drawn = keys.random((self.num_clients, num_classes))
            # The classes with the smallest of independent uniform keys are a uniform set of distinct classes.
            chosen = np.argpartition(drawn, self.classes_per_client - 1, axis=1)[:, : self.classes_per_client]
            owners = np.zeros(drawn.shape, dtype=bool)
            np.put_along_axis(owners, chosen, True, axis=1)
            if owners.sum(axis=0).min() >= least:
                return owners
        raise self.error(
            f"no draw of the ownership out of {self.max_attempts} gave each of the {num_classes} classes at least "
            f"{least} owner{'s' if least > 1 else ''}. Raise classes_per_client, use more clients, or allow more "
            "attempts."
        )


@dataclass(frozen=True)
class Hybrid(Scheme):
    """Mix IID and skewed clients in the proportion ``iid_parts : non_iid_parts``.

    The IID clients' part of the training set is drawn stratified by class and divided equally; the rest goes to the
    other clients by class-wise Dirichlet shares with the cap ``n / num_clients`` and ``min_size`` (or, with
    ``dirichlet_per_client``, in equal sizes from Dirichlet priors of the clients); then the clients are shuffled.

    The number of IID clients is ``num_clients * iid_parts / (iid_parts + non_iid_parts)``, rounded to the nearest.
    FedADKD's paper names the proportion and not the procedure; this one is ours.
    """

    name: ClassVar[str] = "hybrid"
    iid_parts: int = option(1, "parts of the clients that are IID", low=0)
    non_iid_parts: int = option(1, "parts of the clients that are skewed", low=0)
    alpha: float = option(0.05, "concentration of the skewed clients' Dirichlet shares", low=1e-6)
    dirichlet_per_client: bool = option(False, "skewed clients in equal sizes, each from its own Dirichlet prior")
    min_size: int = option(10, "examples that each client has at least", low=1)
    max_attempts: int = option(2_000_000, "draws to try before giving up", low=1)

    @property
    def iid_clients(self) -> int:
        """Number of IID clients."""
        return int(self.num_clients * self.iid_parts / (self.iid_parts + self.non_iid_parts) + 0.5)

    def assign(self, labels: Integers, num_classes: int, train: Mapping[str, Tensor], seed: int) -> Assignment:
        """Assign rows to clients; see `Scheme.assign`."""
        if self.iid_parts + self.non_iid_parts == 0:
            raise self.error(
                "iid_parts and non_iid_parts are both 0. Say in which proportion clients are IID, such as "
                "iid_parts=1, non_iid_parts=1."
            )
        self.require_examples(len(labels), self.min_size)
        sizes = np.bincount(labels, minlength=num_classes)
        # Rounding the running sum keeps each class within one example of its exact part, and the total too.
        running_sum = np.floor(np.cumsum(sizes) * self.iid_clients / self.num_clients + 0.5).astype(np.int64)
        iid_sizes = np.clip(np.diff(running_sum, prepend=np.int64(0)), 0, sizes)
        by_class = rows_by_class(labels, num_classes, seed)
        rank_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        is_iid = rank_in_class < np.repeat(iid_sizes, sizes)
        client_of = np.empty(len(labels), np.int64)
        attempts = 1
        order = random_stream(seed, "order")
        if self.iid_clients:
            pool = np.repeat(np.arange(self.iid_clients), even_sizes(int(iid_sizes.sum()), self.iid_clients))
            client_of[is_iid] = order.permutation(pool)
        if self.iid_clients < self.num_clients:
            skewed, attempts = self._assign_skewed(sizes - iid_sizes, len(labels) / self.num_clients, seed)
            client_of[~is_iid] = self.iid_clients + skewed
        return group_by_client(by_class, order.permutation(self.num_clients)[client_of], self.num_clients, attempts)

    def _assign_skewed(self, sizes: Integers, cap: float, seed: int) -> tuple[Integers, int]:
        """Return the client of each remaining example, counted from the first skewed one, and the attempts."""
        clients = self.num_clients - self.iid_clients
        if self.dirichlet_per_client:
            return draw_clients(sizes, even_sizes(int(sizes.sum()), clients), self.alpha, seed), 1
        return _divide(self, sizes, np.ones((clients, len(sizes)), dtype=bool), cap, seed, "raise alpha")
