"""Gradients by example: how many are in memory at once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

MOST_BYTES = 2**28
"""Bytes of the gradients that are computed together."""
MOST_EXAMPLES = 64


def examples_at_once(parameters: Mapping[str, Tensor]) -> int:
    """Return of how many examples the gradients are computed together.

    With more than a million parameters they are fewer than `MOST_EXAMPLES`, and their sums differ in the last bits.
    """
    each = sum(parameter.nbytes for parameter in parameters.values())
    return min(max(MOST_BYTES // max(each, 1), 1), MOST_EXAMPLES)


def gradient_bytes(parameters: Mapping[str, Tensor]) -> int:
    """Return about how many bytes the gradients by example take, with their squares and what computes them."""
    return 3 * examples_at_once(parameters) * sum(parameter.nbytes for parameter in parameters.values())
