"""Whether a client's training raised the loss on the classes that the client holds.

Honest training lowers that loss, however different clients are, and whatever it makes the model forget of other
classes. So no honest client is refused for being different, and a client that sends anything but the result of a
training stands out: its update turned round, or random weights. What such a training taught shows in the logits: on
which images a class's logit rose most (`logit_rise`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from statistics import fmean, linear_regression, median, pstdev

from torch import Tensor

from fedkeep.rounds.defense import HISTORY_LENGTH
from fedkeep.training.model_check import ClassScores, mean_of_labels

CHECKERS = 3
"""Number of clients that measure a model, so that one liar among them decides nothing."""

CLIENTS_SLACK = 5.0
"""How much more of a rise clients allow than the server: they measure on few examples, on which they have trained."""

FEWEST, SMALLEST_SHARE = 5, 0.15
"""A class of fewer examples, or of a smaller share of the client's, says too little about what it was taught. One of
fewer and of a smaller share is one that the client lacks: who exchanges labels may have a few examples of it."""
MOST_LOSS = 2.0
"""Mean loss of the model before, over that of a guess, beyond which it is ruined: every training turns such a model
round, and says nothing of its images."""
FEWEST_KNOWN = 8
"""How many models a model is compared with, at least."""
SMALLEST_EXCESS = 0.05
"""An excess that is never refused, since a few images of a class say no more."""
SMALLEST_DEVIATION = 0.05
"""A median absolute deviation of excesses that is never undercut, for the same reason."""
SUSPECTED, CALMER = 0.5, 0.25
"""The deviation from which a training is re-run, and by how much more a client's must deviate for each of its
trainings that a re-run explained, as shares of `Defense.logit_deviations`. At 2 and 1, five of six trainings on flipped
labels of digits are re-run, and 3 % of the honest ones; of the honest ones of Fashion-MNIST 6 to 11 %."""
MAX_EXPLAINED_RESIDUAL = 0.75
"""The residual of a rise (see `standardised_residual`) up to which a re-run explains it."""
LIKE_FALSE_LABELS = 2 / 3
"""How far an excess may be on the way from a re-run's to that of a re-run with false labels (see
`false_label_likeness`). Of trainings on flipped labels that were re-run, 95 of 105 of digits and 40 of 49 of
Fashion-MNIST are farther on it and have larger residuals; of honest ones 0 of 74, and 15 of 169."""
SMALLEST_CONTRAST = 0.05
"""The length of this way from which it tells anything."""
SAME_EXCESS = 0.25
"""A re-run whose own excess is this share of the client's explains it: the model takes images of the one class for the
other, whoever trains it. With a quarter of the client's number of images it explains 23 of 50 trainings of honest
clients that were re-run on Fashion-MNIST (SFedKD), and 3 of 425 of label flips on digits."""
LARGE_MARGIN, MARGIN_FACTOR = 0.75, 2.0
"""A margin (see `LogitRise`) from which deviations and residuals are divided by the second number. What a client lacks
is forgotten as it trains, and then looks like what it holds: similar clothes most of all. But in the end its own images
have by far the larger logit. Of honest excesses that deviate by 2.5 or more half have a smaller margin on Fashion-MNIST
(SFedKD), and a fifth on digits; of those of label flips five of six."""
FEWEST_OTHERS = 3
"""Further classes that the client lacks, at least, from which a line between a re-run's rises and the client's is
fitted. With fewer the re-run's own rise is what is expected."""
SMALLEST_SPREAD = 0.05
"""A standard deviation of rises that is never undercut, since a few images of a class say no more."""
FREE_LOSS, FIRST_LOSS, LOSS_FACTOR = 10.0, 50.0, 10.0
"""Mean loss over all classes, in nats, that is never too large; that is, as long as few models are known; and how many
times the usual one is. Honest training left 14 at most, and 2.5 times the usual one (2,720 hops; the most in sequences
on Fashion-MNIST, whose clients hold two classes and forget eight); an update that was multiplied by 100, and yet short
enough for the limits of norms, 55 to 190."""


@dataclass(frozen=True)
class LogitRise:
    """How a class's logit rose with a training, and where it stands afterwards.

    ``label``: The class, of those that the client holds, with the largest excess.
    ``other``: The class, of those that the client lacks, on whose images the excess is largest.
    ``excess``: By how much more its logit rose on images of another class, which the client lacks, than on its own: the
        largest difference.
    ``margin``: By how much larger this logit is afterwards on images of the class than on those of this other one, as a
        share of how much larger it is than on those of the median class that the client lacks.
    """

    label: int
    other: int
    excess: float
    margin: float


def logit_rise(before: ClassScores, after: ClassScores, counts: Tensor) -> LogitRise | None:
    """Return on which images the logits of a client's classes rose.

    Who trains on true images of a class raises its logit on these, even while the model forgets the classes that the
    client lacks. Who trains on other images under its label raises it on them.

    ``before``, ``after``: Of the model that the client was sent, and of the one that it returned.
    ``counts``: The client's label counts, [classes].
    Returns: None if the client holds or lacks no class, if it holds few examples, or if the model before was ruined.
    """
    if before.loss.nanmean() > MOST_LOSS * log(len(counts)):
        return None
    rise = after.mean_logits - before.mean_logits
    measured = rise.isfinite().all(1)
    held, lacking = (classes.to(rise.device) & measured for classes in _held_and_lacking(counts))
    if not held.any() or not lacking.any():
        return None
    classes, others = held.nonzero().flatten(), lacking.nonzero().flatten()
    excesses = rise[others][:, classes].amax(0) - rise[classes, classes]
    one = int(classes[excesses.argmax()])
    other = int(others[rise[others, one].argmax()])
    margin = _margin(after.mean_logits[:, one].tolist(), one, other, others.tolist())
    return LogitRise(one, other, float(excesses.max()), margin)


def _held_and_lacking(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return which classes a client holds enough of, and which it lacks, [classes] each."""
    many, large = counts >= FEWEST, counts >= SMALLEST_SHARE * counts.sum()
    return many & large, ~(many | large)


def standardised_residual(
    label: int, before: ClassScores, after: ClassScores, rerun: ClassScores, counts: Tensor
) -> float:
    """Return how much more a class's logit rose on images of another class than a re-run of the training explains.

    A model that forgets takes some images for the client's classes, whoever trains it: those of similar clothes, or of
    a class that it has just learned badly. The server's own images of the client's classes, trained on in the same way,
    show which. What false labels taught, they do not show.

    ``before``, ``after``: Of the model that the client was sent, and of the one that it returned.
    ``counts``: The client's label counts, [classes].
    Returns: The rise on images of another class, less the one that is expected there, in standard deviations of the
        rises on images of all further classes that the client lacks. Expected is what a straight line through these
        says, from the re-run's rises to the client's; a line that falls counts as level. The largest over the other
        classes with an excess that the re-run does not show; half of it for one with a large margin.
    """
    usable = before.mean_logits.isfinite().all(1) & _held_and_lacking(counts)[1].to(before.mean_logits.device)
    lacking = list[int](usable.nonzero().flatten().tolist())
    start, end, other_end = (scores.mean_logits[:, label].tolist() for scores in (before, after, rerun))
    found = [late - early for late, early in zip(end, start, strict=True)]
    expected = [late - early for late, early in zip(other_end, start, strict=True)]
    residuals = [0.0]
    for other in lacking:
        excess = found[other] - found[label]
        if excess <= SMALLEST_EXCESS or expected[other] - expected[label] >= SAME_EXCESS * excess:
            continue
        x, y = ([rises[one] for one in lacking if one != other] for rises in (expected, found))
        doubt = _doubt(_margin(end, label, other, lacking))
        if len(x) < FEWEST_OTHERS:
            residuals.append((found[other] - expected[other]) / (SMALLEST_SPREAD * doubt))
            continue
        slope = max(0.0, linear_regression(x, y).slope) if max(x) > min(x) else 0.0
        residual = found[other] - fmean(y) - slope * (expected[other] - fmean(x))
        residuals.append(residual / (max(SMALLEST_SPREAD, pstdev(y)) * doubt))
    return max(residuals)


def false_label_likeness(
    rise: LogitRise, before: ClassScores, after: ClassScores, rerun: ClassScores, flipped: ClassScores
) -> float:
    """Return how far a training is on the way from one on true labels to one on false labels.

    ``rise``: How the client's logit rose.
    ``before``, ``after``: Of the model that the client was sent, and of the one that it returned.
    ``rerun``, ``flipped``: Of the models that the server's re-runs returned: with its own images of the client's
        classes; and with images of `rise.other` in the place of those of `rise.label`, under the label of the latter.
    Returns: 0 where the excess is that of the first re-run, 1 where it is that of the second; 0 too if the two hardly
        differ, so that nothing can be told.
    """
    found, true, false = (
        float(excesses[rise.other] - excesses[rise.label])
        for excesses in ((scores.mean_logits - before.mean_logits)[:, rise.label] for scores in (after, rerun, flipped))
    )
    return (found - true) / (false - true) if false - true > SMALLEST_CONTRAST else 0.0


def _margin(logits: Sequence[float], label: int, other: int, lacking: Sequence[int]) -> float:
    """Return a margin (see `LogitRise`) from a class's logit on images of each class."""
    usual = logits[label] - median(logits[one] for one in lacking)
    return (logits[label] - logits[other]) / max(usual, SMALLEST_DEVIATION)


def _doubt(margin: float) -> float:
    """Return by what a deviation or a residual is divided."""
    return MARGIN_FACTOR if margin >= LARGE_MARGIN else 1.0


def fall_of_loss(before: ClassScores, after: ClassScores, counts: Tensor) -> float | None:
    """Return by which share a client's training lowered the loss on its classes.

    Honest training teaches a model what it does not know. Random weights, or a classifier with exchanged classes, leave
    such a model as it was: the loss does not rise either.

    ``before``, ``after``: Of the model that the client was sent, and of the one that it returned.
    ``counts``: The client's label counts, [classes].
    Returns: The share; None if the loss was less than half that of a guess, so that little was left to learn.
    """
    losses = [mean_of_labels(scores.loss, counts) for scores in (before, after)]
    known, new = (0.0 if loss is None else loss for loss in losses)
    return (known - new) / known if known > log(len(counts)) / 2 else None


def smallest_fall(known: Sequence[float]) -> float:
    """Return the smallest fall of the loss that is accepted: a tenth of the median of the last models'.

    Returns: The limit; minus infinity as long as few are known.
    """
    last = known[-HISTORY_LENGTH:]
    return median(last) / 10 if len(last) >= FEWEST_KNOWN else -inf


def deviation(rise: LogitRise, known: Sequence[float]) -> float:
    """Return by how many median absolute deviations an excess lies above the median of the last models'.

    What is usual follows the last models, honest and other ones, since the excess of honest clients depends on the
    network: one that forgets a class wholly takes its images for the client's classes.

    Returns: The deviation, half of it with a large margin; 0 as long as few are known, and 0 at most if the excess is
        small.
    """
    if len(known) < FEWEST_KNOWN:
        return 0.0
    last = known[-HISTORY_LENGTH:]
    middle = median(last)
    spread = max(SMALLEST_DEVIATION, median(abs(one - middle) for one in last))
    found = (rise.excess - middle) / (spread * _doubt(rise.margin))
    return min(0.0, found) if rise.excess <= SMALLEST_EXCESS else found


def suspected_deviation(explained: int, limit: float) -> float:
    """Return the deviation from which a client's training is re-run.

    Some honest clients stand out every time: those whose classes look like others. So it is the larger, the more of a
    client's trainings a re-run has explained.
    """
    return min(SUSPECTED + CALMER * explained, 1.0) * limit


def largest_loss(known: Sequence[float]) -> float:
    """Return the largest mean loss over all classes that a training may leave.

    Clients forget the classes that they lack, so that this loss may rise. But however much they forget, an update that
    was multiplied leaves far more: it teaches its client's classes, and ruins the model for all others.
    """
    last = known[-HISTORY_LENGTH:]
    return max(FREE_LOSS, LOSS_FACTOR * median(last)) if len(last) >= FEWEST_KNOWN else FIRST_LOSS


def choose_checkers(client: str, cohort: Sequence[str], counts: Mapping[str, Tensor]) -> list[str]:
    """Choose the clients that measure another one's model on their examples.

    ``counts``: Label counts by client, of those that can be asked.
    Returns: The next clients in the order of the cohort, of those that hold some of its classes; at most `CHECKERS`.
    """
    start = cohort.index(client) if client in cohort else 0
    following = [name for name in (*cohort[start + 1 :], *cohort[:start]) if name != client and name in counts]
    return [name for name in following if bool((counts[name] * counts[client] > 0).any())][:CHECKERS]
