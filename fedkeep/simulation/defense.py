"""What a run believes of its clients: the section ``[defense]`` of a recipe, and what is kept of earlier replies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any, Literal, TypeAlias

from fedkeep.options import Options, option

RobustRule = Literal["mean", "median", "trimmed_mean", "norm_clipping", "krum", "multi_krum"]
"""How replies that are asked for together are made robust, before the method aggregates them."""

Checker = Literal["off", "server", "clients"]
"""Who measures the loss of a returned model before it is used."""

HISTORY_LENGTH = 32
"""Number of updates whose norms and other measurements are kept, as the reference for clients asked one at a time."""
REMEMBERED_REPLIES = 8
"""Number of each client's replies that are recognised when they are sent again."""
MIN_FOR_MEDIAN = 3
"""Fewest norms whose median says what is usual."""
FORGIVEN = 0.25
"""What an accepted reply takes off a client's number of refused ones."""
MOST_DOUBLINGS = 4
"""How often the rounds are doubled for which a client is not drawn."""
AT_CHANCE, FAR_ABOVE = 0.05, 0.3
"""Accuracies that count as chance, and as far above it, as shares of the way from chance to 100 %."""

NormAndFingerprints: TypeAlias = tuple[float, str, str]
"""An update: its norm, and fingerprints of the model that was sent and of the one that was returned."""


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
    collapsed_rounds: int = option(
        0, "evaluations in a row at chance, after the accuracy was far above, after which a run stops; 0: never", low=0
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
    loss_check: Checker = option(
        "off",
        "who measures whether a client's training raised the loss on the classes that it says it holds: the server on "
        "its own examples, or up to 3 other clients on theirs, of which the median counts",
    )
    loss_examples: int = option(
        8, "most examples of each class on which the server measures; more cost more, and tell more surely", low=1
    )
    loss_slack: float = option(
        0.15, "by how much it may be raised, in nats; five times that where clients measure it on few examples", low=0.0
    )
    logit_deviations: float = option(
        4.0,
        "where the server measures: by how many median absolute deviations more than with the last 32 models the logit "
        "of a class that a client holds may rise on images of other classes; beyond half of them the training is "
        "re-run, which decides; 0: what was learned is not compared",
        low=0.0,
    )

    def num_byzantine(self, count: int) -> int:
        """Return how many of some clients are assumed to be malicious: the share, rounded down, and one at least."""
        return max(1, floor(self.byzantine * count + 1e-9)) if self.byzantine else 0


@dataclass
class ReplyHistory:
    """What is kept of earlier replies, from round to round and in checkpoints.

    ``refused``: Number of rounds in which a reply was refused, less `FORGIVEN` for each in which one was accepted, by
        client.
    ``backoffs``: Number of rounds for which a client is not drawn, after a reply that the loss check refused.
    ``norms``: Norms of the last accepted updates.
    ``similarities``: Least cosine similarities of the last accepted updates' models with those that were sent.
    ``models``: By client, fingerprints of the models that it was sent and of those that it returned.
    ``label_counts``: By client, its examples of each class in this task, as it once told; only if losses are checked.
    ``loss_falls``, ``logit_excesses``, ``losses``: Of the last measured models, see `fedkeep.simulation.loss_check`.
    ``explained``: By client, the number of its trainings in this task that a re-run explained, see there.
    ``refused_rounds``: Number of rounds in a row in which all replies were refused.
    ``best``: The highest accuracy of an evaluation in this task.
    ``best_round``: The round of it; 0 before the first evaluation.
    ``collapsed``: Number of evaluations in a row at chance.
    """

    refused: dict[str, float] = field(default_factory=dict)
    backoffs: dict[str, int] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    similarities: list[float] = field(default_factory=list)
    models: dict[str, list[list[str]]] = field(default_factory=dict)
    label_counts: dict[str, list[float]] = field(default_factory=dict)
    loss_falls: list[float] = field(default_factory=list)
    logit_excesses: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    explained: dict[str, int] = field(default_factory=dict)
    refused_rounds: int = 0
    best: float = 0.0
    best_round: int = 0
    collapsed: int = 0

    def is_set_aside(self, client: str, defense: Defense) -> bool:
        """Tell whether a client is not asked, since its replies were refused."""
        return self.rounds_aside(client, defense) > 0

    def rounds_aside(self, client: str, defense: Defense) -> float:
        """Return for how many more rounds a client is not asked; infinity if it is set aside for good."""
        for_good = 0 < defense.refusals <= self.refused.get(client, 0)
        return inf if for_good else self.backoffs.get(client, 0)

    def end_round(
        self,
        answered: Iterable[str],
        refused: Collection[str],
        updates: Mapping[str, Sequence[NormAndFingerprints]],
        label_counts: Mapping[str, list[float]],
        loss_falls: Sequence[float] = (),
        logit_excesses: Sequence[float] = (),
        similarities: Sequence[float] = (),
        losses: Sequence[float] = (),
        explained: Mapping[str, int] | None = None,
        backoffs: Mapping[str, int] | None = None,
    ) -> None:
        """Keep what a round showed. If no reply could be used, the fault may be the model's: no client is blamed.

        ``answered``: Clients of whom a reply was accepted.
        ``updates``: By client, the norm of each accepted update, and fingerprints of the models sent and returned.
        ``label_counts``: Label counts that clients told, by client.
        ``explained``: By client, the number of its trainings that a re-run explained, after this round.
        ``backoffs``: By client whose reply the loss check refused, for how many rounds it is not drawn the first time.
        """
        useful = set(answered) - set(refused)
        self.refused_rounds = self.refused_rounds + 1 if refused and not useful else 0
        self.backoffs = {client: rounds - 1 for client, rounds in self.backoffs.items() if rounds > 1}
        for client in useful & self.refused.keys():
            self.refused[client] -= FORGIVEN
            if self.refused[client] <= 0:
                del self.refused[client]
        for client in refused if useful else ():
            self.refused[client] = times = self.refused.get(client, 0.0) + 1
            if rounds := (backoffs or {}).get(client):
                self.backoffs[client] = rounds * 2 ** min(int(times) - 1, MOST_DOUBLINGS)
        for client, sent in updates.items():
            known = [*self.models.get(client, ()), *([before, after] for _, before, after in sent)]
            self.models[client] = known[-REMEMBERED_REPLIES:]
        norms = [norm for sent in updates.values() for norm, _, _ in sent if norm > 0]
        self.norms = [*self.norms, *norms][-HISTORY_LENGTH:]
        self.label_counts |= label_counts
        self.loss_falls = [*self.loss_falls, *loss_falls][-HISTORY_LENGTH:]
        self.logit_excesses = [*self.logit_excesses, *logit_excesses][-HISTORY_LENGTH:]
        self.similarities = [*self.similarities, *similarities][-HISTORY_LENGTH:]
        self.losses = [*self.losses, *losses][-HISTORY_LENGTH:]
        self.explained |= explained or {}

    def add_accuracy(self, accuracy: float, chance: float, round: int) -> None:
        """Keep what an evaluation showed.

        ``accuracy``: Share of correct predictions.
        ``chance``: That of a model which predicts at random.
        ``round``: The round, counted over the whole run.
        """
        at_chance = accuracy <= chance + AT_CHANCE * (1 - chance)
        was_far_above = self.best >= chance + FAR_ABOVE * (1 - chance)
        self.collapsed = self.collapsed + 1 if at_chance and was_far_above else 0
        if accuracy >= self.best:
            self.best, self.best_round = accuracy, round

    def begin_task(self) -> None:
        """Forget what holds for one task only: accuracies, label counts, and who is not drawn for a while."""
        self.best, self.best_round, self.collapsed, self.label_counts = 0.0, 0, 0, {}
        self.explained, self.backoffs = {}, {}

    def forget_measurements(self) -> None:
        """Forget what was usual in the last task. Its first round is still judged by it: nothing else is known then."""
        self.norms, self.similarities = [], []
        self.loss_falls, self.logit_excesses, self.losses = [], [], []

    def reason_to_stop(self, defense: Defense, finished: int) -> str | None:
        """Tell whether the model no longer answers.

        ``defense``: After how many rounds a run stops.
        Returns: Why the run stops, and the round to go back to; None if it goes on.
        """
        if 0 < defense.refused_rounds <= self.refused_rounds:
            good = finished - self.refused_rounds
            return (
                f"no reply of the last {self.refused_rounds} rounds could be used, so that they changed nothing. The "
                f"model is that of round {good}; the replies that made it, or its learning rate, are the likely cause."
            )
        if 0 < defense.collapsed_rounds <= self.collapsed:
            return (
                f"the accuracy has been at chance in the last {self.collapsed} evaluations, and was {self.best:.1%} "
                f"after round {self.best_round}, which is the round to go back to."
            )
        return None

    def to_table(self) -> dict[str, Any]:
        """Return it as JSON can represent it."""
        return dict(vars(self))
