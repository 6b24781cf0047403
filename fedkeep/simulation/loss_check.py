"""Whether a client's training raised the loss on the classes that the client holds.

Honest training lowers that loss, however different clients are, and whatever it makes the model forget of other
classes. So no honest client is refused for being different, and a client that sends anything but the result of a
training stands out: its update turned round, random weights, a training on wrong labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

CHECKERS = 3
"""Number of clients that measure a model, so that one liar among them decides nothing."""

CLIENTS_SLACK = 5.0
"""How much more of a rise clients allow than the server: they measure on few examples, on which they have trained."""


def choose_checkers(client: str, cohort: Sequence[str], counts: Mapping[str, Tensor]) -> list[str]:
    """Choose the clients that measure another one's model on their examples.

    Parameters
    ----------
    client : str
        Whose model is measured.
    cohort : Sequence[str]
        The clients of the round, in order.
    counts : Mapping[str, Tensor]
        Label counts by client, of those that can be asked.

    Returns
    -------
    list[str]
        The next clients in the order of the cohort, of those that hold some of its classes; at most `CHECKERS`.
    """
    start = cohort.index(client) if client in cohort else 0
    following = [name for name in (*cohort[start + 1 :], *cohort[:start]) if name != client and name in counts]
    return [name for name in following if bool((counts[name] * counts[client] > 0).any())][:CHECKERS]
