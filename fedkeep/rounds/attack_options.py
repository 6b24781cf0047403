"""What malicious clients do, for trials of defences: the section ``[attack]`` of a recipe."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

from fedkeep._utils import seeds
from fedkeep.options import Options, option

AttackKind = Literal[
    "none",
    "silent",
    "scaled_update",
    "sign_flip",
    "reversed_update",
    "random_weights",
    "label_flip",
    "backdoor",
    "lying_teacher",
    "replay",
    "false_counts",
    "exaggerated_forgetting",
]
"""What attackers do.

``silent``: they do not answer at all, which is what a perfect defence would leave. ``scaled_update``: their update
times 100; ``sign_flip``: times -1; ``reversed_update``: times -10. ``random_weights``:
normal values with each tensor's mean and standard deviation. ``label_flip``: they train on the task's labels in
reverse, C - 1 - y without tasks. ``backdoor``: they teach that images with a bright corner are of the task's first
class, 0 without tasks. ``lying_teacher``: their model answers each
class with the next one. ``replay``: they send their first model again and again. ``false_counts``: they tell 100 times
their numbers of examples. ``exaggerated_forgetting``: they train as they should, and lower the classifier's bias for
classes that they lack by `Attack.strength`.
"""

ON_EXAMPLES = ("label_flip", "backdoor")
"""Attacks on what malicious clients train on; the others are on what they answer."""
NEED_EXAMPLES = (*ON_EXAMPLES, "exaggerated_forgetting")
"""Attacks that need the clients' examples, which are not on this machine where clients are real sites."""


@dataclass(frozen=True)
class Attack(Options):
    """Malicious clients, for trials of defences: the section ``[attack]`` of a recipe."""

    kind: AttackKind = option("none", "what malicious clients do")
    share: float = option(0.2, "share of all clients that are malicious, drawn by the seed", low=0.0, high=1.0)

    strength: float = option(
        4.0, "exaggerated_forgetting: by how much the bias of classes is lowered that a client lacks", low=0.0
    )

    def attackers(self, clients: Collection[str], seed: int) -> frozenset[str]:
        """Draw the malicious clients.

        Returns: Their ids; none without an attack.
        """
        if self.kind == "none":
            return frozenset()
        listed = list(clients)
        order = torch.randperm(len(listed), generator=seeds.rng(seed, "attackers")).tolist()
        return frozenset(listed[i] for i in order[: round(self.share * len(listed))])
