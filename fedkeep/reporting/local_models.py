"""What a record says of clients' own models as they came back: accuracy, drift, what they keep of others' classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from fedkeep import metrics
from fedkeep.reporting.record import TAIL, Floats, Record


@dataclass(frozen=True)
class LocalModelMetrics(Record):
    """Measures of models after a client's training; NaN unless the recipe asked for them (``run.evaluate_visits``)."""

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
        return np.asarray(values, dtype=np.float64).reshape(len(values), len(self.test_total))

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
            found.setdefault(visit["round"], []).append(metrics.accuracy(*self.counted(visit)))
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


def _known(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values if not np.isnan(value)]


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
