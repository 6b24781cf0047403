"""The sections ``[run]``, ``[defense]`` and ``[attack]`` of a recipe: rounds, evaluations, who is believed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any, Literal

import torch

from fedkeep._utils import seeds
from fedkeep.errors import ConfigError
from fedkeep.interface import Algorithm
from fedkeep.options import Options, option

EvaluationModel = Literal["last", "round", "moving"]
"""What is evaluated.

``last``: `Server.eval_model` if the method sets it, otherwise the global model. ``round``: for sequential methods the
mean of the models that clients returned in a round, with equal weights, without those of clients that have no examples;
for parallel methods the global model. ``moving``: the moving average of the ``round`` models.
"""
AVERAGE_SUFFIX: dict[EvaluationModel, str] = {"last": "", "round": ", mean of the round", "moving": ", moving average"}
"""What a label says of an evaluation model."""


def distinct_models(chosen: Sequence[EvaluationModel], algorithm: Algorithm[Any, Any]) -> tuple[EvaluationModel, ...]:
    """Return the evaluation models of a method, each model once.

    ``chosen``: Those that the recipe names (``run.evaluation_models``).
    ``algorithm``: The method. The global model of a parallel one is the mean of its round already, so that ``round`` is
        left out where ``last`` is chosen too. Of one that says itself which model counts (`Algorithm.sets_eval_model`)
        only ``last`` is left.
    """
    if algorithm.sets_eval_model:
        return ("last",)
    return tuple(which for which in chosen if algorithm.sequential or which != "round" or "last" not in chosen)


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
        "largest norm of a client's update, in medians of the others' norms; below 3 norms of the model none is "
        "refused; 0: no limit",
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
        "rounds for which a client is not drawn after a reply that the loss check refused; doubled for each earlier "
        "refusal that four accepted replies have not made up for",
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
        "share of a cohort that is assumed to be malicious, for trimmed_mean and (multi_)krum; if above 0, at least "
        "one client",
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
