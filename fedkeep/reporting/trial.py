"""One method with one seed, as a run recorded it: its data as they were read, and all that is measured of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep import metrics
from fedkeep.metrics import Floats, mean_of, mean_of_known
from fedkeep.reporting.privacy_spent import PrivacySpent
from fedkeep.rounds.messages import FaultKind
from fedkeep.rounds.run_settings import AVERAGE_SUFFIX, EvaluationModel


@dataclass(frozen=True)
class LostClient:
    """A client that did not finish a round, and why; ``kind`` is that of a fault with a kind of its own."""

    round: int
    client: str
    reason: str
    kind: str = ""


def without_average(label: str, evaluation_model: EvaluationModel) -> str:
    """Return a label without what it says of an average of a method's models."""
    return label.replace(AVERAGE_SUFFIX[evaluation_model], "", 1)


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
class TrialResult(PrivacySpent):
    """One method with one seed: what was configured, and one record per finished round.

    Accuracies and forgetting are fractions; a value that was never measured is NaN.

    ``label``: The name of the method in tables, and of which average of its models the accuracies are.
    ``rounds``, ``timings``: One entry a round, as in rounds.jsonl and timings.jsonl.
    ``partition``: As in partition.json.
    ``info``: As in trial.json.
    ``finished``: Whether the trial came to its end.
    ``path``: The trial's folder, or its place in an archive.
    ``ledger``: One entry for each round in which something left with noise, as in privacy.jsonl, which no resume cuts
        back; empty of other trials, and of old records.
    ``confusions``: As in confusion.json, a row for each true class; empty of other models than the first, and of old
        records.
    ``evaluation_model``: Of which of the method's models the accuracies are.
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
    evaluation_model: EvaluationModel = "last"

    @property
    def method(self) -> str:
        """Return the label without what it says of an average of the method's models."""
        return without_average(self.label, self.evaluation_model)

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
    def ended_early(self) -> bool:
        """Tell whether a callback ended the trial before its last round."""
        return self.finished and self.rounds_done < int(self.info.get("rounds", 0))

    @property
    def task_sizes(self) -> list[int]:
        """Return how many classes arrived with each task; empty without tasks, and with a single one."""
        sizes = [int(size) for size in self.info.get("tasks", [])]
        # One task is only a choice of classes: nothing arrives later, unless others were cut off.
        return sizes if len(sizes) > 1 or "cut" in self.info else []

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
        return metrics.accuracy(made["correct"], made["total"]) if made.get("correct") else math.nan

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
        return metrics.counted(row, self.test_total)

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

    def __repr__(self) -> str:
        """Return what it is, without the numbers of every round."""
        state = "finished" if self.finished else "unfinished"
        return f"<{type(self).__name__} {self.label}, seed {self.seed}: {self.rounds_done} rounds, {state}>"

    @cached_property
    def evaluated(self) -> NDArray[np.int64]:
        """Return the rounds that were evaluated, int64 [T]."""
        return np.asarray([row["round"] for row in self.evaluations], dtype=np.int64)

    @cached_property
    def accuracies(self) -> Floats:
        """Return the top-1 accuracy of each evaluated round, float64 [T]."""
        return _floats(metrics.accuracy(*self.counted(row)) for row in self.evaluations)

    @cached_property
    def class_history(self) -> Floats:
        """Return the class-wise accuracy of each evaluated round, float64 [T, C]; NaN for a class without test data."""
        return self._by_class(self.evaluations)

    def _by_class(self, rows: Sequence[Mapping[str, Any]]) -> Floats:
        """Return the class-wise accuracies of evaluated rounds or local models, float64 [rows, C]."""
        return _floats(map(self.accuracy_by_class, rows)).reshape(len(rows), len(self.test_total))

    @cached_property
    def balanced_history(self) -> Floats:
        """Return the mean class-wise accuracy of each evaluated round, float64 [T]."""
        return _floats(metrics.balanced_accuracy(*self.counted(row)) for row in self.evaluations)

    @cached_property
    def forgetting_history(self) -> Floats:
        """Return the class-wise forgetting up to each evaluated round, float64 [T]; NaN at the first, with no past."""
        known = self.class_history
        return _floats(metrics.forgetting(known[: t + 1]) if t else math.nan for t in range(len(known)))

    @cached_property
    def test_losses(self) -> Floats:
        """Return the mean cross-entropy of each evaluated round, float64 [T]; NaN where there is no finite one."""
        return _floats(row.get("test_loss") for row in self.evaluations)

    @property
    def last(self) -> float:
        """Return the accuracy of the last evaluation."""
        return float(self.accuracies[-1]) if len(self.accuracies) else math.nan

    @property
    def best(self) -> float:
        """Return the highest accuracy of any evaluation."""
        return float(self.accuracies.max()) if len(self.accuracies) else math.nan

    @cached_property
    def window_accuracies(self) -> dict[int, float]:
        """Return the accuracy by round, of the evaluations in the window (with tasks, of the last)."""
        return self._in_window(self.by_round(self.accuracies))

    @cached_property
    def window_forgettings(self) -> dict[int, float]:
        """Return the class-wise forgetting by round, of the evaluations in the window (with tasks, of the last)."""
        return self._in_window(self.by_round(self.forgetting_history))

    @property
    def window_mean(self) -> float:
        """Return the mean accuracy over the window."""
        return mean_of(self.window_accuracies.values())

    @property
    def window_std(self) -> float:
        """Return the standard deviation of accuracy from evaluation to evaluation of the window."""
        return metrics.mean_std(self.window_accuracies.values())[1]

    @property
    def window_forgetting(self) -> float:
        """Return the mean class-wise forgetting over the window."""
        return mean_of(self.window_forgettings.values())

    @property
    def class_accuracy(self) -> dict[str, float]:
        """Return the accuracy of each class at the last evaluation, by its name; NaN for a class without test data."""
        values = self.class_history[-1] if len(self.evaluated) else []
        names = self.info.get("label_names") or range(len(self.test_total))
        return {str(name): float(value) for name, value in zip(names, values, strict=False)}

    @property
    def class_specificity(self) -> dict[str, float]:
        """Return the share of each class's non-examples that are not taken for it, as `class_accuracy`; often NaN."""
        values = self.specificities[-1] if len(self.evaluated) else []
        return dict(zip(self.class_accuracy, map(float, values), strict=False))

    @property
    def balanced(self) -> float:
        """Return the mean of the class-wise accuracies at the last evaluation."""
        return float(self.balanced_history[-1]) if len(self.evaluated) else math.nan

    def score_history(self, name: str) -> Floats:
        """Return a score (`fedkeep.metrics.scores`) of each evaluated round, float64 [T]; NaN where it is not known."""
        if name == "balanced_accuracy":
            return self.balanced_history
        if name == "specificity":
            return _floats(map(mean_of_known, self.specificities))
        return _floats((row.get("scores") or {}).get(name) for row in self.evaluations)

    @cached_property
    def specificities(self) -> Floats:
        """Return the specificity of each class in each evaluated round, float64 [T, C]; NaN where it is not known."""
        lines = [(row.get("scores") or {}).get("specificity") or [] for row in self.evaluations]
        values = [[*line, *[None] * (len(self.test_total) - len(line))] for line in lines]
        return np.asarray(values, dtype=np.float64).reshape(len(values), len(self.test_total))

    def window_scores(self, name: str) -> dict[int, float]:
        """Return a score by round, of the evaluations in the window (with tasks, of the last)."""
        return self._in_window(self.by_round(self.score_history(name)))

    @property
    def forgetting(self) -> float:
        """Return the class-wise forgetting at the last evaluation; NaN with fewer than two evaluations."""
        return float(self.forgetting_history[-1]) if len(self.evaluated) else math.nan

    def rounds_to(self, target: float) -> float:
        """Return the first evaluated round whose accuracy, a fraction, reaches a target; NaN if none does."""
        reached = self.evaluated[self.accuracies >= target - 1e-9]  # 954 of 1,000 are 95.4 %, but not in floats
        return float(reached[0]) if len(reached) else math.nan

    def seconds_to(self, target: float) -> float:
        """Return the seconds of local training, teachers included, until `rounds_to` a target; NaN if none does."""
        reached = self.rounds_to(target)
        spent = [
            (row.get("train") or 0.0) + (row.get("teachers") or 0.0) for row in self.timings if row["round"] <= reached
        ]
        return float(sum(spent)) if spent else math.nan

    def by_round(self, history: Iterable[float]) -> dict[int, float]:
        """Return a history, [T], by the rounds that were evaluated."""
        return dict(zip(map(int, self.evaluated), map(float, history), strict=True))

    def _in_window(self, history: Mapping[int, float]) -> dict[int, float]:
        """Return the known values of a history by round, as far as they are in the last window."""
        window = self.windows[-1] if self.windows else ()
        return {n: value for n, value in history.items() if n in window and not math.isnan(value)}

    @cached_property
    def task_matrix(self) -> Floats:
        """Return accuracies by task after each task that is finished, float64 [T, T]."""
        ends = [row for row in self.evaluations if self.task_sizes and row["round"] % self.task_rounds == 0]
        sizes = self.task_sizes[: len(ends)]
        if not sizes:
            return np.zeros((0, 0))
        correct = [self.counted(row)[0][: sum(sizes)] for row in ends]
        total = [(self.counted(row)[1] if "total" in row else self.test_total)[: sum(sizes)] for row in ends]
        return np.tril(metrics.task_accuracies(correct, total, sizes))

    @cached_property
    def window_incrementals(self) -> dict[int, float]:
        """Return the mean accuracy over tasks, over the rounds of each task's window that were evaluated in all tasks.

        Of each task it is the mean over the tasks so far, as in `incremental`, which has it after the last round only.
        """
        rows = {row["round"]: row for row in self.evaluations}
        windows = self.windows if self.task_sizes else []
        found = {}
        for place, numbers in enumerate(zip(*windows, strict=True)):
            if all(number in rows for number in numbers):
                means = [self._mean_over_tasks(rows[number], task) for task, number in enumerate(numbers, start=1)]
                found[windows[0][place]] = metrics.mean_of_known(means)
        return found

    def _mean_over_tasks(self, row: Mapping[str, Any], tasks: int) -> float:
        """Return the accuracy of an evaluation, all tasks so far counting alike."""
        sizes = self.task_sizes[:tasks]
        starts = np.cumsum([0, *sizes])[:-1]
        correct, total = (np.add.reduceat(counts[: sum(sizes)], starts) for counts in self.counted(row))
        return metrics.mean_of_known(metrics.class_accuracy(correct, total))

    @property
    def task_accuracy(self) -> float:
        """Return A_T, the mean over tasks of the accuracy after the last task that is finished.

        NaN for a trial that a callback ended before its last task.
        """
        known = len(self.task_matrix) and not self.lacks_tasks
        return float(metrics.accuracy_after(self.task_matrix)[-1]) if known else math.nan

    @property
    def lacks_tasks(self) -> bool:
        """Tell whether a callback ended the trial before its last task was learned."""
        return self.ended_early and len(self.task_matrix) < len(self.task_sizes)

    @cached_property
    def local_models(self) -> list[dict[str, Any]]:
        """Return what was recorded of every client's model as it came back, with its round; empty unless asked for.

        Those of a round that was rolled back are left out: no model goes on from them.
        """
        kept = [row for row in self.rounds if not row.get("rolled_back")]
        return [model | {"round": row["round"]} for row in kept for model in row.get("local_models") or []]

    @cached_property
    def chain(self) -> list[dict[str, Any]]:
        """Return the same of a sequence, where each model continues the one before; empty of a parallel method."""
        return self.local_models if self.sequential else []

    @cached_property
    def chain_history(self) -> Floats:
        """Return the class-wise test accuracy after each local training of a sequence, float64 [trainings, C]."""
        return self._by_class(self.chain)

    @property
    def chain_forgetting(self) -> float:
        """Return the class-wise forgetting over local trainings instead of rounds; NaN with fewer than two."""
        return float(metrics.forgetting(self.chain_history)) if len(self.chain) > 1 else math.nan

    @property
    def consistency(self) -> float:
        """Return the mean cosine of class-wise accuracies after two local trainings in a row; NaN with fewer."""
        pairs = pairwise(zip(self.chain, self.chain_history, strict=True))
        return mean_of(metrics.consistency(a, b) for (v, a), (w, b) in pairs if w["round"] - v["round"] <= 1)

    @property
    def drift(self) -> float:
        """Return how much accuracy on a client's own data the next client's training costs, on average.

        NaN where no two clients of a round followed each other.
        """
        pairs = [(a["own"], b["previous"]) for a, b in pairwise(self.chain) if b["previous"] and a["own"][1]]
        return mean_of(own[0] / own[1] - after[0] / after[1] for own, after in pairs)

    @cached_property
    def local_history(self) -> dict[int, float]:
        """Return the mean test accuracy of the cohort's local models by round (FedCAD figure 4b)."""
        found: dict[int, list[float]] = {}
        for model in self.local_models:
            found.setdefault(model["round"], []).append(metrics.accuracy(*self.counted(model)))
        return {number: mean_of(values) for number, values in found.items()}

    @cached_property
    def window_local_accuracies(self) -> dict[int, float]:
        """Return the mean test accuracy of local models by round, in the window (with tasks, of the last)."""
        return self._in_window(self.local_history)

    @property
    def local_last(self) -> float:
        """Return the mean test accuracy of local models in the last round in which they were evaluated."""
        return [math.nan, *self.local_history.values()][-1]

    def kold(self, *, support: bool = False) -> tuple[float, float]:
        """Return local models' accuracy inside and outside their clients' label distributions (`metrics.kold`).

        Weighted by the clients' examples, over the window.
        """
        counts, sums, weights = self.partition.get("counts") or [], np.zeros(2), np.zeros(2)
        window = self.window_local_accuracies if counts else {}
        for model in (model for model in self.local_models if model["round"] in window):
            own = np.asarray(counts[int(model["client"])], dtype=np.float64)
            if examples := float(own.sum()):
                pair = np.asarray(metrics.kold(own, self.accuracy_by_class(model), support=support))
                sums += np.where(np.isnan(pair), 0.0, examples * pair)
                weights += np.where(np.isnan(pair), 0.0, examples)
        inside, outside = np.divide(sums, weights, out=np.full(2, np.nan), where=weights > 0)
        return float(inside), float(outside)

    @cached_property
    def client_history(self) -> dict[int, dict[str, float]]:
        """Return by evaluated round the accuracy of each client that told one."""
        rows = {row["round"]: row.get("clients") for row in self.evaluations}
        return {n: {name: right / of for name, (right, of) in told.items()} for n, told in rows.items() if told}

    def over_clients(self, how: Callable[[list[float]], float]) -> dict[int, float]:
        """Return by round of the window (with tasks, of the last) what a function makes of clients' accuracies."""
        return self._in_window({n: float(how(list(told.values()))) for n, told in self.client_history.items()})

    @property
    def client_accuracy(self) -> dict[str, float]:
        """Return the accuracy of each client on its own test examples at the last evaluation, by its name."""
        return self._by_name(next(reversed(self.client_history.values()), {}))

    def client_scores(self, name: str) -> dict[str, float]:
        """Return a score (`fedkeep.metrics.scores`) of each client at the last evaluation; NaN where it has none."""
        told = (self.evaluations[-1].get("client_scores") if self.evaluations else None) or {}
        values = {client: scores.get(name) for client, scores in told.items()}
        # Of one score for each class, those of absent classes are not known.
        known = {c: [one for one in np.atleast_1d(value) if one is not None] for c, value in values.items()}
        return self._by_name({client: mean_of(scores) for client, scores in known.items()})

    def _by_name(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return values of clients by their names in the data, if they have some, instead of their numbers."""
        names = self.partition.get("client_names")
        return {names[int(client)] if names else client: value for client, value in values.items()}

    @property
    def train_seconds(self) -> float:
        """Return the seconds spent in local training, teachers included, over all rounds and clients."""
        return self.seconds("train") + self.seconds("teachers")

    def seconds(self, part: str) -> float:
        """Return the seconds of one part of the timings (``"train"``, ``"evaluate"``, ...) over all rounds."""
        return float(sum(row.get(part) or 0.0 for row in self.timings)) if self.timings else math.nan

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
        return sum(row.get(way) or 0 for row in self.rounds) / asked if asked else math.nan

    @cached_property
    def last_quarter(self) -> list[dict[str, Any]]:
        """Return the last quarter of the evaluations, at least one if there is any; with tasks, of the last task."""
        known = [row for row in self.evaluations if row.get("task", 1) == self.evaluations[-1].get("task", 1)]
        return known[len(known) - -(-len(known) // 4) :]

    @property
    def chance(self) -> float:
        """Return the accuracy of always predicting the commonest class over `last_quarter`; NaN without any."""
        return metrics.chance_accuracy(self._late_counts[1]) if self.evaluations else math.nan

    @property
    def _late_counts(self) -> tuple[Floats, Floats]:
        """Return correct and all examples of each class, in the mean over `last_quarter`; lost clients do not test."""
        counts, totals = zip(*map(self.counted, self.last_quarter), strict=True)
        return np.mean(counts, axis=0), np.mean(totals, axis=0)

    @property
    def recent_accuracy(self) -> float:
        """Return the mean accuracy over `last_quarter`; NaN without any."""
        return mean_of(metrics.accuracy(*self.counted(row)) for row in self.last_quarter)

    @cached_property
    def at_chance(self) -> bool:
        """Tell whether the model guesses over `last_quarter` (`fedkeep.metrics.is_at_chance`)."""
        if not self.evaluations:
            return False
        correct, total = self._late_counts
        ranks = [(row.get("scores") or {}).get("auroc") for row in self.last_quarter]
        if ranks and None not in ranks and np.mean(np.asarray(ranks, dtype=np.float64)) > metrics.chance_auroc(total):
            return False  # a rare class may never have the highest logit
        return metrics.is_at_chance(correct, total)

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


def _floats(values: Iterable[Any]) -> Floats:
    """Return values as float64, which a metric of one's own cannot change; None, which was not measured, is NaN."""
    array = np.array(list(values), dtype=np.float64)
    array.setflags(write=False)
    return array


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
    held = zip(clients, counts.sum(1), strict=False) if len(counts) else dict(info.get("examples") or {}).items()
    about = info.get("input") or {}
    features, shape = about.get("features") or [], " x ".join(map(str, about.get("shape") or []))
    inputs = _INPUTS.get(str(about.get("type")), "{}").format(shape) if shape else ""
    return DataRead(
        f"{len(features)} features: {_listed(features, 30)}" if features else inputs,
        list(zip(names, train, test, strict=True)),
        [(str(name), int(size)) for name, size in held],
        int(info.get("num_clients") or len(counts)),
        str(info.get("dataset_note") or ""),
    )


def _listed(words: Iterable[object], shown: int) -> str:
    every = list(map(str, words))
    return ", ".join(every[:shown]) + (f" and {len(every) - shown:,} more" if len(every) > shown else "")
