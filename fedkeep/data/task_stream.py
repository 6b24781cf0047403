"""Task streams: which classes arrive in which task, and which client holds which of their examples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedkeep._utils import seeds
from fedkeep.data.dataset import DataSet, select_rows
from fedkeep.data.partition import ByColumn, Partition, Scheme
from fedkeep.errors import ConfigError, DataError, PartitionError
from fedkeep.options import Options, option


@dataclass(frozen=True, eq=False)
class Task:
    """One task: its new classes are the labels ``num_old_classes`` to ``num_classes - 1``.

    ``partition``: Which client holds which rows of the stream's training set; a client may hold none.
    ``test``: int64 ``[m]``, the rows of the stream's test set whose class has arrived by now.
    """

    number: int
    num_old_classes: int
    num_classes: int
    partition: Partition
    test: Tensor

    def new_class_rows(self, labels: Tensor) -> Tensor:
        """Return the indices of the labels that belong to the task's new classes.

        ``labels``: int64 ``[n]``.
        Returns: int64 ``[m]``, on the CPU.
        """
        labels = labels.cpu()
        return ((labels >= self.num_old_classes) & (labels < self.num_classes)).nonzero().flatten()


@dataclass(frozen=True, eq=False)
class TaskStream:
    """A data set whose classes arrive in tasks. Tasks are row numbers: no training image is copied.

    ``dataset``: The data set, relabelled so that classes are numbered in order of arrival; those of no task come last.
    ``order``: ``order[c]`` is the label that class c had before.
    """

    dataset: DataSet
    order: tuple[int, ...]
    tasks: tuple[Task, ...]

    def dataset_of(self, number: int) -> DataSet:
        """Return the data set with the test images of the classes that have arrived by a task, counted from 1."""
        return replace(self.dataset, test=select_rows(self.dataset.test, self.tasks[number - 1].test))

    def manifest(self) -> list[dict[str, Any]]:
        """Return the description of each task for a run folder, as JSON types."""
        names = self.dataset.label_names
        return [
            {"classes": list(names[task.num_old_classes : task.num_classes]), "partition": task.partition.manifest()}
            for task in self.tasks
        ]


@dataclass(frozen=True)
class Tasks(Options):
    """How the classes of a data set arrive, as in TARGET (Zhang et al., 2023) and the papers that follow its protocol.

    Classes are put in an order and cut into tasks of equal size, and each task's examples are partitioned separately.
    Those papers' concentration b is ``dirichlet`` with alpha = b and min_size = 1, whose self-balancing is their rule
    that a client with its equal part gets no further class; their 0 is ``iid``. A scheme's ``min_size`` is for all
    tasks together: of each task, a client has at least the part of it that the task has of the arriving examples, and
    one.
    """

    num_tasks: int = option(1, "number of tasks", low=1)
    class_order: Literal["shuffled", "source"] | tuple[int, ...] = option(
        "shuffled",
        "order in which classes arrive: shuffled by the seed, the data set's own, or a list of their places from 0",
    )
    num_classes: int = option(0, "take only the first so many classes of the data set, before shuffling; 0: all", low=0)
    classes_per_task: tuple[int, ...] = option((), "number of classes in each task, where they are not equal", low=1)
    same_seed_each_task: bool = option(
        True, "partition every task with the run's own seed, so that clients' shares repeat, or with one of the task"
    )
    absent_clients: int = option(0, "clients, drawn anew for each task, that hold nothing of it", low=0)

    def check(self) -> None:
        """Raise `ConfigError` if options contradict each other."""
        if self.classes_per_task and len(self.classes_per_task) != self.num_tasks:
            raise ConfigError(
                f"tasks.classes_per_task gives {len(self.classes_per_task)} sizes for {self.num_tasks} tasks: give "
                "one for each."
            )
        if self.num_classes and not isinstance(self.class_order, str):
            raise ConfigError("tasks.class_order lists the classes already: leave tasks.num_classes out.")

    def stream(self, dataset: DataSet, scheme: Scheme, seed: int) -> TaskStream:
        """Return the tasks of a data set.

        ``dataset``: Its classes may stand in any order.
        ``scheme``: How each task's examples are assigned to clients. ``column`` is refused, since its clients would
            change with the task.
        """
        stream = self.split_classes(dataset, seed)
        _check_examples(stream)
        num_arriving = sum(len(task.new_class_rows(stream.dataset.train["label"])) for task in stream.tasks)
        tasks = (
            replace(task, partition=self._partition(stream.dataset, scheme, task, num_arriving, seed))
            for task in stream.tasks
        )
        return replace(stream, tasks=tuple(tasks))

    def split_classes(self, dataset: DataSet, seed: int) -> TaskStream:
        """Return which classes arrive in which task, with an empty partition of each task.

        It depends on the class names, the options and the seed alone, so that server and sites compute the same one.

        ``dataset``: A data set with the run's classes, whatever its examples.
        """
        arriving = self._arriving_labels(dataset, seed)
        order = (*arriving, *(c for c in range(dataset.num_classes) if c not in set(arriving)))
        relabelled = _relabel(dataset, order)
        tasks, old = [], 0
        for number, size in enumerate(self._task_sizes(len(arriving)), start=1):
            test = (relabelled.test["label"].cpu() < old + size).nonzero().flatten()
            tasks.append(Task(number, old, old + size, Partition.empty(), test))
            old += size
        return TaskStream(relabelled, order, tuple(tasks))

    def _arriving_labels(self, dataset: DataSet, seed: int) -> tuple[int, ...]:
        """Return the labels that arrive, in order."""
        have = dataset.num_classes
        if not isinstance(self.class_order, str):
            given = self.class_order
            if len(set(given)) < len(given) or not all(0 <= c < have for c in given) or not given:
                raise ConfigError(
                    f"tasks.class_order must list classes of {dataset.name}, each once, by their places from 0 to "
                    f"{have - 1}, not {list(given)}. 0 is {dataset.label_names[0]!r}."
                )
            return given
        count = self.num_classes or have
        if count > have:
            raise ConfigError(f"tasks.num_classes asks for {count} classes, and {dataset.name} has {have}.")
        if self.class_order == "source":
            return tuple(range(count))
        return tuple(torch.randperm(count, generator=seeds.rng(seed, "class order")).tolist())

    def _task_sizes(self, classes: int) -> tuple[int, ...]:
        """Return the number of classes of each task."""
        if self.num_tasks > classes:
            raise ConfigError(f"{classes} classes cannot arrive in {self.num_tasks} tasks: use at most {classes}.")
        if self.classes_per_task:
            if sum(self.classes_per_task) != classes:
                raise ConfigError(
                    f"tasks.classes_per_task has {sum(self.classes_per_task)} classes in all, and {classes} arrive. "
                    f"Change it, or {self._take(sum(self.classes_per_task))}."
                )
            return self.classes_per_task
        size, left = divmod(classes, self.num_tasks)
        if left:
            nearly = [size + (task < left) for task in range(self.num_tasks)]
            raise ConfigError(
                f"{classes} classes cannot be cut into {self.num_tasks} tasks of equal size. Set classes_per_task, "
                f"such as {nearly}, or {self._take(size * self.num_tasks)}."
            )
        return (size,) * self.num_tasks

    def _take(self, classes: int) -> str:
        """Say how to take so many classes."""
        given = not isinstance(self.class_order, str)
        return f"list {classes} in class_order" if given else f"set num_classes to {classes}"

    @property
    def sharing(self) -> str:
        """Whether a client's shares of the classes are the same in every task, in words; empty for one task."""
        if self.num_tasks == 1:
            return ""
        how = "repeat in every task" if self.same_seed_each_task else "are drawn anew for each task"
        return f"each client's shares of the new classes {how}"

    def _scheme_of_task(self, scheme: Scheme, examples: int, of_all: int) -> Scheme:
        """Return the scheme for the clients that are there, with the task's part of the smallest size."""
        present = replace(scheme, num_clients=scheme.num_clients - self.absent_clients)
        smallest = getattr(present, "min_size", None)
        if not isinstance(smallest, int):
            return present
        part = {"min_size": min(smallest, max(1, smallest * examples // of_all))}
        return replace(present, **part)

    def _partition(self, dataset: DataSet, scheme: Scheme, task: Task, num_arriving: int, seed: int) -> Partition:
        """Return the partition of one task, in row numbers of the whole training set and over all clients."""
        if isinstance(scheme, ByColumn):
            raise PartitionError(
                "tasks cannot be partitioned by column, nor by rows that are given: a value's client would change with "
                "the task. Take a scheme that draws each task's clients, such as Dirichlet(0.5, num_clients=10)."
            )
        if self.absent_clients >= scheme.num_clients:
            raise PartitionError(f"{self.absent_clients} of {scheme.num_clients} clients are absent: nobody is left.")
        rows = task.new_class_rows(dataset.train["label"])
        train = {name: c.cpu()[rows] for name, c in dataset.train.items() if name != "input"}
        train["label"] = train["label"] - task.num_old_classes
        own = seed if self.same_seed_each_task else seeds.derive(seed, "task partition", task=task.number)
        part = scheme
        try:
            part = self._scheme_of_task(scheme, len(rows), num_arriving)
            found = part.split(train, task.num_classes - task.num_old_classes, own)
        except PartitionError as error:
            whole, share = (getattr(one, "min_size", None) for one in (scheme, part))
            why = "" if whole == share else f" (min_size {share} is this task's part of min_size {whole})"
            raise PartitionError(f"task {task.number} of {self.num_tasks}: {error}{why}") from None
        who = torch.randperm(scheme.num_clients, generator=seeds.rng(seed, "absent clients", task=task.number))
        present = who[: len(found)].sort().values
        sizes = torch.zeros(scheme.num_clients, dtype=torch.int64).index_copy(0, present, found.sizes)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))
        return replace(found, rows=rows[found.rows], offsets=offsets)


def _relabel(dataset: DataSet, order: Sequence[int]) -> DataSet:
    """Return the data set with label ``order[c]`` as c; its images are the same tensors."""
    new = torch.tensor(order).argsort()
    train, test = (
        {**split, "label": new.to(split["label"].device)[split["label"]]} for split in (dataset.train, dataset.test)
    )
    return replace(dataset, train=train, test=test, label_names=tuple(dataset.label_names[c] for c in order))


def _check_examples(stream: TaskStream) -> None:
    dataset, names = stream.dataset, stream.dataset.label_names
    train, test = (
        torch.bincount(split["label"].cpu(), minlength=len(names)) for split in (dataset.train, dataset.test)
    )
    if empty := [names[c] for c in range(stream.tasks[-1].num_classes) if not train[c]]:
        raise DataError(
            f"{dataset.name} has no training example of {', '.join(map(repr, empty))}, which should arrive. Leave such "
            "classes out with class_order or num_classes."
        )
    first = names[: stream.tasks[0].num_classes]
    if not int(test[: len(first)].sum()):
        raise DataError(
            f"{dataset.name} has no test example of {', '.join(map(repr, first))}, the classes of the first task, so "
            "that it could not be evaluated. Let others arrive first (tasks.class_order), or give test examples."
        )
