"""One method with one seed, as a run recorded it: its accuracies, forgetting, times and traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep import metrics

TAIL = 10
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Lost:
    """A client that did not finish a round, and why."""

    round: int
    client: str
    reason: str


@dataclass(frozen=True)
class Cell:
    """One method with one seed: what was configured, and one record per finished round.

    Accuracies and forgetting are fractions; a value that was never measured is NaN.
    """

    label: str
    algorithm: str
    options: Mapping[str, Any]
    seed: int
    schedule: str
    rounds: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    partition: Mapping[str, Any]
    info: Mapping[str, Any]
    finished: bool
    path: Path | None = None

    @property
    def rounds_done(self) -> int:
        """Return how many rounds are on record."""
        return len(self.rounds)

    @property
    def rounds_planned(self) -> int:
        """Return how many rounds were asked for."""
        return int(self.info.get("rounds", len(self.rounds)))

    @cached_property
    def _evaluations(self) -> list[dict[str, Any]]:
        return [row for row in self.rounds if row.get("correct") is not None]

    @cached_property
    def _test_total(self) -> Floats:
        return np.asarray(self.info.get("test_total", []), dtype=np.float64)

    def _counts(self, row: Mapping[str, Any]) -> tuple[Floats, Floats]:
        """Return correct and all test examples by class, both float64 [C]; 0 for classes that had not arrived."""
        missing = len(self._test_total) - len(row["correct"])
        correct = np.asarray([*row["correct"], *[0] * missing], dtype=np.float64)
        return correct, np.where(np.arange(len(correct)) < len(row["correct"]), self._test_total, 0.0)

    def accuracy_by_class(self, row: Mapping[str, Any]) -> Floats:
        """Return the class-wise accuracy of an evaluated round or visit, float64 [C]."""
        return metrics.class_accuracy(*self._counts(row))

    @property
    def generator(self) -> str:
        """Return which generator made images for it, and what that had seen; empty without one."""
        return str(self.info.get("generator", ""))

    @property
    def extractor(self) -> str:
        """Return which pre-trained extractors its networks have, and what these had seen; empty without one."""
        return str(self.info.get("extractor", ""))

    @property
    def task_sizes(self) -> list[int]:
        """Return how many classes arrived with each task; empty without tasks."""
        return [int(size) for size in self.info.get("tasks", [])]

    @cached_property
    def task_matrix(self) -> Floats:
        """Return accuracies by task after each task that is finished, float64 [T, T] (see `fedkeep.metrics.tasks`)."""
        rounds = self.rounds_planned // max(len(self.task_sizes), 1)
        ends = [row for row in self._evaluations if self.task_sizes and row["round"] % rounds == 0]
        sizes = self.task_sizes[: len(ends)]
        if not sizes:
            return np.zeros((0, 0))
        correct = [self._counts(row)[0][: sum(sizes)] for row in ends]
        return metrics.task_accuracies(correct, self._test_total[: sum(sizes)], sizes)

    def _of_tasks(self, measure: Callable[[Floats], float]) -> float:
        """Return a measure of the finished tasks; NaN without any."""
        return measure(self.task_matrix) if len(self.task_matrix) else float("nan")

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

    @cached_property
    def evaluated(self) -> NDArray[np.int64]:
        """Return the rounds that were evaluated, int64 [T]."""
        return np.asarray([row["round"] for row in self._evaluations], dtype=np.int64)

    @cached_property
    def accuracies(self) -> Floats:
        """Return the top-1 accuracy of each evaluated round, float64 [T]."""
        values = [metrics.accuracy(*self._counts(row)) for row in self._evaluations]
        return np.asarray(values, dtype=np.float64)

    @cached_property
    def class_history(self) -> Floats:
        """Return the class-wise accuracy of each evaluated round, float64 [T, C]; NaN for a class without test data."""
        values = [self.accuracy_by_class(row) for row in self._evaluations]
        return np.asarray(values, dtype=np.float64).reshape(len(values), len(self._test_total))

    @cached_property
    def balanced_history(self) -> Floats:
        """Return the mean class-wise accuracy of each evaluated round, float64 [T]."""
        values = [metrics.balanced_accuracy(*self._counts(row)) for row in self._evaluations]
        return np.asarray(values, dtype=np.float64)

    @cached_property
    def forgetting_history(self) -> Floats:
        """Return the class-wise forgetting up to each evaluated round, float64 [T]; NaN at the first, with no past."""
        values = [metrics.forgetting(self.class_history[: t + 1]) if t else np.nan for t in range(len(self.evaluated))]
        return np.asarray(values, dtype=np.float64)

    @property
    def last(self) -> float:
        """Return the accuracy of the last evaluation."""
        return metrics.last(self.accuracies)

    @property
    def best(self) -> float:
        """Return the highest accuracy of any evaluation."""
        return metrics.best(self.accuracies)

    @property
    def tail(self) -> float:
        """Return the mean accuracy of the last ten evaluations (of all, if there are fewer)."""
        return metrics.tail(self.accuracies, TAIL)[0]

    @property
    def swing(self) -> float:
        """Return the standard deviation of accuracy within the last ten evaluations."""
        return metrics.tail(self.accuracies, TAIL)[1]

    @property
    def forgetting(self) -> float:
        """Return the class-wise forgetting at the last evaluation; NaN with fewer than two evaluations."""
        return float(self.forgetting_history[-1]) if len(self.evaluated) else float("nan")

    @property
    def balanced(self) -> float:
        """Return the mean of the class-wise accuracies at the last evaluation."""
        return float(self.balanced_history[-1]) if len(self.evaluated) else float("nan")

    @cached_property
    def visits(self) -> list[dict[str, Any]]:
        """Return what was recorded of every client's model as it came back; empty unless the recipe asked for it.

        Only of a sequence, where each model continues the one before.
        """
        return self.locals if self.schedule == "sequential" else []

    @cached_property
    def locals(self) -> list[dict[str, Any]]:
        """Return what was recorded of every client's model as it came back, with its round; empty unless asked for."""
        return [visit | {"round": row["round"]} for row in self.rounds for visit in row.get("visits") or []]

    @cached_property
    def visit_history(self) -> Floats:
        """Return the class-wise test accuracy after each visit, float64 [visits, C]."""
        values = [self.accuracy_by_class(visit) for visit in self.visits]
        return np.asarray(values, dtype=np.float64).reshape(len(values), len(self._test_total))

    @property
    def visit_forgetting(self) -> float:
        """Return the class-wise forgetting over visits instead of rounds; NaN with fewer than two visits."""
        return float(metrics.forgetting(self.visit_history)) if len(self.visits) > 1 else float("nan")

    @property
    def consistency(self) -> float:
        """Return the mean cosine of class-wise accuracies after two visits in a row; NaN with fewer than two."""
        pairs = pairwise(zip(self.visits, self.visit_history, strict=True))
        return _mean([metrics.consistency(a, b) for (v, a), (w, b) in pairs if w["round"] - v["round"] <= 1])

    @property
    def drift(self) -> float:
        """Return how much accuracy a client's own data lose by the next visit of the round, on average.

        NaN where no two visits of a round followed each other.
        """
        pairs = [(a["own"], b["previous"]) for a, b in pairwise(self.visits) if b["previous"] and a["own"][1]]
        return _mean([metrics.drift(own[0] / own[1], after[0] / after[1]) for own, after in pairs])

    @cached_property
    def local_history(self) -> dict[int, float]:
        """Return the mean test accuracy of the cohort's local models by round (FedCAD fig. 4b)."""
        found: dict[int, list[float]] = {}
        for visit in self.locals:
            found.setdefault(visit["round"], []).append(metrics.accuracy(*self._counts(visit)))
        return {number: _mean(values) for number, values in found.items()}

    @property
    def local_accuracy(self) -> float:
        """Return the mean test accuracy of local models, over the last ten rounds in which they were evaluated."""
        return metrics.tail(list(self.local_history.values()), TAIL)[0]

    @property
    def local_last(self) -> float:
        """Return the mean test accuracy of local models in the last round in which they were evaluated."""
        return metrics.last(list(self.local_history.values()))

    def kold(self, *, support: bool = False) -> tuple[float, float]:
        """Return local models' accuracy inside and outside their clients' label distributions (`metrics.kold`).

        Weighted by the clients' examples, over the last ten rounds in which local models were evaluated.
        """
        sums, weights = np.zeros(2), np.zeros(2)
        for _, examples, pair in self._kolds(support):
            sums += np.where(np.isnan(pair), 0.0, examples * pair)
            weights += np.where(np.isnan(pair), 0.0, examples)
        inside, outside = np.divide(sums, weights, out=np.full(2, np.nan), where=weights > 0)
        return float(inside), float(outside)

    def kold_spread(self, *, support: bool = False) -> tuple[float, float]:
        """Return the standard deviations of both over the clients of a round, on average over the same rounds.

        NaN where no round had two clients with a value.
        """
        rounds: dict[int, list[Floats]] = {}
        for number, _, pair in self._kolds(support):
            rounds.setdefault(number, []).append(pair)
        each = [np.transpose(pairs) for pairs in rounds.values()]
        inside, outside = (_known(metrics.over_seeds(_known(both[place]))[1] for both in each) for place in (0, 1))
        return _mean(inside), _mean(outside)

    def _kolds(self, support: bool) -> list[tuple[int, float, Floats]]:
        """Return (round, the client's examples, inside and outside) of each visit that counts for `kold`."""
        counts = self.partition.get("counts") or []
        last = set(list(self.local_history)[-TAIL:] if counts else [])
        found = []
        for visit in (visit for visit in self.locals if visit["round"] in last):
            own = np.asarray(counts[int(visit["client"])], dtype=np.float64)
            if own.sum():
                pair = metrics.kold(own, self.accuracy_by_class(visit), support=support)
                found.append((int(visit["round"]), float(own.sum()), np.asarray(pair)))
        return found

    @property
    def kold_in(self) -> float:
        """Return the first of `kold`."""
        return self.kold()[0]

    @property
    def kold_out(self) -> float:
        """Return the second of `kold`."""
        return self.kold()[1]

    @property
    def kold_in_spread(self) -> float:
        """Return the first of `kold_spread`."""
        return self.kold_spread()[0]

    @property
    def kold_out_spread(self) -> float:
        """Return the second of `kold_spread`."""
        return self.kold_spread()[1]

    @property
    def seen(self) -> float:
        """Return the first of `kold` over a client's support: the mean over the classes that it has."""
        return self.kold(support=True)[0]

    @property
    def unseen(self) -> float:
        """Return the second of `kold` over a client's support: the mean over the classes that it lacks."""
        return self.kold(support=True)[1]

    def rounds_to(self, target: float) -> float:
        """Return the first evaluated round whose accuracy, a fraction, reaches a target; NaN if none does."""
        return metrics.rounds_to(self.evaluated, self.accuracies, target)

    def seconds_to(self, target: float) -> float:
        """Return the seconds of local training, teachers included, until `rounds_to` a target; NaN if none does."""
        reached = self.rounds_to(target)
        spent = [
            (row.get("train") or 0.0) + (row.get("teachers") or 0.0) for row in self.timings if row["round"] <= reached
        ]
        return float(sum(spent)) if spent else float("nan")

    @property
    def train_seconds(self) -> float:
        """Return the seconds spent in local training, teachers included, over all rounds and clients."""
        return self.seconds("train") + self.seconds("teachers")

    def seconds(self, part: str) -> float:
        """Return the seconds of one part of the timings (``"train"``, ``"evaluate"``, ...) over all rounds."""
        return float(sum(row.get(part) or 0.0 for row in self.timings)) if self.timings else float("nan")

    @property
    def steps(self) -> list[str]:
        """Return what was asked of clients, by the names that the method gives it, in order."""
        named = (key for row in self.timings for key in row if key.startswith("step "))
        return [key.removeprefix("step ") for key in dict.fromkeys(named)]

    def task_seconds(self, part: str) -> list[float]:
        """Return the seconds of one part of the timings in each task that was begun; without tasks there is one."""
        tasks = {int(row["round"]): int(row.get("task", 1)) for row in self.rounds}
        sums = dict.fromkeys(sorted(set(tasks.values())), 0.0)
        for row in self.timings:
            sums[tasks[int(row["round"])]] += row.get(part) or 0.0
        return list(sums.values())

    @property
    def down(self) -> float:
        """Return the mean bytes that a client receives in a round it is asked in."""
        return self._per_visit("down")

    @property
    def up(self) -> float:
        """Return the mean bytes that a client sends in a round it is asked in; lost clients count as asked."""
        return self._per_visit("up")

    @property
    def traffic(self) -> int:
        """Return all bytes, both ways, of all rounds."""
        return int(sum((row.get("down") or 0) + (row.get("up") or 0) for row in self.rounds))

    def _per_visit(self, way: str) -> float:
        visits = sum(len(row.get("cohort", ())) for row in self.rounds)
        return sum(row.get(way) or 0 for row in self.rounds) / visits if visits else float("nan")

    @property
    def lost(self) -> list[Lost]:
        """Return every client that was lost, in order of rounds."""
        return [
            Lost(int(row["round"]), str(client), str(reason))
            for row in self.rounds
            for client, reason in (row.get("lost") or {}).items()
        ]

    @property
    def undone(self) -> list[int]:
        """Return the rounds that were undone because too few clients answered."""
        return [int(row["round"]) for row in self.rounds if row.get("undone")]


def _known(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values if not np.isnan(value)]


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
