"""Whether a trial has learned anything, and what to change where it has not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedkeep import metrics
from fedkeep.reporting.record import Record
from fedkeep.rounds.messages import FaultKind


@dataclass(frozen=True)
class LearningMetrics(Record):
    """Whether the model is better than guessing, and whether local training stayed finite."""

    @cached_property
    def last_quarter(self) -> list[dict[str, Any]]:
        """Return the last quarter of the evaluations, at least one if there is any; with tasks, of the last task."""
        known = [row for row in self.evaluations if row.get("task", 1) == self.evaluations[-1].get("task", 1)]
        return known[len(known) - -(-len(known) // 4) :]

    @property
    def chance(self) -> float:
        """Return the accuracy of always predicting the commonest class at the last evaluation; NaN without any."""
        return metrics.chance_accuracy(self.counted(self.evaluations[-1])[1]) if self.evaluations else math.nan

    @property
    def recent_accuracy(self) -> float:
        """Return the mean accuracy over `last_quarter`; NaN without any."""
        values = [metrics.accuracy(*self.counted(row)) for row in self.last_quarter]
        return float(np.mean(values)) if values else math.nan

    @cached_property
    def at_chance(self) -> bool:
        """Tell whether the model guesses over `last_quarter` (`fedkeep.metrics.is_at_chance`)."""
        if not self.evaluations:
            return False
        counts = [self.counted(row)[0] for row in self.last_quarter]
        total = self.counted(self.evaluations[-1])[1]
        ranks = [(row.get("scores") or {}).get("auroc") for row in self.last_quarter]
        if ranks and None not in ranks and np.mean(np.asarray(ranks, dtype=np.float64)) > metrics.chance_auroc(total):
            return False  # a rare class may never have the highest logit
        return metrics.is_at_chance(np.mean(counts, axis=0), total)

    @property
    def not_finite(self) -> int:
        """Return how many local trainings ended in numbers that are not finite."""
        return sum(lost.kind == FaultKind.NOT_FINITE for lost in self.lost)

    @property
    def too_large(self) -> int:
        """Return how many updates were refused since no training that goes well moves a model so far."""
        return sum(lost.kind == FaultKind.TOO_LARGE for lost in self.lost)

    @property
    def learned(self) -> bool:
        """Tell whether the model is finite and better than guessing.

        Without any evaluation nothing speaks against it.
        """
        losses = [row.get("test_loss", 0.0) for row in self.last_quarter]
        # One that was not finite is null in a record; earlier versions wrote NaN.
        return not self.at_chance and all(loss is not None and math.isfinite(loss) for loss in losses)

    @property
    def trouble(self) -> str:
        """Say in a few words why there is nothing to compare; empty where the trial has learned."""
        if self.learned:
            return ""
        return "at chance" if self.at_chance else "test loss not finite"


def warnings(trials: Sequence[LearningMetrics], settings: Mapping[str, Any]) -> list[str]:
    """Say which methods have not learned, or lost local trainings that were not finite, and what to change.

    ``trials``: Finished or not; one that is in its first quarter is left out, as any may still be at chance there.
    ``settings``: The recipe; its learning rate and its clipping are named.
    Returns: A sentence or two for each kind of trouble.
    """
    begun = [trial for trial in trials if 4 * trial.rounds_done >= trial.rounds_planned]
    stuck = [trial for trial in begun if not trial.learned]
    unstable = [trial for trial in trials if trial.not_finite]
    too_far = [trial for trial in stuck if trial.too_large]
    said = []
    if stuck:
        first = stuck[0]
        guess = f"{100 * first.recent_accuracy:.1f} % where guessing gives {100 * first.chance:.1f} %"
        said.append(
            f"{_named(stuck)} did not learn: accuracy is at chance ({guess}), and so is its mean over classes. What "
            "such a method forgets says nothing, and it is compared with no other."
        )
    for found, ended in (
        (unstable, "ended in numbers that are not finite"),
        (too_far, "ended too far from where they began, and were refused"),
    ):
        if found:
            lost = sum(trial.not_finite if found is unstable else trial.too_large for trial in found)
            asked = sum(len(row.get("cohort", ())) for trial in found for row in trial.rounds)
            said.append(f"{lost:,} of {asked:,} local trainings of {_named(found)} {ended}.")
    if unstable or too_far:
        rate, clip = _change(settings, "lr", 0.1), _change(settings, "max_grad_norm", 0.1)
        said.append(f"Local training diverges. Lower the learning rate, {rate}, or clip gradients, {clip}.")
    elif stuck:
        rates = _change(settings, "lr", 10, 0.1)
        said.append(f"Give it more rounds (--rounds), or change the learning rate, {rates}.")
    return said


def _named(trials: Sequence[Record]) -> str:
    """Return the labels of trials, each with its seeds."""
    seeds: dict[str, list[int]] = {}
    for trial in trials:
        seeds.setdefault(trial.label, []).append(trial.seed)
    return ", ".join(
        f"{label} (seed{'s' * (len(numbers) > 1)} {', '.join(map(str, dict.fromkeys(numbers)))})"
        for label, numbers in seeds.items()
    )


def _change(settings: Mapping[str, Any], option: str, *factors: float) -> str:
    """Say how to change an option of local training: to multiples of what it is, if that is known."""
    value = settings.get("training", {}).get(option)
    if not isinstance(value, int | float):
        return f"--set training.{option}=1" if option == "max_grad_norm" else f"--set training.{option}"
    return f"--set training.{option}={' or '.join(f'{value * factor:g}' for factor in factors)} (it is {value:g})"
