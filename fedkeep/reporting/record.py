"""What a run recorded of one trial: its data as they were read, and what follows about tasks and costs.

Also whether the trial has learned anything, and what to change where it has not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep import metrics
from fedkeep.metrics import Floats
from fedkeep.rounds.messages import FaultKind


@dataclass(frozen=True)
class LostClient:
    """A client that did not finish a round, and why; ``kind`` is that of a fault with a kind of its own."""

    round: int
    client: str
    reason: str
    kind: str = ""


@dataclass(frozen=True)
class Window:
    """The rounds at the end over which tables average.

    ``share``: As `fedkeep.metrics.window_rounds` takes it.
    ``turn``: The rounds in a whole turn of the methods that are compared; 1 where none takes turns.
    ``memory``: The rounds on which an evaluation depends: 1 / (1 - decay) of a moving average over rounds, 0 of other
        models.
    """

    share: float = 0.5
    turn: int = 1
    memory: float = 0.0


@dataclass(frozen=True)
class Record:
    """One method with one seed: what was configured, and one record per finished round.

    Accuracies and forgetting are fractions; a value that was never measured is NaN.

    ``label``: The name of the method in tables.
    ``rounds``, ``timings``: One entry a round, as in rounds.jsonl and timings.jsonl.
    ``partition``: As in partition.json.
    ``info``: As in trial.json.
    ``finished``: Whether the trial came to its end.
    ``path``: The trial's folder, or its place in an archive.
    ``ledger``: One entry for each round in which something left with noise, as in privacy.jsonl, which no resume cuts
        back; empty of other trials, and of old records.
    ``confusions``: As in confusion.json, a row for each true class; empty of other models than the first, and of old
        records.
    """

    label: str
    rounds: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    partition: Mapping[str, Any]
    info: Mapping[str, Any]
    finished: bool
    path: Path | None = None
    window: Window = field(default_factory=Window)
    confusions: tuple[tuple[int, ...], ...] = ()
    ledger: Sequence[Mapping[str, Any]] = ()

    @property
    def algorithm(self) -> str:
        """Return the name under which the method is registered."""
        return str(self.info["algorithm"])

    @property
    def options(self) -> Mapping[str, Any]:
        """Return the method's options."""
        return self.info.get("options") or {}

    @property
    def seed(self) -> int:
        """Return the trial's seed."""
        return int(self.info["seed"])

    @property
    def sequential(self) -> bool:
        """Return whether the clients of a round trained one after another."""
        # Kept archives have a schedule instead.
        return bool(self.info.get("sequential", self.info.get("schedule") == "sequential"))

    @property
    def rounds_done(self) -> int:
        """Return how many rounds are on record."""
        return len(self.rounds)

    @property
    def rounds_planned(self) -> int:
        """Return how many rounds were asked for; of a trial that a callback ended, how many there were."""
        if self.finished and not self.task_sizes:
            return len(self.rounds)
        return int(self.info.get("rounds", len(self.rounds)))

    @property
    def task_sizes(self) -> list[int]:
        """Return how many classes arrived with each task; empty without tasks, and with a single one."""
        sizes = [int(size) for size in self.info.get("tasks", [])]
        return sizes if len(sizes) > 1 else []  # one task is only a choice of classes: nothing arrives later

    @property
    def task_rounds(self) -> int:
        """Return how many rounds a task has; without tasks, how many there are."""
        return self.rounds_planned // max(len(self.task_sizes), 1)

    @property
    def window_rounds(self) -> tuple[int, int]:
        """Return the first and the last round over which tables average; with tasks, of each task."""
        return metrics.window_rounds(max(self.task_rounds, 1), self.window.share, self.window.turn)

    @cached_property
    def windows(self) -> list[range]:
        """Return these rounds for each task, counted over the whole run; empty until all rounds are on record.

        A mean over a part of a window would go by the name of the whole.
        """
        if self.rounds_done < self.rounds_planned:
            return []
        first, last = self.window_rounds
        starts = [task * self.task_rounds for task in range(max(len(self.task_sizes), 1))]
        return [range(start + first, start + last + 1) for start in starts]

    @property
    def generator(self) -> str:
        """Return which generator of images it used, and what that had seen; empty without one."""
        return str(self.info.get("generator", ""))

    @property
    def extractor(self) -> str:
        """Return which pre-trained extractors its networks have, and what these had seen; empty without one."""
        return str(self.info.get("extractor", ""))

    @property
    def initial_model(self) -> str:
        """Return how the model was made from which its rounds began; empty where that was the network's own."""
        return str((self.info.get("initial_model") or {}).get("made_by", ""))

    @property
    def initial_accuracy(self) -> float:
        """Return the accuracy of that model, on the test examples of the first task; NaN where there is none."""
        made = self.info.get("initial_model") or {}
        return metrics.accuracy(made["correct"], made["total"]) if made.get("correct") else float("nan")

    @property
    def versions(self) -> tuple[str, ...]:
        """Return the versions of FedKeep that ran its rounds; several where another one resumed it.

        Old records name none. At real sites it is the server's.
        """
        return tuple(map(str, self.info.get("versions", ())))

    @property
    def lost(self) -> list[LostClient]:
        """Return every client that was lost, in order of rounds."""
        return [
            LostClient(int(row["round"]), str(client), str(reason), str(row.get("faults", {}).get(client, "")))
            for row in self.rounds
            for client, reason in (row.get("lost") or {}).items()
        ]

    @property
    def refused(self) -> list[tuple[int, str]]:
        """Return the round and the client of every reply that was refused; such a client is also lost."""
        return [(int(row["round"]), str(client)) for row in self.rounds for client in row.get("refused") or ()]

    @property
    def rolled_back(self) -> list[int]:
        """Return the rounds that were rolled back because too few clients answered."""
        return [int(row["round"]) for row in self.rounds if row.get("rolled_back")]

    def accuracy_by_class(self, row: Mapping[str, Any]) -> Floats:
        """Return the class-wise accuracy of an evaluated round or local model, float64 [C]."""
        return metrics.class_accuracy(*self.counted(row))

    def counted(self, row: Mapping[str, Any]) -> tuple[Floats, Floats]:
        """Return correct and all test examples by class, both float64 [C]; 0 for classes that had not arrived."""
        missing = len(self.test_total) - len(row["correct"])
        correct = np.asarray([*row["correct"], *[0] * missing], dtype=np.float64)
        if "total" in row:  # of the clients that tested
            return correct, np.asarray([*row["total"], *[0] * missing], dtype=np.float64)
        return correct, np.where(np.arange(len(correct)) < len(row["correct"]), self.test_total, 0.0)

    @cached_property
    def test_total(self) -> Floats:
        """Return the test examples by class, float64 [C]; of sites, the most that told in a round."""
        total = np.asarray(self.info.get("test_total", []), dtype=np.float64)
        told = [row["total"] for row in self.rounds if "total" in row]
        if told and not total.any():
            total = np.max([[*of, *[0] * (len(total) - len(of))] for of in told], axis=0).astype(np.float64)
        return total

    def data_read(self) -> DataRead:
        """Return what was read for the trial."""
        return data_read({**self.info, "test_total": self.test_total.tolist()}, self.partition)

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Return the records of the rounds that were evaluated."""
        return [row for row in self.rounds if row.get("correct") is not None]


@dataclass(frozen=True)
class TaskMetrics(Record):
    """Measures of class-incremental learning; NaN without tasks."""

    @cached_property
    def task_matrix(self) -> Floats:
        """Return accuracies by task after each task that is finished, float64 [T, T]."""
        ends = [row for row in self.evaluations if self.task_sizes and row["round"] % self.task_rounds == 0]
        sizes = self.task_sizes[: len(ends)]
        if not sizes:
            return np.zeros((0, 0))
        counts = [self.counted(row) for row in ends]
        correct = [
            (right * self.test_total / np.maximum(of, 1) if "total" in row else right)[: sum(sizes)]
            for row, (right, of) in zip(ends, counts, strict=True)
        ]
        return metrics.task_accuracies(correct, self.test_total[: sum(sizes)], sizes)

    @cached_property
    def window_incrementals(self) -> dict[int, float]:
        """Return, for each round of a task's window that was evaluated in all tasks, the mean accuracy over tasks.

        Of each task it is the mean over the tasks so far, as in `incremental`, which has it after the last round only.
        """
        rows = {row["round"]: row for row in self.evaluations}
        windows = self.windows if self.task_sizes else []
        found = {}
        for place, numbers in enumerate(zip(*windows, strict=True)):
            if all(number in rows for number in numbers):
                means = [self._mean_over_tasks(rows[number], task) for task, number in enumerate(numbers, start=1)]
                found[windows[0][place]] = float(np.mean(means))
        return found

    def _mean_over_tasks(self, row: Mapping[str, Any], tasks: int) -> float:
        """Return the accuracy of an evaluation, all tasks so far counting alike."""
        sizes = self.task_sizes[:tasks]
        starts = np.cumsum([0, *sizes])[:-1]
        correct, total = (np.add.reduceat(counts[: sum(sizes)], starts) for counts in self.counted(row))
        return float(metrics.class_accuracy(correct, total).mean())

    @property
    def window_incremental(self) -> float:
        """Return the mean accuracy over tasks, over the rounds of each task's window."""
        return mean_of(self.window_incrementals.values())

    @property
    def task_accuracy(self) -> float:
        """Return A_T, the mean over tasks of the accuracy after the last task that is finished."""
        return self._of_tasks(lambda matrix: float(metrics.accuracy_after(matrix)[-1]))

    @property
    def incremental(self) -> float:
        """Return the average incremental accuracy, the mean of A_t over the tasks that are finished."""
        return self._of_tasks(metrics.average_incremental_accuracy)

    @property
    def forgetting_chaudhry(self) -> float:
        """Return how far each old task fell from its best, on average, after the last finished task."""
        return self._of_tasks(metrics.FORGETTING["chaudhry"])

    @property
    def forgetting_chaudhry_mean(self) -> float:
        """Return the mean of that over all finished tasks but the first."""
        return self._of_tasks(metrics.FORGETTING["chaudhry_mean"])

    @property
    def forgetting_fedskf(self) -> float:
        """Return how much old tasks lose with each new one, on average (FedSKF's definition, as we read it)."""
        return self._of_tasks(metrics.FORGETTING["fedskf"])

    @property
    def backward(self) -> float:
        """Return how much better old tasks are after the last finished task than right after their own, on average."""
        return self._of_tasks(metrics.backward_transfer)

    def _of_tasks(self, measure: Callable[[Floats], float]) -> float:
        """Return a measure of the finished tasks; NaN without any."""
        return measure(self.task_matrix) if len(self.task_matrix) else float("nan")


@dataclass(frozen=True)
class CostMetrics(Record):
    """Measures of time and traffic."""

    @property
    def train_seconds(self) -> float:
        """Return the seconds spent in local training, teachers included, over all rounds and clients."""
        return self.seconds("train") + self.seconds("teachers")

    def seconds(self, part: str) -> float:
        """Return the seconds of one part of the timings (``"train"``, ``"evaluate"``, ...) over all rounds."""
        return float(sum(row.get(part) or 0.0 for row in self.timings)) if self.timings else float("nan")

    @property
    def down(self) -> float:
        """Return the mean bytes that a client receives in a round in which it is asked.

        What a task begins and ends with is shared out over these rounds.
        """
        return self._per_client("down")

    @property
    def up(self) -> float:
        """Return the mean bytes that a client sends in such a round; lost clients count as asked."""
        return self._per_client("up")

    @property
    def traffic(self) -> int:
        """Return all bytes, both ways, of all rounds."""
        return int(sum((row.get("down") or 0) + (row.get("up") or 0) for row in self.rounds))

    def _per_client(self, way: str) -> float:
        asked = sum(len(row.get("cohort", ())) for row in self.rounds)
        return sum(row.get(way) or 0 for row in self.rounds) / asked if asked else float("nan")


def mean_of(values: Iterable[float]) -> float:
    """Return the mean of values; NaN if there are none."""
    known = list(values)
    return float(np.mean(known)) if known else float("nan")


NOT_KNOWN = "?"
"""Stands for a number that was not recorded."""
_INPUTS = {"uint8": "images of {}", "int64": "{} token ids", "float32": "numbers of {}"}


@dataclass(frozen=True)
class DataRead:
    """Numbers of examples, as a trial's description and its partition have them.

    ``classes``: Of each class its name, its examples at clients (None: not recorded) and its test examples.
    ``clients``: Of each client its name and its examples; empty if they are not recorded.
    """

    inputs: str
    classes: Sequence[tuple[str, int | None, int]]
    clients: Sequence[tuple[str, int]]
    num_clients: int
    note: str

    def facts(self, shown: int = 200) -> list[tuple[str, str]]:
        """Return it in a few words each; of long lists the first entries."""
        sizes = [size for _, size in self.clients]
        held = f"{sum(sizes):,} at " if sizes else ""
        each = f" ({min(sizes):,} to {max(sizes):,} each)" if sizes else ""
        of_classes = (f"{name} {NOT_KNOWN if train is None else train} + {test}" for name, train, test in self.classes)
        total = sum(test for _, _, test in self.classes)
        return [
            ("inputs", self.inputs),
            ("examples", f"{held}{self.num_clients} clients{each} for training, {total:,} for testing"),
            ("classes, training + testing", _listed(of_classes, shown)),
            ("clients", _listed((f"{name}: {size}" for name, size in self.clients), shown)),
            ("noted", self.note),
        ]


def data_read(info: Mapping[str, Any], partition: Mapping[str, Any]) -> DataRead:
    """Return what was read for a trial; earlier versions recorded less."""
    test = list(map(int, info.get("test_total") or []))
    names = list(map(str, info.get("label_names") or []))
    names = names if len(names) == len(test) else list(map(str, range(len(test))))
    counts = np.asarray(partition.get("counts") or np.zeros((0, len(test))), dtype=np.int64)
    train: list[int | None] = [*map(int, counts.sum(0))] if len(counts) else [None] * len(test)
    clients = partition.get("client_names") or range(len(counts))
    about = info.get("input") or {}
    features, shape = about.get("features") or [], " x ".join(map(str, about.get("shape") or []))
    inputs = _INPUTS.get(str(about.get("type")), "{}").format(shape) if shape else ""
    return DataRead(
        f"{len(features)} features: {_listed(features, 30)}" if features else inputs,
        list(zip(names, train, test, strict=True)),
        [(str(name), int(size)) for name, size in zip(clients, counts.sum(1), strict=False)],
        int(info.get("num_clients") or len(counts)),
        str(info.get("dataset_note") or ""),
    )


def _listed(words: Iterable[object], shown: int) -> str:
    every = list(map(str, words))
    return ", ".join(every[:shown]) + (f" and {len(every) - shown:,} more" if len(every) > shown else "")


@dataclass(frozen=True)
class LearningMetrics(Record):
    """Whether the model is better than guessing, and whether local training stayed finite."""

    @cached_property
    def last_quarter(self) -> list[dict[str, Any]]:
        """Return the last quarter of the evaluations, at least one if there is any; with tasks, of the last task."""
        known = [row for row in self.evaluations if row.get("task", 1) == self.evaluations[-1].get("task", 1)]
        return known[len(known) - -(-len(known) // 4) :]

    @property
    def chance(self) -> float:
        """Return the accuracy of always predicting the commonest class at the last evaluation; NaN without any."""
        return metrics.chance_accuracy(self.counted(self.evaluations[-1])[1]) if self.evaluations else math.nan

    @property
    def recent_accuracy(self) -> float:
        """Return the mean accuracy over `last_quarter`; NaN without any."""
        values = [metrics.accuracy(*self.counted(row)) for row in self.last_quarter]
        return float(np.mean(values)) if values else math.nan

    @cached_property
    def at_chance(self) -> bool:
        """Tell whether the model guesses over `last_quarter` (`fedkeep.metrics.is_at_chance`)."""
        if not self.evaluations:
            return False
        counts = [self.counted(row)[0] for row in self.last_quarter]
        total = self.counted(self.evaluations[-1])[1]
        ranks = [(row.get("scores") or {}).get("auroc") for row in self.last_quarter]
        if ranks and None not in ranks and np.mean(np.asarray(ranks, dtype=np.float64)) > metrics.chance_auroc(total):
            return False  # a rare class may never have the highest logit
        return metrics.is_at_chance(np.mean(counts, axis=0), total)

    @property
    def not_finite(self) -> int:
        """Return how many local trainings ended in numbers that are not finite."""
        return sum(lost.kind == FaultKind.NOT_FINITE for lost in self.lost)

    @property
    def too_large(self) -> int:
        """Return how many updates were refused since no training that goes well moves a model so far."""
        return sum(lost.kind == FaultKind.TOO_LARGE for lost in self.lost)

    @property
    def learned(self) -> bool:
        """Tell whether the model is finite and better than guessing.

        Without any evaluation nothing speaks against it.
        """
        losses = [row.get("test_loss", 0.0) for row in self.last_quarter]
        # One that was not finite is null in a record; earlier versions wrote NaN.
        return not self.at_chance and all(loss is not None and math.isfinite(loss) for loss in losses)

    @property
    def trouble(self) -> str:
        """Say in a few words why there is nothing to compare; empty where the trial has learned."""
        if self.learned:
            return ""
        return "at chance" if self.at_chance else "test loss not finite"


def warnings(trials: Sequence[LearningMetrics], settings: Mapping[str, Any]) -> list[str]:
    """Say which methods have not learned, or lost local trainings that were not finite, and what to change.

    ``trials``: Finished or not; one that is in its first quarter is left out, as any may still be at chance there.
    ``settings``: The recipe; its learning rate and its clipping are named.
    Returns: A sentence or two for each kind of trouble.
    """
    begun = [trial for trial in trials if 4 * trial.rounds_done >= trial.rounds_planned]
    stuck = [trial for trial in begun if not trial.learned]
    unstable = [trial for trial in trials if trial.not_finite]
    too_far = [trial for trial in stuck if trial.too_large]
    said = []
    if stuck:
        first = stuck[0]
        guess = f"{100 * first.recent_accuracy:.1f} % where guessing gives {100 * first.chance:.1f} %"
        said.append(
            f"{_named(stuck)} did not learn: accuracy is at chance ({guess}), and so is its mean over classes. What "
            "such a method forgets says nothing, and it is compared with no other."
        )
    for found, ended in (
        (unstable, "ended in numbers that are not finite"),
        (too_far, "ended too far from where they began, and were refused"),
    ):
        if found:
            lost = sum(trial.not_finite if found is unstable else trial.too_large for trial in found)
            asked = sum(len(row.get("cohort", ())) for trial in found for row in trial.rounds)
            said.append(f"{lost:,} of {asked:,} local trainings of {_named(found)} {ended}.")
    if unstable or too_far:
        rate, clip = _change(settings, "lr", 0.1), _change(settings, "max_grad_norm", 0.1)
        said.append(f"Local training diverges. Lower the learning rate, {rate}, or clip gradients, {clip}.")
    elif stuck:
        rates = _change(settings, "lr", 10, 0.1)
        said.append(f"Give it more rounds (--rounds), or change the learning rate, {rates}.")
    return said


def _named(trials: Sequence[Record]) -> str:
    """Return the labels of trials, each with its seeds."""
    seeds: dict[str, list[int]] = {}
    for trial in trials:
        seeds.setdefault(trial.label, []).append(trial.seed)
    return ", ".join(
        f"{label} (seed{'s' * (len(numbers) > 1)} {', '.join(map(str, dict.fromkeys(numbers)))})"
        for label, numbers in seeds.items()
    )


def _change(settings: Mapping[str, Any], option: str, *factors: float) -> str:
    """Say how to change an option of local training: to multiples of what it is, if that is known."""
    value = settings.get("training", {}).get(option)
    if not isinstance(value, int | float):
        return f"--set training.{option}=1" if option == "max_grad_norm" else f"--set training.{option}"
    return f"--set training.{option}={' or '.join(f'{value * factor:g}' for factor in factors)} (it is {value:g})"
