"""What a run believes of its clients: the section ``[defense]`` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Literal

from fedkeep.options import Options, option

RobustRule = Literal["mean", "median", "trimmed_mean", "norm_clipping", "krum", "multi_krum"]
"""How replies that are asked for together are made robust, before the method aggregates them."""

HISTORY_LENGTH = 32
"""Number of updates whose norms and other measurements are kept, as the reference for clients asked one at a time."""
MIN_FOR_MEDIAN = 3
"""Fewest norms whose median says what is usual."""


@dataclass(frozen=True)
class Defense(Options):
    """Checks of replies, and robust aggregation: the section ``[defense]`` of a recipe."""

    check_replies: bool = option(
        True, "whether counts, norms and repeated replies are checked; false only to measure what attacks do"
    )
    update_norm: float = option(
        10.0,
        "largest norm of a client's update, in medians of the others' norms, unless it is under 3 norms of the model;"
        " 0: no limit",
        low=0.0,
    )
    model_norm: float = option(
        100.0, "largest norm of a client's update, in norms of the model that it was sent; 0: no limit", low=0.0
    )
    refusals: int = option(
        3,
        "refused replies after which a client is asked no more; four accepted ones make up for one; 0: never for good",
        low=0,
    )
    backoff: int = option(
        8,
        "rounds for which a client is not drawn after a reply that the loss check refused; doubled for each whole "
        "refused reply that it had not made up for",
        low=0,
        high=1000,
    )
    refused_rounds: int = option(
        0,
        "rounds in a row in which all replies were refused, after which a run stops; 0: 3 at real sites, else never",
        low=0,
    )
    robust_aggregation: RobustRule = option(
        "mean", "how models that were asked for together are made robust before a method averages them"
    )
    byzantine: float = option(
        0.2,
        "share of a cohort that is assumed to be malicious, for trimmed_mean and (multi_)krum; unless it is 0, one "
        "client at least",
        low=0.0,
        high=0.49,
    )
    loss_check: Literal["off", "server"] = option(
        "off", "whether the server measures, on its own examples, if a training raised the loss on the client's classes"
    )
    loss_examples: int = option(
        8, "most examples of each class on which the server measures; more cost more, and tell more surely", low=1
    )
    loss_slack: float = option(0.5, "by how much the loss may rise, in nats", low=0.0)

    def num_byzantine(self, count: int) -> int:
        """Return how many of some clients are assumed to be malicious: the share, rounded down, and one at least."""
        return max(1, floor(self.byzantine * count + 1e-9)) if self.byzantine else 0
