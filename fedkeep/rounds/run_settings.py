"""The section ``[run]`` of a recipe: rounds, cohorts, and when models are evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedkeep.errors import ConfigError
from fedkeep.options import Options, option
from fedkeep.rounds.evaluation_models import EvaluationModel


@dataclass(frozen=True)
class RunSettings(Options):
    """Options of a run: its rounds, its cohorts, and what is evaluated when."""

    rounds: int = option(100, "communication rounds; with tasks, of each", low=1)
    cohort_size: int = option(10, "clients sampled for each round, without replacement", low=1)
    min_clients: int = option(1, "a round with fewer replying clients is rolled back", low=1)
    client_dropout: float = option(0.0, "share of clients that are lost in a round, at random", low=0.0, high=1.0)
    evaluate_every: int = option(1, "rounds between evaluations; the last round is always evaluated", low=1)
    evaluation_window: float = option(
        0.5,
        "rounds at the end, of each task, over which tables average: a share of them (below 1) or a number",
        low=0.01,
    )
    evaluate_local_models: bool = option(
        False, "in evaluated rounds, also evaluate the model that each client returns (slow)"
    )
    client_test: float | Literal["own"] = option(
        0.0,
        "clients test models themselves: on this share of their examples, which is held back, or on the test examples "
        "that the data name as theirs (own; at sites, the site's test examples); 0: the server tests",
        low=0.0,
        high=0.5,
    )
    evaluation_models: tuple[EvaluationModel, ...] = option(
        ("last", "round", "moving"),
        "models that are evaluated, each in its own row; `fedkeep export` takes the one that averages most",
    )
    metric: str = option(
        "",
        "metric by which methods are first compared, such as auroc; then F1, AUROC, calibration and specificity are "
        "measured too; empty: accuracy",
    )
    ema_decay: float = option(
        0.8, "weight of the old value in the moving average of models, each round", low=0.0, high=1.0
    )

    def check(self) -> None:
        """Refuse an empty list of evaluation models, and one with duplicates."""
        if not self.evaluation_models or len(set(self.evaluation_models)) < len(self.evaluation_models):
            raise ConfigError(
                f"run.evaluation_models must name last, round or moving, each once, not {list(self.evaluation_models)}."
            )

    def position(self, number: int) -> tuple[int, int]:
        """Return the task and its round.

        ``number``: A round, counted from 1 over the whole run.
        Returns: The task and the round of this task, both counted from 1.
        """
        task, round = divmod(number - 1, self.rounds)
        return task + 1, round + 1

    def is_due(self, round: int) -> bool:
        """Tell whether models are evaluated after a round; after the last of a task they always are."""
        return round % self.evaluate_every == 0 or round == self.rounds
