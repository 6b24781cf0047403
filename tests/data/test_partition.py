"""Every scheme covers every row once, keeps its promises, follows its seed, and gives up with advice."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedkeep._utils.seeds import numpy_rng
from fedkeep.data.partition import (
    IID,
    ByColumn,
    Dirichlet,
    DirichletPerClient,
    ExDir,
    Hybrid,
    Partition,
    Scheme,
    Sharding,
    schemes,
)
from fedkeep.data.partition.base import Assignment, random_stream
from fedkeep.data.partition.dirichlet import _log_acceptance, allocate
from fedkeep.errors import ConfigError, PartitionError

few = settings(max_examples=20, deadline=None)


def balanced(examples: int, classes: int) -> dict[str, Tensor]:
    """Return a training set with equal classes, shuffled, and a writer column with groups of 7."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(1))
    return {"label": (torch.arange(examples) % classes)[order], "writer": torch.arange(examples) // 7 * 3}


def skewed(draw: st.DrawFn) -> tuple[dict[str, Tensor], int]:
    """Draw a training set with 2 to 12 classes of 60 to 300 examples."""
    sizes = draw(st.lists(st.integers(60, 300), min_size=2, max_size=12))
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return {"label": labels[order], "writer": torch.arange(len(labels)) % 41}, len(sizes)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Scheme, dict[str, Tensor], int]:
    """Draw a possible request for any scheme."""
    train, classes = skewed(draw)
    clients = draw(st.integers(1, 12))
    alpha = draw(st.floats(0.3, 100.0))
    name = draw(st.sampled_from(sorted(schemes())))
    if name == "iid":
        return IID(num_clients=clients), train, classes
    if name == "exdir":
        own = draw(st.integers(min(classes, 2 + classes // clients), classes))
        return ExDir(num_clients=clients, classes_per_client=own, alpha=alpha, min_size=1), train, classes
    if name == "dirichlet":
        cap = draw(st.booleans())
        return Dirichlet(num_clients=clients, alpha=alpha, min_size=3, self_balancing=cap), train, classes
    if name == "dirichlet-per-client":
        return DirichletPerClient(num_clients=clients, alpha=draw(st.floats(1e-3, 10.0))), train, classes
    if name == "shards":
        scheme = Sharding(num_clients=classes * draw(st.integers(1, 4)), shards_per_client=clients)
        return dataclasses.replace(scheme, distinct_classes=clients <= classes and draw(st.booleans())), train, classes
    if name == "hybrid":
        parts = draw(st.sampled_from([(1, 1), (1, 9), (0, 1), (1, 0), (3, 7)]))
        scheme_ = Hybrid(num_clients=clients, iid_parts=parts[0], non_iid_parts=parts[1], alpha=alpha, min_size=1)
        return dataclasses.replace(scheme_, dirichlet_per_client=draw(st.booleans())), train, classes
    return ByColumn(num_clients=draw(st.integers(0, 41)), column="writer"), train, classes


def check_cover(partition: Partition, examples: int) -> None:
    assert partition.rows.dtype == partition.offsets.dtype == torch.int64
    assert partition.offsets[0] == 0
    assert partition.offsets[-1] == len(partition.rows)
    assert torch.equal(partition.rows.sort().values, torch.arange(examples))
    assert torch.equal(torch.cat(list(partition)), partition.rows)


@few
@given(requests(), st.integers(0, 2**31))
def test_every_row_has_one_client(request_: tuple[Scheme, dict[str, Tensor], int], seed: int) -> None:
    scheme, train, classes = request_
    partition = scheme.split(train, classes, seed)
    check_cover(partition, len(train["label"]))
    assert len(partition) == (scheme.num_clients or 41)
    assert int(partition.sizes.min()) >= getattr(scheme, "min_size", 1)
    counts = partition.counts(train["label"], classes)
    assert torch.equal(counts.sum(1), partition.sizes)
    assert torch.equal(counts.sum(0), torch.bincount(train["label"], minlength=classes))


@few
@given(requests(), st.integers(0, 2**31))
def test_the_seed_alone_decides(request_: tuple[Scheme, dict[str, Tensor], int], seed: int) -> None:
    scheme, train, classes = request_
    first, second = scheme.split(train, classes, seed), scheme.split(train, classes, seed)
    assert first.hash == second.hash
    assert first.attempts == second.attempts
    if len(first) > 1 and not (isinstance(scheme, ByColumn) and scheme.num_clients == 0):
        assert scheme.split(train, classes, seed + 1).hash != first.hash


@few
@given(st.data(), st.integers(0, 2**31))
def test_exdir_gives_at_most_its_classes(data: st.DataObject, seed: int) -> None:
    clients, own = data.draw(st.integers(5, 40)), data.draw(st.integers(2, 10))
    train = balanced(4000, 10)
    partition = ExDir(num_clients=clients, classes_per_client=own, alpha=5.0).split(train, 10, seed)
    counts = partition.counts(train["label"], 10)
    assert int((counts > 0).sum(1).max()) <= own
    assert int(partition.sizes.min()) >= 10


@few
@given(st.integers(1, 30), st.integers(1, 10), st.booleans(), st.integers(0, 2**31))
def test_shards_are_near_equal(tens: int, shards: int, distinct: bool, seed: int) -> None:
    train = balanced(6007, 10)
    clients = 10 * tens
    partition = Sharding(num_clients=clients, shards_per_client=shards, distinct_classes=distinct).split(
        train, 10, seed
    )
    held = partition.counts(train["label"], 10)
    assert int((held > 0).sum(1).max()) <= shards
    if distinct:
        assert ((held > 0).sum(1) == shards).all()
    smallest = 600 // (shards * tens)
    assert int(partition.sizes.min()) >= shards * smallest
    assert int(partition.sizes.max()) <= shards * (smallest + 1)


def test_distinct_shards_are_uniform() -> None:
    """4 clients with 2 of 4 classes each: 90 deals, and in each a given pair of clients is as likely as any other."""
    train = balanced(16, 4)
    deals: dict[bytes, int] = {}
    for seed in range(720):
        held = (
            Sharding(num_clients=4, shards_per_client=2, distinct_classes=True)
            .split(train, 4, seed)
            .counts(train["label"], 4)
        )
        deals[(held > 0).numpy().tobytes()] = deals.get((held > 0).numpy().tobytes(), 0) + 1
    assert len(deals) == 90
    # Chi-square with 89 degrees of freedom: the 99.99 % point is 145.
    assert sum((count - 8) ** 2 / 8 for count in deals.values()) < 145


def literal_attempts(
    sizes: np.ndarray, owners: np.ndarray, alpha: float, least: int, seed: int
) -> tuple[np.ndarray, int]:
    """Return the accepted counts and the attempts as the published code draws them, one client at a time.

    In exact arithmetic: in floating point, shares can sum to a little less than one, and the published code then hands
    the example that is left to the last owner, even one at the cap.
    """
    gammas = numpy_rng(seed, "partition", use=1)
    clients, classes = owners.shape
    for attempt in range(1, 10_000):
        counts = np.zeros((clients, classes), np.int64)
        for label in range(classes):
            weights = [Fraction(0)] * clients
            for client in np.flatnonzero(owners[:, label]):
                weight = Fraction(gammas.standard_gamma(alpha))
                weights[client] = weight * int(counts[client].sum() < sizes.sum() / clients)
            shares = [weight / sum(weights) for weight in weights]
            cuts = np.array([math.floor(end * int(sizes[label])) for end in itertools.accumulate(shares)][:-1])
            cuts[np.flatnonzero(owners[:, label])[-1] :] = sizes[label]
            counts[:, label] = np.diff(cuts, prepend=0, append=sizes[label])
        if counts.sum(axis=1).min() >= least:
            return counts, attempt
    raise AssertionError


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("everyone", [True, False])
def test_allocation_is_the_published_loop(seed: int, everyone: bool) -> None:
    sizes = np.array([300, 200, 500, 250, 250])
    owners = np.random.default_rng(seed).random((20, 5)).argsort(axis=1) < (5 if everyone else 3)
    expected, attempts = literal_attempts(sizes, owners, 0.4, 6, seed)
    found = allocate(sizes, owners, alpha=0.4, cap=75.0, min_size=6, attempts=10_000, seed=seed)
    assert found.attempts == attempts
    assert found.counts is not None
    assert np.array_equal(found.counts, expected)


@pytest.mark.parametrize("batch", [1, 300, 4096, 1 << 20])
def test_how_many_shares_are_drawn_at_a_time_changes_nothing(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"alpha": 0.18, "cap": 50.0, "min_size": 10, "attempts": 2_000_000, "seed": 3}
    sizes, owners = np.full(10, 300), np.ones((60, 10), dtype=bool)
    expected = allocate(sizes, owners, **request)  # type: ignore[arg-type]
    monkeypatch.setattr("fedkeep.data.partition.dirichlet._BATCH", batch)
    found = allocate(sizes, owners, **request)  # type: ignore[arg-type]
    assert expected.attempts > 20
    assert found.attempts == expected.attempts
    assert found.counts is not None
    assert np.array_equal(found.counts, expected.counts)  # type: ignore[arg-type]


def test_capped_owners_share_equally() -> None:
    owners = np.array([[True, True], [True, True], [False, False]])
    found = allocate(np.array([10, 9]), owners, alpha=1e9, cap=4.0, min_size=0, attempts=1, seed=0)
    assert found.counts is not None
    assert found.counts.tolist() in ([[5, 4], [5, 5], [0, 0]], [[4, 4], [6, 5], [0, 0]])


def test_underflowing_shares_pick_one_owner_at_random() -> None:
    owners = np.ones((4, 1), dtype=bool)
    winners = set()
    for seed in range(40):
        found = allocate(np.array([50]), owners, alpha=1e-6, cap=99.0, min_size=0, attempts=1, seed=seed)
        assert found.counts is not None
        assert sorted(found.counts[:, 0]) == [0, 0, 0, 50]
        winners.add(int(found.counts.argmax()))
    assert winners == {0, 1, 2, 3}


@pytest.mark.parametrize("distribution", ["binomial", "poisson", "negative_binomial", "constant"])
def test_the_probability_of_acceptance_is_estimated_from_draws(distribution: str) -> None:
    """No client of 30 is too small, where each is with probability 0.3; as many on average, otherwise distributed."""
    rng = np.random.default_rng(0)
    draws, expected = {
        "binomial": (rng.binomial(30, 0.3, 100_000), 30 * np.log(0.7)),
        "poisson": (rng.poisson(9.0, 100_000), -9.0),
        "negative_binomial": (rng.negative_binomial(6, 0.4, 100_000), 6 * np.log(0.4)),
        "constant": (np.full(10, 9), -np.inf),
    }[distribution]
    assert _log_acceptance(draws) == pytest.approx(expected, rel=0.02)


def test_a_search_that_will_hardly_succeed_is_given_up() -> None:
    """The default scheme on the digits: two million draws took nine minutes, and none was acceptable."""
    labels = np.repeat(np.arange(10), [142, 146, 142, 146, 145, 145, 145, 143, 139, 144])
    with pytest.raises(PartitionError, match=r"out of 1000 .* clients were too small, so more attempts would not help"):
        Dirichlet(num_clients=100).split({"label": torch.from_numpy(labels)}, 10, seed=0)


def test_many_attempts_are_fast_enough_to_wait_for() -> None:
    train = balanced(50_000, 10)
    partition = Dirichlet(num_clients=100, alpha=0.05).split(train, 10, seed=1)
    assert partition.attempts > 10_000
    assert int(partition.sizes.min()) >= 10


def test_a_million_clients() -> None:
    train = {"label": torch.zeros(2_000_000, dtype=torch.int64)}
    partition = IID(num_clients=1_000_000).split(train, 1, 0)
    assert partition.manifest()["sizes"] == {"min": 2, "median": 2.0, "max": 2, "mean": 2.0, "std": 0.0}
    assert int(partition.counts(train["label"], 1).sum()) == 2_000_000


def test_iid_is_array_split_of_a_permutation() -> None:
    train = balanced(103, 10)
    partition = IID(num_clients=10).split(train, 10, 0)
    expected = np.array_split(numpy_rng(0, "partition").permutation(103), 10)
    for client, rows in enumerate(expected):
        assert partition[client].tolist() == rows.tolist()


def test_hybrid_mixes_like_and_unlike_clients() -> None:
    train = balanced(10_000, 10)
    scheme = Hybrid(num_clients=40, iid_parts=1, non_iid_parts=3, alpha=0.05, dirichlet_per_client=True)
    counts = scheme.split(train, 10, 0).counts(train["label"], 10).double()
    assert scheme.iid_clients == 10
    gini = 1 - (counts / counts.sum(1, keepdim=True)).square().sum(1)
    alike = gini > 0.87
    assert int(alike.sum()) == 10
    assert counts[alike].sum(0).tolist() == [250.0] * 10  # stratified
    assert alike[:10].sum() < 10  # the clients are shuffled


def test_columns_keep_groups_together_and_count_what_they_drop() -> None:
    train = balanced(700, 10)
    partition = ByColumn(num_clients=10, column="writer").split(train, 10, 0)
    groups = [set(train["writer"][rows].tolist()) for rows in partition]
    assert sum(map(len, groups)) == 100 == len(set.union(*groups))
    part = ByColumn(column="writer", num_clients=10, num_groups=30).split(train, 10, 0)
    assert part.dropped == part.manifest()["dropped"] == 490
    assert len(part.rows.unique()) == len(part.rows) == 210
    alone = ByColumn(column="writer").split(train, 10, 5)
    assert [int(train["writer"][rows].unique()) for rows in alone] == list(range(0, 300, 3))


def test_manifest_is_json_and_says_everything() -> None:
    train = balanced(1000, 10)
    scheme = ExDir(num_clients=20, classes_per_client=2, alpha=1.0, min_size=5)
    partition = scheme.split(train, 10, 7)
    manifest = json.loads(json.dumps(partition.manifest()))
    assert manifest["scheme"] == "exdir"
    assert manifest["settings"] == {
        "num_clients": 20,
        "classes_per_client": 2,
        "alpha": 1.0,
        "min_size": 5,
        "max_attempts": 100_000,
    }
    assert (manifest["seed"], manifest["clients"], manifest["rows"]) == (7, 20, 1000)
    assert manifest["hash"] == partition.hash
    assert len(partition.hash) == 64
    assert schemes()[manifest["scheme"]](**manifest["settings"]).split(train, 10, 7).hash == partition.hash


def test_clients_out_of_range() -> None:
    partition = IID(num_clients=3).split(balanced(9, 3), 3, 0)
    with pytest.raises(IndexError, match="no client 3"):
        partition[3]
    with pytest.raises(IndexError):
        partition[-1]


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (IID(num_clients=1001), "1001 clients cannot share 1000 examples"),
        (ExDir(num_clients=20, classes_per_client=11), "Set classes_per_client to at most 10"),
        (ExDir(num_clients=4, classes_per_client=2), "Set classes_per_client to at least 3"),
        (ExDir(num_clients=20, min_size=51), "Lower min_size to at most 50"),
        (
            ExDir(num_clients=10, classes_per_client=1, max_attempts=5),
            "out of 5 gave each of the 10 classes at least 1 owner",
        ),
        (Dirichlet(num_clients=101), "Lower min_size to at most 9"),
        (Hybrid(num_clients=101), "Lower min_size to at most 9"),
        (Hybrid(num_clients=10, iid_parts=0, non_iid_parts=0), "both 0"),
        (Sharding(num_clients=7, shards_per_client=3), "Make shards_per_client \\* num_clients a multiple of 10"),
        (Sharding(num_clients=20, shards_per_client=11, distinct_classes=True), "Set shards_per_client to at most 10"),
        (Sharding(num_clients=600, shards_per_client=2), "has 100 examples, too few for 120 shards"),
        (ByColumn(column="writter"), "no column 'writter'. Did you mean 'writer'"),
        (ByColumn(column="writer", num_clients=10, num_groups=144), "has 143 groups, not 144"),
        (ByColumn(column="writer", num_clients=144), "144 clients cannot share 143 groups"),
    ],
)
def test_impossible_requests_are_refused(scheme: Scheme, words: str) -> None:
    with pytest.raises(PartitionError, match=words) as caught:
        scheme.split(balanced(1000, 10), 10, 0)
    assert str(caught.value).startswith(f"{scheme.name}(num_clients={scheme.num_clients}")


@pytest.mark.parametrize(
    "scheme",
    [
        ExDir(num_clients=50, alpha=0.1, min_size=19, max_attempts=300),
        Dirichlet(num_clients=50, alpha=0.1, min_size=19, max_attempts=300),
        Hybrid(num_clients=50, alpha=0.1, min_size=19, max_attempts=300),
    ],
)
def test_attempts_are_bounded(scheme: Scheme) -> None:
    with pytest.raises(PartitionError) as caught:
        scheme.split(balanced(1000, 10), 10, 0)
    message = str(caught.value)
    for words in (scheme.name, "min_size=19", "out of 300", "smallest client had", "Lower min_size", "fewer clients"):
        assert words in message


def test_hopeless_requests_end_early() -> None:
    with pytest.raises(
        PartitionError, match=r"out of 1000 .* would not help\. Lower min_size, raise alpha, or use fewer clients\.$"
    ):
        Dirichlet(num_clients=1000, alpha=0.05).split(balanced(20_000, 10), 10, 0)


def test_bad_labels_and_options() -> None:
    with pytest.raises(PartitionError, match=r"0\.\.2"):
        IID(num_clients=2).split(balanced(40, 4), 3, 0)
    with pytest.raises(PartitionError, match="Did you mean 'labels'"):
        IID(num_clients=2).split({"labels": torch.zeros(4, dtype=torch.int64)}, 3, 0)
    with pytest.raises(PartitionError, match="shape"):
        IID(num_clients=2).split({"label": torch.zeros(4, 2, dtype=torch.int64)}, 3, 0)
    for build in (lambda: ExDir(alpha=0.0), lambda: IID(num_clients=0), lambda: Dirichlet(min_size=0)):
        with pytest.raises(ConfigError, match="at least"):
            build()


def test_every_scheme_is_listed_under_its_name() -> None:
    listed = {"iid", "exdir", "dirichlet", "dirichlet-per-client", "shards", "hybrid", "column"}
    own = {name for name, scheme in schemes().items() if scheme.__module__.startswith("fedkeep.")}
    assert own == listed
    assert all(scheme.name == name for name, scheme in schemes().items())


@dataclasses.dataclass(frozen=True)
class Mistaken(IID):
    """A scheme of a user, which is no partition."""

    def assign(self, labels: Any, num_classes: int, train: Any, seed: int) -> Assignment:
        return MISTAKES[self.num_clients](len(labels))


MISTAKES: dict[int, Any] = {
    1: lambda n: Assignment(np.arange(n), np.array([0, 5, n]), 1),
    2: lambda n: Assignment(np.zeros(n, np.int64), np.array([0, 5, n]), 1),
    3: lambda n: Assignment(np.arange(n), np.array([0, 5, 4, n]), 1),
    4: lambda n: Assignment(np.arange(n) + 1, np.array([0, 5, 6, 7, n]), 1),
    5: lambda n: Assignment(np.arange(n, dtype=np.int32), np.array([0, 5, 6, 7, 8, n]), 1),
}


@pytest.mark.parametrize(
    ("num_clients", "error"),
    [
        (1, "2 clients instead of 1"),
        (2, "row 0 to a client more than once"),
        (3, "do not rise"),
        (4, "outside"),
        (5, "int32"),
    ],
)
def test_a_scheme_that_returns_no_partition_is_named(num_clients: int, error: str) -> None:
    with pytest.raises(PartitionError, match=error):
        Mistaken(num_clients=num_clients).split(balanced(20, 2), 2, 0)


def test_a_purpose_that_does_not_exist_is_named() -> None:
    with pytest.raises(PartitionError, match=r"no random stream 'windows'.* rows, shares, ties, owners, order"):
        random_stream(0, "windows")
