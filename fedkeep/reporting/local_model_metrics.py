"""What a record says of clients' own models as they came back: accuracy, drift, what they keep of others' classes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from fedkeep import metrics
from fedkeep.reporting.record import Floats, Record, mean_of


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
        return np.asarray(values, dtype=np.float64).reshape(len(values), len(self.test_total))

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

    def kold_spread(self, *, support: bool = False) -> tuple[float, float]:
        """Return the standard deviations of both over the clients of a round, on average over the same rounds.

        NaN where no round had two clients with a value.
        """
        rounds: dict[int, list[Floats]] = {}
        for number, _, pair in self._kolds(support):
            rounds.setdefault(number, []).append(pair)
        each = [np.transpose(pairs) for pairs in rounds.values()]
        inside, outside = (_known(metrics.mean_std(_known(both[side]))[1] for both in each) for side in (0, 1))
        return mean_of(inside), mean_of(outside)

    @property
    def kold_in(self) -> float:
        """Return local models' class-wise accuracy, weighted by their clients' label distributions."""
        return self.kold()[0]

    @property
    def kold_out(self) -> float:
        """Return local models' class-wise accuracy, a class weighted by one minus its share of the client's labels."""
        return self.kold()[1]

    @property
    def kold_in_spread(self) -> float:
        """Return the standard deviation of `kold_in` between the clients of a round."""
        return self.kold_spread()[0]

    @property
    def kold_out_spread(self) -> float:
        """Return the standard deviation of `kold_out` between the clients of a round."""
        return self.kold_spread()[1]

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


def _known(values: Iterable[float]) -> list[float]:
    return [float(value) for value in values if not np.isnan(value)]
