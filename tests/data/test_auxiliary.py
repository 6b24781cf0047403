"""The server's auxiliary set: from where, how many, and what is left for the others (specification, 9.5 and 14 C10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

import fedkeep
from fedkeep.algorithms.parallel.fedavg import FedAvg
from fedkeep.algorithms.parallel.fedcad import FedCAD
from fedkeep.data import DataSet
from fedkeep.data.schema import GROUP
from fedkeep.data.server_data import Auxiliary
from fedkeep.errors import ConfigError, DataError
from fedkeep.experiment.build import build_federation, build_simulation
from fedkeep.experiment.recipe import Recipe, select_methods
from fedkeep.experiment.recipe_loader import load_recipe

SOURCES = ("train_holdout", "train_shared", "test_subset")
DRAWN = ("train_holdout", "test_subset")


def numbered(train: tuple[int, ...] = (20, 9, 14), test: tuple[int, ...] = (8, 11, 7)) -> DataSet:
    """Return a data set whose classes have so many images, in mixed order, each image known by its pixels and row."""

    def split(counts: tuple[int, ...], first: int) -> dict[str, Tensor]:
        labels = torch.tensor([c for c, count in enumerate(counts) for _ in range(count)])
        labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(first))]
        rows = torch.arange(first, first + len(labels))
        image = rows.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
        return {"input": image, "label": labels, "row": rows}

    return DataSet("numbered", split(train, 0), split(test, 100), ("a", "b", "c"), (0.5,), (0.3,))


def rows(data: Mapping[str, Tensor]) -> list[int]:
    """Return which images these are; every column must be of the same row."""
    assert torch.equal(data["input"][:, 0, 0, 0].long(), data["row"])
    return [int(row) for row in data["row"]]


def label_of(dataset: DataSet) -> dict[int, int]:
    return {
        row: label
        for data in (dataset.train, dataset.test)
        for row, label in zip(rows(data), data["label"].tolist(), strict=True)
    }


def test_nobody_is_tested_on_a_group_of_which_the_server_knows_a_part() -> None:
    whole = numbered()
    test = {**whole.test, GROUP: torch.arange(len(whole.test["label"])) // 3}
    whole = replace(whole, train={**whole.train, GROUP: torch.zeros_like(whole.train["label"])}, test=test)
    left, server = Auxiliary(images_per_class=1, source="test_subset").split(whole, 0)
    assert not set(left.test[GROUP].tolist()) & set(server[GROUP].tolist())
    one = replace(whole, test={**test, GROUP: torch.zeros_like(test[GROUP])})
    with pytest.raises(DataError, match="leaves none to test on"):
        Auxiliary(images_per_class=1, source="test_subset").split(one, 0)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("count", [1, 4, 6])
@pytest.mark.parametrize("source", SOURCES)
def test_a_class_gives_so_many(source: Any, count: int, seed: int) -> None:
    dataset = numbered()
    left, server = Auxiliary(images_per_class=count, source=source).split(dataset, seed)
    assert server["label"].tolist() == [c for c in range(3) for _ in range(count)], "sorted by class"
    labels = label_of(dataset)
    assert [labels[row] for row in rows(server)] == server["label"].tolist()
    assert len(set(rows(server))) == 3 * count
    taken = set(rows(server))
    own, other = (dataset.test, dataset.train) if source == "test_subset" else (dataset.train, dataset.test)
    assert taken <= set(rows(own))
    assert not taken & set(rows(other))
    removed = {"train_holdout": "train", "test_subset": "test", "train_shared": ""}[source]
    for split in ("train", "test"):
        before, after = getattr(dataset, split), getattr(left, split)
        kept = [row for row in rows(before) if split != removed or row not in taken]
        assert rows(after) == kept, "the others stay, in their order"
        assert [labels[row] for row in rows(after)] == after["label"].tolist()
    assert left.num_classes == 3
    assert left.mean == dataset.mean


def test_shared_images_are_the_first_of_each_class_in_file_order() -> None:
    dataset = numbered()
    labels = dataset.train["label"].tolist()
    first = [[row for row, label in enumerate(labels) if label == c][:5] for c in range(3)]
    for seed in (0, 1):
        _, server = Auxiliary(images_per_class=5, source="train_shared").split(dataset, seed)
        assert rows(server) == [row for own in first for row in own]


@pytest.mark.parametrize("source", DRAWN)
def test_the_seed_alone_decides(source: Any) -> None:
    auxiliary = Auxiliary(images_per_class=4, source=source)
    sampled = [rows(auxiliary.split(numbered(), seed)[1]) for seed in (0, 0, 1, 2)]
    torch.manual_seed(3)
    assert sampled[0] == sampled[1] == rows(auxiliary.split(numbered(), 0)[1])
    assert len({tuple(sorted(some)) for some in sampled}) == 3
    _, first = Auxiliary(images_per_class=4, source="train_shared").split(numbered(), 0)
    assert all(sorted(some) != sorted(rows(first)) for some in sampled), "drawn, not taken from the front"


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_class_that_is_too_small_is_an_error(source: Any, short: int) -> None:
    counts = [10, 10, 10]
    counts[short] = 3
    other = (30, 30, 30)
    dataset = numbered(other, tuple(counts)) if source == "test_subset" else numbered(tuple(counts), other)
    with pytest.raises(DataError, match="abc"[short]):
        Auxiliary(images_per_class=4, source=source).split(dataset, 0)
    Auxiliary(images_per_class=2, source=source).split(dataset, 0)


def test_none_by_default() -> None:
    dataset = numbered()
    left, server = Auxiliary().split(dataset, 0)
    assert not any(len(column) for column in server.values())
    assert rows(left.train) == rows(dataset.train)
    assert rows(left.test) == rows(dataset.test)


@pytest.mark.parametrize("source", SOURCES)
def test_the_given_data_set_is_not_changed(source: Any) -> None:
    dataset = numbered()
    before = rows(dataset.train), rows(dataset.test)
    Auxiliary(images_per_class=3, source=source).split(dataset, 0)
    assert (rows(dataset.train), rows(dataset.test)) == before


# In a recipe, on the digits


def recipe_with(tmp_path: Path, source: str = "train_holdout", per_class: int = 8, **changes: Any) -> Recipe:
    text = tiny.RECIPE + f'\n[auxiliary]\nimages_per_class = {per_class}\nsource = "{source}"\n'
    return replace(load_recipe(tiny.write_recipe(tmp_path, text)), **changes)


def pictures(data: Mapping[str, Tensor]) -> Counter[bytes]:
    """Count images with their labels."""
    return Counter(
        bytes(image.flatten().tolist()) + bytes([label])
        for image, label in zip(data["input"], data["label"].tolist(), strict=True)
    )


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_the_partition_covers_exactly_what_remains(source: str, seed: int, tmp_path: Path) -> None:
    digits = fedkeep.load("digits")
    federation = build_federation(recipe_with(tmp_path, source), seed)
    clients = Counter[bytes]()
    for client in federation.clients:
        clients += pictures(federation.data(client))
    server, train, test = pictures(federation.server_data), pictures(digits.train), pictures(digits.test)
    assert server.total() == 80
    assert torch.bincount(federation.server_data["label"]).tolist() == [8] * 10
    if source == "train_holdout":
        assert clients + server == train
        assert pictures(federation.dataset.test) == test
    elif source == "test_subset":
        assert clients == train
        assert pictures(federation.dataset.test) + server == test
    else:
        assert clients == train
        assert server <= train
        assert pictures(federation.dataset.test) == test


def test_a_shared_set_changes_no_partition(tmp_path: Path) -> None:
    plain = build_federation(load_recipe(tiny.write_recipe(tmp_path)), 0)
    shared = build_federation(recipe_with(tmp_path, "train_shared"), 0)
    assert torch.equal(plain.partition.rows, shared.partition.rows)
    assert torch.equal(plain.partition.offsets, shared.partition.offsets)


def test_a_test_subset_does_not_count_for_accuracy(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, "test_subset")
    run = fedkeep.run(recipe, methods=[FedAvg(), FedCAD()], rounds=1, out=tmp_path / "run")
    counted = torch.bincount(fedkeep.load("digits").test["label"]) - 8
    for trial in run.trials:
        assert list(trial.info["test_total"]) == counted.tolist()
        (record,) = trial.rounds
        assert all(hits <= total for hits, total in zip(record["correct"], counted.tolist(), strict=True))


def test_only_who_asks_for_the_set_learns_of_it(tmp_path: Path) -> None:
    """FedCAD's trust follows the set; with it in the recipe, other methods keep their cohorts and initial weights."""
    recipe = recipe_with(tmp_path)
    recipe = replace(recipe, methods=select_methods(recipe, [FedCAD(low=0.0, high=1.0), FedAvg()]))
    ends = {}
    for seed in (0, 1):
        federation = build_federation(recipe, 0)
        federation = replace(federation, server_data=build_federation(recipe, seed).server_data)
        for method in recipe.methods:
            simulation = build_simulation(recipe, method, 0, federation)
            simulation.run_round()
            ends[seed, method.label] = simulation.server.model
    assert tiny.equal(ends[0, "FedAvg"], ends[1, "FedAvg"])
    assert not tiny.equal(ends[0, "FedCAD"], ends[1, "FedCAD"])


def test_fedcad_without_a_set_is_refused_before_anything_runs(tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path))
    with pytest.raises(ConfigError, match="auxiliary"):
        fedkeep.run(recipe, methods=[FedCAD()], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_class_that_is_too_small_shows_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        fedkeep.run(recipe_with(tmp_path, "test_subset", 60), methods=[FedCAD()], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
