"""Whether the model still answers: a run stops whose accuracy fell to chance and stays there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedkeep.rounds.reply_step import ReplyStep, Round, begins_task
from fedkeep.rounds.state import SimulationState

AT_CHANCE, FAR_ABOVE = 0.05, 0.3
"""Accuracies that count as chance, and as far above it, as shares of the way from chance to 100 %."""


@dataclass
class Accuracies:
    """The highest accuracy in this task, its round, and the number of evaluations in a row at chance."""

    best: float = 0.0
    best_round: int = 0
    at_chance: int = 0


class Collapse(ReplyStep):
    """Stops a run whose accuracy has been at chance for a while, after it was far above."""

    kept: Accuracies

    def __init__(self) -> None:
        self.kept = Accuracies()

    def bears_sums(self, state: SimulationState) -> bool:
        return True

    def begin_round(self, state: SimulationState, number: int) -> None:
        if begins_task(state, number):
            self.kept = Accuracies()

    def end_round(self, round: Round, record: Mapping[str, Any]) -> None:
        if "correct" not in record:
            return
        state, kept = round.state, self.kept
        tested = sum(record["total"]) if "total" in record else len(state.federation.dataset.test["label"])
        accuracy = sum(record["correct"]) / max(tested, 1)
        chance = 1 / state.context.num_classes
        is_at_chance = accuracy <= chance + AT_CHANCE * (1 - chance)
        was_far_above = kept.best >= chance + FAR_ABOVE * (1 - chance)
        kept.at_chance = kept.at_chance + 1 if is_at_chance and was_far_above else 0
        if accuracy >= kept.best:
            kept.best, kept.best_round = accuracy, round.number

    def reason_to_stop(self, state: SimulationState) -> str:
        if not 0 < state.settings.defense.collapsed_rounds <= self.kept.at_chance:
            return ""
        return (
            f"the accuracy has been at chance in the last {self.kept.at_chance} evaluations, and was "
            f"{self.kept.best:.1%} after round {self.kept.best_round}, which is the round to go back to."
        )
