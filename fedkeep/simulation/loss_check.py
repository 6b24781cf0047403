"""How far a client's model is from re-runs of its training on the server's own images.

Clients differ, and forget what they lack: a loss or a logit alone tells no attacker from an honest client. But a re-run
starts from the same model, with the same teachers, loss and number of steps, on images of the same classes: what honest
training does to the model, to own and other classes alike, the re-run does too, nearly. How nearly, two re-runs on
different images show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fedkeep.training.model_check import ClassScores

CHECKERS = 3
"""Number of clients that measure a model, so that one liar among them decides nothing."""
CLIENTS_SLACK = 5.0
"""How much more of a rise clients allow than the server: they measure on few examples, on which they have trained."""
LITTLE = 0.05
"""A difference that is never held against a client, in logits and nats: two re-runs may agree by chance."""


def distance(model: ClassScores, one: ClassScores, other: ClassScores) -> float:
    """Return how far a client's model is from two re-runs, in distances of the re-runs from each other.

    What differs is the mean logits of each class, and its mean loss; a model whose loss is smaller is not farther.
    """
    logits = _size(model.mean_logits - (one.mean_logits + other.mean_logits) / 2)
    loss = _size((model.loss - (one.loss + other.loss) / 2).clamp(min=0))
    chance = _size(one.mean_logits - other.mean_logits) + _size(one.loss - other.loss)
    return (logits + loss) / (chance + LITTLE)


def _size(difference: Tensor) -> float:
    """Return the root mean square over the classes that were measured."""
    return float(difference[difference.isfinite()].double().square().mean().sqrt())


def choose_checkers(client: str, cohort: Sequence[str], counts: Mapping[str, Tensor]) -> list[str]:
    """Choose the clients that measure another one's model: the next in the cohort that hold some of its classes.

    ``counts``: Label counts by client, of those that can be asked.
    """
    start = cohort.index(client) if client in cohort else 0
    following = [name for name in (*cohort[start + 1 :], *cohort[:start]) if name != client and name in counts]
    return [name for name in following if bool((counts[name] * counts[client] > 0).any())][:CHECKERS]
