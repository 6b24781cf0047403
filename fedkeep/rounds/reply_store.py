"""Replies that wait for the rest of a round: some stay in memory, and the models of the others lie in a file."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from fedkeep.interface.pytree import num_bytes, replace_nodes
from fedkeep.models import Weights
from fedkeep.models.weights import StoredWeights, WeightsFile, form_of

T = TypeVar("T")

IN_MEMORY = 64 * 2**20
"""Bytes of the replies to one question that stay in memory. Results do not depend on it."""


def fit_into_memory(count: int, model: Weights) -> bool:
    """Tell whether so many replies with models of this form stay in memory."""
    return count * sum(tensor.nbytes for tensor in form_of(model).values()) <= IN_MEMORY


def is_weights(node: Any) -> bool:
    """Tell whether a node of a reply is a model, or as many tensors by name."""
    if isinstance(node, StoredWeights):
        return True
    return (
        isinstance(node, Mapping)
        and bool(node)
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in node.items())
    )


class ReplyStore:
    """Keeps the replies to one question until all have arrived.

    ``file``: Where models lie that find no room in memory.
    ``expected``: How many replies there will be, all of about the size of the first; 0 if that is not known.
    ``in_memory``: Bytes of replies that stay in memory; default: `IN_MEMORY`.
    """

    def __init__(self, file: WeightsFile, expected: int = 0, in_memory: int | None = None) -> None:
        self._file = file
        self._expected = expected
        self._stored = 0
        self._left = IN_MEMORY if in_memory is None else in_memory

    def keep(self, reply: T) -> T:
        """Return a reply as it can wait.

        Returns: The reply itself as long as there is room in memory. Afterwards one with the same values, whose models,
            and other tensors by name, are `StoredWeights`.
        """
        size = num_bytes(reply)
        if self._expected:
            self._file.check_room(self._expected * size - self._left)
            self._expected = 0
        if size <= self._left:
            self._left -= size
            return reply
        self._stored += size
        return replace_nodes(reply, is_weights, self._put)

    def trim(self) -> None:
        """Give memory back to the system, when the replies that were stored since the last call are dropped."""
        self._file.trimmer.dropped(self._stored)
        self._stored = 0

    def _put(self, weights: Weights) -> StoredWeights:
        return weights if isinstance(weights, StoredWeights) else self._file.put(weights)


def load(weights: Weights) -> Weights:
    """Return a model in memory.

    Returns: The model itself, unless it is a stored one.
    """
    return dict(weights) if isinstance(weights, StoredWeights) else weights
