"""Partitions look as published: numbers from simulations of the published algorithms, and flwr-datasets' own."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeep.data.partition import IID, Dirichlet, DirichletPerClient, ExDir, Hybrid, Scheme, Sharding
from fedkeep.data.partition.base import size_statistics


def partition_statistics(counts: Any) -> dict[str, float]:
    """Return statistics of the examples of each client and class; means over the clients that hold anything."""
    table = np.asarray(counts, dtype=np.float64)
    sizes = table.sum(axis=1)
    held = table[sizes > 0]
    share = held / held.sum(axis=1, keepdims=True)
    # 0 ln 0 is 0: the logarithm of an absent class is taken of 1 instead.
    entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)
    return {
        "clients": len(table),
        **{f"size_{name}": value for name, value in size_statistics(sizes).items()},
        "classes_per_client": float((held > 0).sum(axis=1).mean()),
        "gini_impurity": float((1.0 - (share**2).sum(axis=1)).mean()),
        "label_entropy": float(entropy.mean()),
    }


def balanced(examples: int, classes: int) -> dict[str, Tensor]:
    return {"label": torch.arange(examples) % classes}


def averages(scheme: Scheme, train: dict[str, Tensor], classes: int, seeds: int) -> dict[str, float]:
    """Return the mean of each statistic, and of the attempts, over seeds."""
    rows = []
    for seed in range(seeds):
        partition = scheme.split(train, classes, seed)
        rows.append({**partition_statistics(partition.counts(train["label"], classes)), "attempts": partition.attempts})
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def test_statistics_by_hand() -> None:
    found = partition_statistics(np.array([[4, 0], [2, 2], [0, 0]]))
    assert found == pytest.approx(
        {
            "clients": 3,
            "size_min": 0,
            "size_median": 4.0,
            "size_max": 4,
            "size_mean": 8 / 3,
            "size_std": math.sqrt(32 / 9),
            "classes_per_client": 1.5,
            "gini_impurity": 0.25,
            "label_entropy": math.log(2) / 2,
        }
    )
    assert partition_statistics(torch.tensor([[1, 1]]))["gini_impurity"] == 0.5


@pytest.mark.parametrize(
    ("alpha", "held", "spread"), [(0.5, 1.78, 435), (1.0, 1.85, 320), (10.0, 1.99, 125), (100.0, 2.0, 80)]
)
def test_exdir_on_cifar10(alpha: float, held: float, spread: float) -> None:
    found = averages(ExDir(num_clients=100, classes_per_client=2, alpha=alpha), balanced(50_000, 10), 10, 20)
    assert found["classes_per_client"] == pytest.approx(held, abs=0.03)
    assert found["size_std"] == pytest.approx(spread, rel=0.15)
    if alpha == 0.5:
        assert 2 < found["attempts"] < 12
        assert found["size_max"] > 1200


def test_exdir_on_cifar100() -> None:
    found = averages(ExDir(num_clients=100, classes_per_client=20, alpha=1.0), balanced(50_000, 100), 100, 5)
    assert found["classes_per_client"] == pytest.approx(18, abs=0.3)
    assert found["size_min"] == pytest.approx(290, abs=50)
    assert found["size_max"] == pytest.approx(750, abs=80)


HAM10000 = [262, 411, 879, 92, 890, 5364, 114]  # 80 % of the counts


def test_exdir_on_few_unequal_classes() -> None:
    train = {"label": torch.repeat_interleave(torch.arange(7), torch.tensor(HAM10000))}
    found = averages(ExDir(num_clients=100, classes_per_client=2, alpha=1.0, min_size=1), train, 7, 10)
    assert found["attempts"] < 5
    with pytest.raises(ValueError, match=r"Lower min_size \(to [3-7] or less\)"):
        ExDir(num_clients=100, classes_per_client=2, alpha=1.0, max_attempts=500).split(train, 7, 0)


@pytest.mark.parametrize(
    ("alpha", "classes", "held", "gini", "seeds"),
    [
        pytest.param(0.05, 10, 2.9, 0.26, 3, marks=pytest.mark.slow),  # hundreds of attempts
        (0.1, 10, 4.2, 0.39, 10),
        (0.5, 10, 8.1, 0.71, 10),
        (0.05, 100, 20, 0.81, 5),
    ],
)
def test_classwise_dirichlet(alpha: float, classes: int, held: float, gini: float, seeds: int) -> None:
    found = averages(Dirichlet(num_clients=100, alpha=alpha), balanced(50_000, classes), classes, seeds)
    assert found["classes_per_client"] == pytest.approx(held, rel=0.06)
    assert found["gini_impurity"] == pytest.approx(gini, abs=0.025)
    if alpha == 0.1:
        assert 1.5 < found["attempts"] < 12


def test_sharding_on_cifar() -> None:
    train = balanced(50_000, 10)
    counts = Sharding(num_clients=100, shards_per_client=2).split(train, 10, 0).counts(train["label"], 10)
    assert set(counts.unique().tolist()) <= {0, 250, 500}
    assert ((counts / 250).sum(0) == 20).all()
    pure = [
        (Sharding(num_clients=100, shards_per_client=2).split(train, 10, seed).counts(train["label"], 10) > 0).sum(1)
        == 1
        for seed in range(20)
    ]
    # The second of a client's shards is of the first one's class in 19 of the 199 that are left: about 10 %.
    assert torch.cat(pure).double().mean().item() == pytest.approx(19 / 199, abs=0.02)
    train = balanced(50_000, 100)
    counts = Sharding(num_clients=100, shards_per_client=5).split(train, 100, 0).counts(train["label"], 100)
    assert ((counts / 100).sum(0) == 5).all()
    assert (counts % 100 == 0).all()


@pytest.mark.parametrize(("parts", "attempts"), [((1, 1), 105), ((3, 7), 960)])
def test_hybrid_attempts(parts: tuple[int, int], attempts: float) -> None:
    """70 skewed clients of 100 take about 960 attempts, and 50 about 105."""
    scheme = Hybrid(num_clients=100, iid_parts=parts[0], non_iid_parts=parts[1], alpha=0.05)
    found = averages(scheme, balanced(50_000, 10), 10, 12)
    assert attempts / 3 < found["attempts"] < attempts * 4


def clientwise_loop(train: Tensor, classes: int, clients: int, alpha: float, seed: int) -> np.ndarray:
    """Return counts dealt example by example, as the published code does."""
    random = np.random.default_rng(seed)
    ends = random.dirichlet([alpha] * classes, clients).cumsum(axis=1)
    left = np.bincount(train, minlength=classes)
    quota = np.full(clients, len(train) // clients)
    counts = np.zeros((clients, classes), np.int64)
    while quota.sum():
        client = random.integers(clients)
        if quota[client] == 0:
            continue
        quota[client] -= 1
        label = (ends[client] <= random.random() * ends[client, -1]).sum()
        while left[label] == 0:
            label = (ends[client] <= random.random() * ends[client, -1]).sum()
        left[label] -= 1
        counts[client, label] += 1
    return counts


def test_clientwise_dirichlet_is_the_published_loop_in_distribution() -> None:
    """Unequal classes, so that some run out early and redrawing matters (for small alpha their loop hardly ends)."""
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([20, 60, 100, 220]))
    names = ("classes_per_client", "gini_impurity", "label_entropy")
    theirs = [partition_statistics(clientwise_loop(labels, 4, 10, 2.0, seed)) for seed in range(60)]
    ours = averages(DirichletPerClient(num_clients=10, alpha=2.0), {"label": labels}, 4, 200)
    for name in names:
        values = np.array([row[name] for row in theirs])
        assert ours[name] == pytest.approx(values.mean(), abs=4 * values.std() / math.sqrt(60))


def test_clientwise_dirichlet_is_not_classwise() -> None:
    found = averages(DirichletPerClient(num_clients=100, alpha=0.1), balanced(50_000, 10), 10, 3)
    assert found["size_min"] == found["size_max"] == 500


# --- the same schemes in flwr-datasets ---


def theirs(partitioner: Any, train: dict[str, Tensor], classes: int) -> dict[str, float]:
    """Return the statistics of one of flwr-datasets' partitioners."""
    datasets = pytest.importorskip("datasets")
    labels = train["label"].numpy()
    # Their IID takes slices as they come; the classes of this set already alternate.
    partitioner.dataset = datasets.Dataset.from_dict({"label": labels, "row": np.arange(len(labels))})
    counts = np.zeros((partitioner.num_partitions, classes), np.int64)
    for client in range(partitioner.num_partitions):
        rows = np.asarray(partitioner.load_partition(client).with_format("numpy")["row"][:])
        counts[client] = np.bincount(labels[rows], minlength=classes)
    return partition_statistics(counts)


def compare(scheme: Scheme, partitioners: list[Any], tolerances: dict[str, float]) -> None:
    """Compare the means over seeds: relative tolerance for each statistic."""
    train = balanced(10_000, 10)
    ours = averages(scheme, train, 10, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they warn at every attempt
        rows = [theirs(partitioner, train, 10) for partitioner in partitioners]
    for name, tolerance in tolerances.items():
        assert ours[name] == pytest.approx(np.mean([row[name] for row in rows]), rel=tolerance), name


def test_iid_as_in_flower() -> None:
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    exact = dict.fromkeys(("size_min", "size_median", "size_max", "size_std"), 1e-9)
    compare(IID(num_clients=30), [partitioner.IidPartitioner(num_partitions=30)], exact | {"classes_per_client": 0.001})


@pytest.mark.parametrize(
    ("self_balancing", "alpha"),
    [(True, 0.3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, 0.3), (True, 1.0), (False, 1.0)))],
)
def test_dirichlet_as_in_flower(self_balancing: bool, alpha: float) -> None:
    """They cap above the equal part instead of at it, which is practically never different."""
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    compare(
        Dirichlet(num_clients=20, alpha=alpha, self_balancing=self_balancing),
        [
            partitioner.DirichletPartitioner(
                num_partitions=20, partition_by="label", alpha=alpha, self_balancing=self_balancing, seed=seed
            )
            for seed in range(6)
        ],
        {"classes_per_client": 0.03, "gini_impurity": 0.06, "label_entropy": 0.05, "size_std": 0.2},
    )


def test_shards_as_in_flower() -> None:
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    compare(
        Sharding(num_clients=50, shards_per_client=4),
        [
            partitioner.ShardPartitioner(
                num_partitions=50, partition_by="label", num_shards_per_partition=4, shard_size=50, seed=seed
            )
            for seed in range(3)
        ],
        {"classes_per_client": 0.02, "gini_impurity": 0.02, "label_entropy": 0.02, "size_min": 1e-9, "size_max": 1e-9},
    )


def test_distinct_shards_have_the_classes_of_flowers_pathological() -> None:
    """Their class sizes differ from ours (owners of a class share it, however many there are); the classes do not."""
    partitioner = pytest.importorskip("flwr_datasets.partitioner")
    pathological = partitioner.PathologicalPartitioner(
        num_partitions=50, partition_by="label", num_classes_per_partition=2, class_assignment_mode="random", seed=0
    )
    scheme = Sharding(num_clients=50, shards_per_client=2, distinct_classes=True)
    compare(scheme, [pathological], {"classes_per_client": 1e-9})
