"""The client test: a client evaluates models on test examples of its own, which never leave it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedkeep.interface import Algorithm, Client, on_client
from fedkeep.metrics import SCORES
from fedkeep.models import Weights
from fedkeep.training.evaluation import count_correct
from fedkeep.training.party import LocalClient

MAX_EXAMPLES = 10_000_000
"""More test examples no client is believed to have."""


@dataclass(frozen=True, eq=False)
class ClientTestResult:
    """All that a client tells of its test: correct and all examples by class, the mean loss, and scores as lists.

    ``loss``: None where it is not finite.
    ``scores``: Those of `fedkeep.metrics.scores`, if the recipe names a metric: a number each, specificity by class.
    """

    correct: list[int]
    total: list[int]
    loss: float | None
    scores: dict[str, list[float | None]]

    def is_possible(self, classes: int, scored: bool) -> bool:
        """Tell whether it can be true of so many classes, with or without scores."""
        numbers = [value for values in self.scores.values() for value in values if value is not None]
        return (
            len(self.correct) == len(self.total) == classes
            and all(0 <= right <= count for right, count in zip(self.correct, self.total, strict=True))
            and sum(self.total) <= MAX_EXAMPLES
            and (self.loss is None or self.loss >= 0)
            and self.scores.keys() == (SCORES if scored and any(self.total) else frozenset())
            and all(0 <= value <= 1 for value in numbers)
            and all(len(values) == (classes if name == "specificity" else 1) for name, values in self.scores.items())
        )


@on_client
def client_test(
    self: Algorithm[Any, Any], client: Client[Any], models: dict[str, Weights], scored: bool
) -> dict[str, ClientTestResult]:
    """With run.client_test: correct and all test examples by class, and the loss (with run.metric also its scores)."""
    assert isinstance(client, LocalClient)  # whose data are its test examples in this step
    nothing = [0] * client.num_classes
    if not len(client.data["label"]):
        return {which: ClientTestResult(nothing, nothing, None, {}) for which in models}
    found = {which: count_correct(client.context, model, client.data, scored) for which, model in models.items()}
    return {
        which: ClientTestResult(
            counts.correct,
            counts.total,
            counts.loss if math.isfinite(counts.loss) else None,
            {name: value if isinstance(value, list) else [value] for name, value in counts.scores.items()},
        )
        for which, counts in found.items()
    }


def pooled(tests: Mapping[str, ClientTestResult]) -> dict[str, Any]:
    """Return what a record says of all clients that have test examples: sums by class, means that examples weigh.

    ``clients`` has the correct and all examples of each, and ``client_scores`` its scores.
    """
    told = {client: test for client, test in tests.items() if sum(test.total)}
    if not told:
        return {}
    every, sizes = list(told.values()), [sum(test.total) for test in told.values()]

    def mean(values: Sequence[float | None]) -> float | None:
        known = [(value, size) for value, size in zip(values, sizes, strict=True) if value is not None]
        return sum(value * size for value, size in known) / sum(size for _, size in known) if known else None

    def plain(scores: Mapping[str, list[float | None]]) -> dict[str, Any]:
        return {name: values if name == "specificity" else values[0] for name, values in scores.items()}

    names = [name for name in every[0].scores if all(name in test.scores for test in every)]
    means = {name: [mean(of) for of in zip(*(test.scores[name] for test in every), strict=True)] for name in names}
    record = {
        "correct": [sum(of) for of in zip(*(test.correct for test in every), strict=True)],
        "total": [sum(of) for of in zip(*(test.total for test in every), strict=True)],
        "test_loss": None if any(test.loss is None for test in every) else mean([test.loss for test in every]),
        "clients": {client: [sum(test.correct), sum(test.total)] for client, test in told.items()},
    }
    if not names:
        return record
    return record | {
        "scores": plain(means),
        "client_scores": {client: plain(test.scores) for client, test in told.items()},
    }
