"""What clients say of images in the place of weights: logits, that nobody's may swallow the others', and their mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Ensemble = Literal["prob", "logit"]
"""Whether the mean of what models say is one of their probabilities, or of their logits."""

LARGEST = 1e4
"""Logits beyond it are cut: softmaxes cannot tell, and one client's must not swallow all others' in a mean. Nor may its
prototypes (FedDCL), which stay near 1."""


@dataclass(frozen=True, eq=False)
class Said:
    """What a client tells: the logits of its model about all images that are spoken of, [n, classes]."""

    logits: Tensor


def bounded(logits: Tensor) -> Tensor:
    """Return a client's logits, those beyond `LARGEST` cut."""
    return logits.clamp(-LARGEST, LARGEST)


def averaged(replies: Sequence[Tensor], tau: float, how: Ensemble) -> Tensor:
    """Return the mean of logits [n, classes], or logits whose softmax at tau is the mean of their softmaxes."""
    said = torch.stack(list(replies))
    if how == "logit":
        return said.mean(0)
    return tau * ((said / tau).log_softmax(-1).logsumexp(0) - math.log(len(said)))
