"""One method with one seed, as a run recorded it: accuracies, forgetting, clients' own models, times and traffic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedkeep import metrics
from fedkeep.interface.privacy import CHANGE_TOLD, COUNTS_TOLD, IN_MEAN, MEANS_TOLD, counts_name, sample_rate_of
from fedkeep.metrics import Floats
from fedkeep.reporting.record import CostMetrics, LearningMetrics, Record, TaskMetrics, mean_of


@dataclass(frozen=True)
class LocalModelMetrics(Record):
    """Measures of models after local training; NaN unless the recipe asked for them.

    It asks with ``run.evaluate_local_models``.
    """

    @cached_property
    def local_models(self) -> list[dict[str, Any]]:
        """Return what was recorded of every client's model as it came back, with its round; empty unless asked for."""
        return [model | {"round": row["round"]} for row in self.rounds for model in row.get("local_models") or []]

    @cached_property
    def chain(self) -> list[dict[str, Any]]:
        """Return the same of a sequence, where each model continues the one before; empty of a parallel method."""
        return self.local_models if self.sequential else []

    @cached_property
    def chain_history(self) -> Floats:
        """Return the class-wise test accuracy after each local training of a sequence, float64 [trainings, C]."""
        values = [self.accuracy_by_class(model) for model in self.chain]
        return _kept(values, len(self.test_total))

    @property
    def chain_forgetting(self) -> float:
        """Return the class-wise forgetting over local trainings instead of rounds; NaN with fewer than two."""
        return float(metrics.forgetting(self.chain_history)) if len(self.chain) > 1 else float("nan")

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
        return mean_of(metrics.drift(own[0] / own[1], after[0] / after[1]) for own, after in pairs)

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
        window = self.windows[-1] if self.windows else ()
        return {number: value for number, value in self.local_history.items() if number in window}

    @property
    def local_accuracy(self) -> float:
        """Return the mean test accuracy of local models over the window."""
        return mean_of(self.window_local_accuracies.values())

    @property
    def local_last(self) -> float:
        """Return the mean test accuracy of local models in the last round in which they were evaluated."""
        return metrics.last(list(self.local_history.values()))

    def kold(self, *, support: bool = False) -> tuple[float, float]:
        """Return local models' accuracy inside and outside their clients' label distributions (`metrics.kold`).

        Weighted by the clients' examples, over the window.
        """
        sums, weights = np.zeros(2), np.zeros(2)
        for _, examples, pair in self._kolds(support):
            sums += np.where(np.isnan(pair), 0.0, examples * pair)
            weights += np.where(np.isnan(pair), 0.0, examples)
        inside, outside = np.divide(sums, weights, out=np.full(2, np.nan), where=weights > 0)
        return float(inside), float(outside)

    @property
    def kold_in(self) -> float:
        """Return local models' class-wise accuracy, weighted by their clients' label distributions."""
        return self.kold()[0]

    @property
    def kold_out(self) -> float:
        """Return local models' class-wise accuracy, a class weighted by one minus its share of the client's labels."""
        return self.kold()[1]

    @property
    def seen(self) -> float:
        """Return local models' mean accuracy over the classes of which their clients have examples."""
        return self.kold(support=True)[0]

    @property
    def unseen(self) -> float:
        """Return local models' mean accuracy over the classes of which their clients have none."""
        return self.kold(support=True)[1]

    def _kolds(self, support: bool) -> list[tuple[int, float, Floats]]:
        """Return (round, the client's examples, inside and outside) of each local model that counts for `kold`."""
        counts = self.partition.get("counts") or []
        window = self.window_local_accuracies if counts else {}
        found = []
        for model in (model for model in self.local_models if model["round"] in window):
            own = np.asarray(counts[int(model["client"])], dtype=np.float64)
            if own.sum():
                pair = metrics.kold(own, self.accuracy_by_class(model), support=support)
                found.append((int(model["round"]), float(own.sum()), np.asarray(pair)))
        return found


@dataclass(frozen=True)
class ClientTestMetrics(Record):
    """Measures over clients that test on their own examples; NaN unless the recipe asked for them.

    It asks with ``run.client_test``.
    """

    @cached_property
    def client_history(self) -> dict[int, dict[str, float]]:
        """Return by evaluated round the accuracy of each client that told one."""
        rows = {row["round"]: row.get("clients") for row in self.evaluations}
        return {n: {name: right / of for name, (right, of) in told.items()} for n, told in rows.items() if told}

    def over_clients(self, how: Callable[[list[float]], float]) -> dict[int, float]:
        """Return by round of the window (with tasks, of the last) what a function makes of clients' accuracies."""
        window = self.windows[-1] if self.windows else ()
        return {n: float(how(list(told.values()))) for n, told in self.client_history.items() if n in window}

    @property
    def client_mean(self) -> float:
        """Return the plain mean of clients' accuracies on their own test examples, over the window."""
        return mean_of(self.over_clients(np.mean).values())

    @property
    def client_worst(self) -> float:
        """Return the lowest accuracy of a client on its own test examples, in the mean over the window."""
        return mean_of(self.over_clients(min).values())

    @property
    def client_median(self) -> float:
        """Return the median of clients' accuracies on their own test examples, in the mean over the window."""
        return mean_of(self.over_clients(np.median).values())

    @property
    def client_best(self) -> float:
        """Return the highest accuracy of a client on its own test examples, in the mean over the window."""
        return mean_of(self.over_clients(max).values())

    @property
    def clients_tested(self) -> float:
        """Return how many clients told an accuracy, in the mean over the window."""
        return mean_of(self.over_clients(len).values())

    @property
    def client_accuracy(self) -> dict[str, float]:
        """Return the accuracy of each client on its own test examples at the last evaluation, by its name."""
        names = self.partition.get("client_names") or ()
        last = list(self.client_history.values())[-1:]
        return {names[int(client)] if names else client: value for told in last for client, value in told.items()}

    def client_scores(self, name: str) -> dict[str, float]:
        """Return a score (`fedkeep.metrics.scores`) of each client at the last evaluation; NaN where it has none."""
        names = self.partition.get("client_names") or ()
        told = self.evaluations[-1].get("client_scores") if self.evaluations else None
        values = {client: scores.get(name) for client, scores in (told or {}).items()}
        return {
            names[int(client)] if names else client: math.nan if value is None else float(np.mean(value))
            for client, value in values.items()
        }


@dataclass(frozen=True)
class TrialResult(TaskMetrics, LocalModelMetrics, ClientTestMetrics, LearningMetrics, CostMetrics):
    """All that can be said of a record; here, of its accuracies over rounds."""

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
        values = [metrics.accuracy(*self.counted(row)) for row in self.evaluations]
        return _kept(values)

    @cached_property
    def class_history(self) -> Floats:
        """Return the class-wise accuracy of each evaluated round, float64 [T, C]; NaN for a class without test data."""
        values = [self.accuracy_by_class(row) for row in self.evaluations]
        return _kept(values, len(self.test_total))

    @cached_property
    def balanced_history(self) -> Floats:
        """Return the mean class-wise accuracy of each evaluated round, float64 [T]."""
        values = [metrics.balanced_accuracy(*self.counted(row)) for row in self.evaluations]
        return _kept(values)

    @cached_property
    def forgetting_history(self) -> Floats:
        """Return the class-wise forgetting up to each evaluated round, float64 [T]; NaN at the first, with no past."""
        values = [metrics.forgetting(self.class_history[: t + 1]) if t else np.nan for t in range(len(self.evaluated))]
        return _kept(values)

    @cached_property
    def test_losses(self) -> Floats:
        """Return the mean cross-entropy of each evaluated round, float64 [T]; NaN where there is no finite one."""
        values = [row.get("test_loss") for row in self.evaluations]
        return _kept([math.nan if value is None else value for value in values])

    @property
    def last(self) -> float:
        """Return the accuracy of the last evaluation."""
        return metrics.last(self.accuracies)

    @property
    def best(self) -> float:
        """Return the highest accuracy of any evaluation."""
        return metrics.best(self.accuracies)

    @cached_property
    def window_accuracies(self) -> dict[int, float]:
        """Return the accuracy by round, of the evaluations in the window (with tasks, of the last)."""
        return self._in_window(self.accuracies)

    @cached_property
    def window_forgettings(self) -> dict[int, float]:
        """Return the class-wise forgetting by round, of the evaluations in the window (with tasks, of the last)."""
        return self._in_window(self.forgetting_history)

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
        return float(self.balanced_history[-1]) if len(self.evaluated) else float("nan")

    def score_history(self, name: str) -> Floats:
        """Return a score (`fedkeep.metrics.scores`) of each evaluated round, float64 [T]; NaN where it is not known."""
        if name == "balanced_accuracy":
            return self.balanced_history
        if name == "specificity":
            return np.asarray([mean_of(_known(by_class)) for by_class in self.specificities], dtype=np.float64)
        values = [(row.get("scores") or {}).get(name) for row in self.evaluations]
        return _kept([math.nan if value is None else value for value in values])

    @cached_property
    def specificities(self) -> Floats:
        """Return the specificity of each class in each evaluated round, float64 [T, C]; NaN where it is not known."""
        lines = [(row.get("scores") or {}).get("specificity") or [] for row in self.evaluations]
        values = [[*line, *[None] * (len(self.test_total) - len(line))] for line in lines]
        return _kept(values, len(self.test_total))

    def window_scores(self, name: str) -> dict[int, float]:
        """Return a score by round, of the evaluations in the window (with tasks, of the last)."""
        return self._in_window(self.score_history(name))

    @property
    def balanced_accuracy(self) -> float:
        """Return the mean over classes of their accuracies (sensitivities), over the window."""
        return mean_of(self.window_scores("balanced_accuracy").values())

    @property
    def f1(self) -> float:
        """Return the mean over classes of the F1 score, over the window."""
        return mean_of(self.window_scores("f1").values())

    @property
    def auroc(self) -> float:
        """Return the area under the ROC curve, the mean over classes of one against the rest, over the window."""
        return mean_of(self.window_scores("auroc").values())

    @property
    def ece(self) -> float:
        """Return the expected calibration error of the softmax in 15 bins, over the window."""
        return mean_of(self.window_scores("ece").values())

    @property
    def specificity(self) -> float:
        """Return the mean over classes of the share of other classes' examples not taken for it, over the window."""
        return mean_of(self.window_scores("specificity").values())

    @property
    def forgetting(self) -> float:
        """Return the class-wise forgetting at the last evaluation; NaN with fewer than two evaluations."""
        return float(self.forgetting_history[-1]) if len(self.evaluated) else float("nan")

    @cached_property
    def _releases(self) -> list[Mapping[str, Any]]:
        """Return the distinct rounds in which something left with noise.

        A round that was repeated counts once more, unless the very same left again.
        """
        distinct = {json.dumps(row, sort_keys=True): row for row in self.ledger}
        known = {row["round"] for row in self.ledger}
        return [*distinct.values(), *(row for row in self.rounds if "privacy" in row and row["round"] not in known)]

    @cached_property
    def _spent(self) -> tuple[dict[str, dict[str, int]], Mapping[str, float]]:
        """Return by client how often it spent what, and the options.

        What a site counted itself (`ever`) stands in place of what arrived from it, if it is more.
        """
        spent: dict[str, dict[str, int]] = {}
        ever: dict[str, dict[str, dict[str, int]]] = {}
        options: Mapping[str, float] = {}
        for row in self._releases:
            options = row["privacy"]
            for client, uses in row["privacy"].get("clients", {}).items():
                mine = spent.setdefault(client, {})
                for name, count in uses.items():
                    if name == COUNTS_TOLD:  # again with the same noise
                        mine[counts_name(row["task"])] = 1
                    else:
                        mine[name] = mine.get(name, 0) + count
            if row["privacy"].get("means"):  # of an earlier version
                for client in row["cohort"]:
                    mine = spent.setdefault(client, {})
                    mine[IN_MEAN] = mine.get(IN_MEAN, 0) + row["privacy"]["means"]
            for client, ledgers in row.get("ever", {}).items():
                for ledger, totals in ledgers.items():
                    known = ever.setdefault(client, {}).setdefault(ledger, {})
                    known |= {name: max(count, known.get(name, 0)) for name, count in totals.items()}
        for client, ledgers in ever.items():
            mine = spent.setdefault(client, {})
            for name in {name for totals in ledgers.values() for name in totals}:
                mine[name] = max(mine.get(name, 0), sum(totals.get(name, 0) for totals in ledgers.values()))
        return spent, options

    @property
    def noised_steps(self) -> dict[str, int]:
        """Return how many steps of DP-SGD each client took, those included that a restored server does not know of."""
        return {client: sum(self._steps(uses).values()) for client, uses in self._spent[0].items()}

    @staticmethod
    def _steps(uses: Mapping[str, int]) -> dict[float, int]:
        """Return steps of DP-SGD by sample rate. What a site of an earlier version made up is of an infinite rate."""
        steps: dict[float, int] = {}
        for name, count in uses.items():
            if name not in (CHANGE_TOLD, IN_MEAN) and not name.startswith(COUNTS_TOLD):
                rate = sample_rate_of(name) or math.inf
                steps[rate] = steps.get(rate, 0) + count
        return steps

    @cached_property
    def epsilon(self) -> float:
        """Return the largest epsilon of a client's example, of all that left it; NaN if its models had no noise.

        This one and the others are for neighbours of which one has an example, or a client, less ("add-or-remove"):
        its place counts as nothing, and how many there are is public.
        """
        spent, options = self._spent
        if not options.get("noise_multiplier"):
            return float("nan")
        noise, delta = options["noise_multiplier"], options["delta"]
        steps = {client: tuple(sorted(self._steps(uses).items())) for client, uses in spent.items()}
        of_steps = {taken: metrics.dp_sgd_epsilon(dict(taken), noise, delta) for taken in set(steps.values())}
        by_client = (
            of_steps[steps[client]] + options["counts_epsilon"] * _told_counts(uses) for client, uses in spent.items()
        )
        return max(by_client, default=0.0)  # of rounds in which no client's reply came

    @cached_property
    def client_epsilon(self) -> float:
        """Return the largest epsilon of a whole client in the noised means of all rounds; NaN without such noise.

        Who is in which cohort follows from the run's seed, which everybody knows. So no sampling is claimed: it is the
        epsilon of as many noised means as the client's updates were in.
        """
        return self._gaussian_epsilon(IN_MEAN, "client_noise_multiplier")

    @property
    def counts_epsilon(self) -> float:
        """Return the largest epsilon of an example in label counts, over all that were told; NaN without noise."""
        spent, options = self._spent
        most = max(map(_told_counts, spent.values()), default=0)
        return options["counts_epsilon"] * most if most else float("nan")

    @cached_property
    def prototypes_epsilon(self) -> float:
        """Return the largest epsilon of a whole client in its noised prototypes; NaN if they had no noise."""
        return self._gaussian_epsilon(CHANGE_TOLD, "prototypes_noise_multiplier")

    def _gaussian_epsilon(self, name: str, option: str) -> float:
        """Return the epsilon of all that the client told that told most; NaN if none told anything."""
        spent, options = self._spent
        most = max((uses.get(name, 0) for uses in spent.values()), default=0)
        return metrics.dp_sgd_epsilon({1.0: most}, options[option], options["delta"]) if most else float("nan")

    @property
    def confidences_epsilon(self) -> float:
        """Return the epsilon of a server's example, in all confidences that clients were sent; NaN without noise."""
        rows = [row["privacy"] for row in self._releases if row["privacy"].get("server")]
        told = [options["confidences_epsilon"] * options["server"].get(MEANS_TOLD, 0) for options in rows]
        return sum(told) if told else float("nan")

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

    def _in_window(self, history: Floats) -> dict[int, float]:
        """Return the known values of a history, float64 [T], by round, as far as they are in the last window."""
        window = self.windows[-1] if self.windows else ()
        pairs = zip(map(int, self.evaluated), map(float, history), strict=True)
        return {number: value for number, value in pairs if number in window and not np.isnan(value)}


def _told_counts(uses: Mapping[str, int]) -> int:
    """Return in how many tasks label counts were told."""
    return sum(count for name, count in uses.items() if name.startswith(COUNTS_TOLD))


def _kept(values: Sequence[Any], width: int | None = None) -> Floats:
    """Return numbers of rounds as an array, which a metric of a user's own, or what it calls, cannot change."""
    array = np.array(values, dtype=np.float64)
    array = array if width is None else array.reshape(len(values), width)
    array.setflags(write=False)
    return array


def _known(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values if not np.isnan(value)]
