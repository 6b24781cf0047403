"""Task streams: who has what when, by the papers' rules, with clear words where it cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedkeep.data import DataSet, Federation, Tasks, TaskStream
from fedkeep.data.partition import IID, ByColumn, Dirichlet, ExDir, Scheme
from fedkeep.errors import ConfigError, DataError, PartitionError
from fedkeep.options import as_table, build

CLASSES, EACH = 12, 40


def dataset(sizes: tuple[int, ...] = (EACH,) * CLASSES, tested: int = 5) -> DataSet:
    """Return images whose one pixel is their original label; rows shuffled."""

    def split(sizes: tuple[int, ...], seed: int) -> dict[str, Tensor]:
        label = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        label = label[torch.randperm(len(label), generator=torch.Generator().manual_seed(seed))]
        return {"input": label.to(torch.uint8)[:, None, None, None], "label": label, "writer": label % 3}

    names = tuple(f"class {c}" for c in range(len(sizes)))
    return DataSet("blocks", split(sizes, 0), split((tested,) * len(sizes), 1), names, (0.0,), (1.0,))


def dirichlet(clients: int = 5, alpha: float = 0.5) -> Dirichlet:
    return Dirichlet(num_clients=clients, alpha=alpha, min_size=1)


def counts(stream: TaskStream, number: int) -> Tensor:
    """Return examples by client and class, [clients, classes], counted from the clients' own data."""
    federation = Federation.from_stream(stream, number)
    rows = [torch.bincount(federation.data(c)["label"], minlength=CLASSES) for c in federation.clients]
    return torch.stack(rows)


def cuts(stream: TaskStream) -> list[tuple[int, int, int]]:
    return [(task.number, task.num_old_classes, task.num_classes) for task in stream.tasks]


# Classes and rows


@pytest.mark.parametrize(
    "scheme",
    [IID(num_clients=5), dirichlet(), ExDir(num_clients=5, classes_per_client=2, alpha=1.0)],
    ids=lambda s: s.name,
)
@pytest.mark.parametrize("order", ["shuffled", "source"])
def test_every_row_of_a_class_is_somebodys_in_its_task_and_only_then(scheme: Scheme, order: Any) -> None:
    stream = Tasks(num_tasks=4, class_order=order).stream(dataset(), scheme, 3)
    assert cuts(stream) == [(1, 0, 3), (2, 3, 6), (3, 6, 9), (4, 9, 12)]
    for task in stream.tasks:
        held = counts(stream, task.number)
        expected = torch.zeros(CLASSES, dtype=torch.int64)
        expected[task.num_old_classes : task.num_classes] = EACH
        assert torch.equal(held.sum(0), expected)
        assert int(held.sum(1).min()) >= 1
    rows = torch.cat([task.partition.rows for task in stream.tasks])
    assert torch.equal(rows.sort().values, torch.arange(CLASSES * EACH))


def test_labels_are_numbered_by_arrival_and_images_are_the_same_tensors() -> None:
    data = dataset()
    stream = Tasks(num_tasks=3).stream(data, IID(num_clients=4), 0)
    assert sorted(stream.order) == list(range(CLASSES))
    assert stream.order != tuple(range(CLASSES))
    for before, after in ((data.train, stream.dataset.train), (data.test, stream.dataset.test)):
        assert after["input"] is before["input"]
        assert torch.equal(torch.tensor(stream.order)[after["label"]], before["label"])
    assert stream.dataset.label_names == tuple(f"class {c}" for c in stream.order)
    first = Federation.from_stream(stream, 1).data("0")
    pixels = first["input"].flatten().long()
    assert torch.equal(torch.tensor(stream.order)[first["label"]], pixels)


def test_the_test_set_is_that_of_all_classes_seen() -> None:
    stream = Tasks(num_tasks=4).stream(dataset(), IID(num_clients=4), 0)
    labels = stream.dataset.test["label"]
    for task in stream.tasks:
        assert torch.equal(task.test, (labels < task.num_classes).nonzero().flatten())
        assert len(task.test) == 5 * task.num_classes
        federation = Federation.from_stream(stream, task.number)
        assert torch.equal(federation.dataset.test["label"], labels[task.test])
        assert torch.equal(federation.dataset.test["input"], stream.dataset.test["input"][task.test])
        assert federation.dataset.train["input"] is stream.dataset.train["input"]


def test_the_split_classes_depends_on_class_names_and_not_on_examples() -> None:
    whole = Tasks(num_tasks=3).stream(dataset(), IID(num_clients=2), 4)
    few = dataset()
    few = replace(few, train={name: column[:1] for name, column in few.train.items()})
    output = Tasks(num_tasks=3).split_classes(few, 4)
    assert output.order == whole.order
    assert cuts(output) == cuts(whole)
    assert all(torch.equal(one.test, other.test) for one, other in zip(output.tasks, whole.tasks, strict=True))
    assert not any(len(task.partition) for task in output.tasks), "nobody holds anything yet"


def test_a_given_order_and_the_first_classes_only() -> None:
    given_ = Tasks(num_tasks=2, class_order=(7, 2, 9, 4)).stream(dataset(), IID(num_clients=2), 0)
    assert given_.order[:4] == (7, 2, 9, 4)
    assert given_.dataset.label_names[:4] == ("class 7", "class 2", "class 9", "class 4")
    assert sorted(given_.order[4:]) == [0, 1, 3, 5, 6, 8, 10, 11]
    assert sum(len(task.partition.rows) for task in given_.tasks) == 4 * EACH
    assert len(given_.tasks[-1].test) == 4 * 5
    first = Tasks(num_tasks=3, num_classes=6).stream(dataset(), IID(num_clients=2), 0)
    assert sorted(first.order[:6]) == [0, 1, 2, 3, 4, 5]
    assert first.order[6:] == (6, 7, 8, 9, 10, 11)


def test_tasks_of_different_sizes() -> None:
    stream = Tasks(num_tasks=3, classes_per_task=(6, 4, 2), class_order="source").stream(dataset(), dirichlet(), 0)
    assert [(t.num_old_classes, t.num_classes) for t in stream.tasks] == [(0, 6), (6, 10), (10, 12)]


def test_one_task_is_the_plain_partition_of_the_whole_set() -> None:
    data = dataset()
    stream = Tasks(class_order="source").stream(data, dirichlet(), 4)
    assert stream.tasks[0].partition.hash == dirichlet().split(data.train, CLASSES, 4).hash


# The rules inside a task


def test_iid_clients_differ_by_one_example_at_most() -> None:
    stream = Tasks(num_tasks=4).stream(dataset((43,) * CLASSES), IID(num_clients=5), 0)
    for task in stream.tasks:
        sizes = task.partition.sizes
        assert int(sizes.max() - sizes.min()) <= 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.001, 0.1, 0.5, 5.0]), st.booleans())
def test_who_has_an_equal_part_gets_no_further_class(seed: int, alpha: float, reseed: bool) -> None:
    """Also with a concentration so small that all shares underflow. Classes are dealt in the order of their labels."""
    stream = Tasks(num_tasks=3, same_seed_each_task=reseed).stream(dataset(), dirichlet(3, alpha), seed)
    for task in stream.tasks:
        held = counts(stream, task.number)[:, task.num_old_classes : task.num_classes]
        assert int(held.sum(1).min()) >= 1
        before = held.cumsum(1) - held
        assert not held[before >= 4 * EACH / 3].any()


def test_shares_repeat_unless_each_task_has_a_seed_of_its_own() -> None:
    same, own = (Tasks(num_tasks=4, same_seed_each_task=r).stream(dataset(), dirichlet(), 1) for r in (True, False))

    def shares(stream: TaskStream) -> list[Tensor]:
        return [counts(stream, t.number)[:, t.num_old_classes : t.num_classes] for t in stream.tasks]

    assert all(torch.equal(task, shares(same)[0]) for task in shares(same))
    assert not any(torch.equal(task, shares(own)[0]) for task in shares(own)[1:])


def test_the_seed_alone_decides() -> None:
    tasks = Tasks(num_tasks=4, absent_clients=1)
    one, again, other = (tasks.stream(dataset(), dirichlet(), seed) for seed in (5, 5, 6))
    assert one.order == again.order != other.order
    assert [t.partition.hash for t in one.tasks] == [t.partition.hash for t in again.tasks]
    assert one.tasks[0].partition.hash != other.tasks[0].partition.hash


def test_some_clients_hold_nothing_of_a_task() -> None:
    stream = Tasks(num_tasks=4, absent_clients=2).stream(dataset(), dirichlet(), 0)
    idle = []
    for task in stream.tasks:
        sizes = task.partition.sizes
        assert len(task.partition) == 5
        assert int((sizes == 0).sum()) == 2
        assert int(sizes.sum()) == 3 * EACH
        idle.append(tuple((sizes == 0).nonzero().flatten().tolist()))
        federation = Federation.from_stream(stream, task.number)
        assert [federation.num_examples(str(c)) for c in range(5)] == sizes.tolist()
    assert len(set(idle)) > 1, "not always the same"


def test_the_manifest_names_classes_and_partitions() -> None:
    stream = Tasks(num_tasks=2, class_order="source").stream(dataset(), IID(num_clients=3), 0)
    manifest: list[Mapping[str, Any]] = json.loads(json.dumps(stream.manifest()))
    assert manifest[1]["classes"] == [f"class {c}" for c in range(6, 12)]
    assert manifest[1]["partition"]["hash"] == stream.tasks[1].partition.hash
    assert manifest[1]["partition"]["rows"] == 6 * EACH
    assert Federation.from_stream(stream, 2, {"input": torch.zeros(1)}).server_data.keys() == {"input"}


# What cannot be


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"num_tasks": 13}, "12 classes cannot arrive in 13 tasks: use at most 12"),
        (
            {"num_tasks": 5},
            r"12 classes cannot be cut into 5 tasks .* such as \[3, 3, 2, 2, 2\], or set num_classes to 10",
        ),
        ({"num_tasks": 2, "class_order": [0, 1, 2]}, r"such as \[2, 1\], or list 2 in class_order"),
        ({"num_tasks": 2, "classes_per_task": [6, 4]}, "10 classes in all, and 12 arrive"),
        ({"num_tasks": 2, "classes_per_task": [6, 4, 2]}, "3 sizes for 2 tasks"),
        ({"num_tasks": 2, "classes_per_task": [12, 0]}, "classes_per_task must be at least 1"),
        ({"num_classes": 13}, "asks for 13 classes, and blocks has 12"),
        ({"class_order": [0, 1, 1]}, r"each once, by their places from 0 to 11, not \[0, 1, 1\]"),
        ({"class_order": [0, 12]}, "by their places from 0 to 11"),
        ({"class_order": []}, "must list classes"),
        ({"class_order": [1, 2], "num_classes": 2}, "lists the classes already"),
        ({"class_order": "random"}, "class_order"),
        ({"num_tasks": 0}, "num_tasks must be at least 1"),
    ],
)
def test_errors_say_what_to_do(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Tasks, table, "[tasks]").stream(dataset(), IID(num_clients=2), 0)


def test_a_class_that_nobody_has_is_refused_unless_it_does_not_arrive() -> None:
    sizes = (EACH,) * 3 + (0,) + (EACH,) * 2
    with pytest.raises(DataError, match="no training example of 'class 3', which should arrive"):
        Tasks(num_tasks=2).stream(dataset(sizes), IID(num_clients=2), 0)
    stream = Tasks(num_tasks=5, class_order=(0, 1, 2, 4, 5)).stream(dataset(sizes), IID(num_clients=2), 0)
    assert stream.order == (0, 1, 2, 4, 5, 3)


def test_partitions_that_cannot_be_say_which_task() -> None:
    sizes = (EACH,) * 4 + (1, 1)
    with pytest.raises(PartitionError, match=r"task 3 of 3: iid\(num_clients=5\): 5 clients cannot share 2 examples"):
        Tasks(num_tasks=3, class_order="source").stream(dataset(sizes), IID(num_clients=5), 0)
    with pytest.raises(PartitionError, match="5 of 5 clients are absent"):
        Tasks(absent_clients=5).stream(dataset(), IID(num_clients=5), 0)
    with pytest.raises(PartitionError, match="cannot be partitioned by column"):
        Tasks().stream(dataset(), ByColumn("writer", num_clients=3), 0)


def test_options_go_into_a_recipe_and_back() -> None:
    tasks = Tasks(num_tasks=2, class_order=(3, 1, 2, 0), classes_per_task=(3, 1))
    assert build(Tasks, as_table(tasks), "[tasks]") == tasks
    assert build(Tasks, as_table(Tasks()), "[tasks]") == Tasks()


def test_the_smallest_size_is_for_the_classes_that_arrive_and_the_error_names_it() -> None:
    tasks = Tasks(num_tasks=2, num_classes=2, class_order="source")
    scheme = Dirichlet(num_clients=2, alpha=100.0, min_size=10)
    stream = tasks.stream(dataset(), scheme, 0)
    assert [task.partition.settings["min_size"] for task in stream.tasks] == [5, 5]
    with pytest.raises(PartitionError, match=r"min_size \d+ is this task's part of min_size 1000"):
        tasks.stream(dataset(), replace(scheme, min_size=1000), 0)


def test_a_first_task_that_nothing_tests_is_refused_by_name() -> None:
    data = dataset()
    kept = data.test["label"] >= 3
    data = replace(data, test={name: values[kept] for name, values in data.test.items()})
    with pytest.raises(DataError, match=r"no test example of 'class 0', 'class 1', 'class 2', the classes of"):
        Tasks(num_tasks=4, class_order="source").stream(data, IID(num_clients=5), 0)
    assert len(Tasks(num_tasks=3, class_order="source").stream(data, IID(num_clients=5), 0).tasks) == 3
