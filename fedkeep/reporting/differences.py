"""What a method gains on another, seed by seed, and whether the two are separated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedkeep import metrics
from fedkeep.errors import RunError, did_you_mean
from fedkeep.reporting.metric import LoggedMetric, Metric, metric_of
from fedkeep.reporting.summary import Row, within_one_seed
from fedkeep.reporting.trial import TrialResult

EXPLANATION = (
    "In brackets the 95 % interval of the mean difference: Student's t over the seeds that both have. With one seed, "
    "marked *, it is estimated from the means of blocks of the window's evaluations and says nothing of other seeds. "
    "Where it contains 0, the two are not separated."
)


@dataclass(frozen=True)
class Difference:
    """What a method gained on the reference, on the seeds that both have.

    ``label``, ``reference``: Of the two methods.
    ``values``: The difference with each of these seeds.
    ``interval``: Their mean with its confidence interval.
    ``reason``: Why there are no values; empty where there are, and without a seed that both have.
    """

    label: str
    reference: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    interval: metrics.Interval
    reason: str = ""


def difference(row: Row, reference: Row, metric: str | Metric) -> Difference:
    """Return what one row gained on another, paired by seed.

    Pairing takes out what the seeds have in common (partition, initial weights, cohorts), so fewer seeds tell more.

    ``row``, ``reference``: Trials that differ in what was measured are not compared: there is then no seed.
    Returns: With an interval over seeds, or, of one seed, over blocks of the window's evaluations if the metric is
        their mean.
    """
    metric = metric_of(metric)
    ours, theirs = ({trial.seed: trial for trial in side.trials} for side in (row, reference))
    pairs = {seed: (trial, theirs[seed]) for seed, trial in ours.items() if seed in theirs}
    reasons = {seed: _mismatch(*pair, metric) for seed, pair in pairs.items()}
    pairs = {seed: pair for seed, pair in pairs.items() if not reasons[seed]}
    gains = {seed: metric.of(a) - metric.of(b) for seed, (a, b) in pairs.items()}
    gains = {seed: gain for seed, gain in gains.items() if not math.isnan(gain)}
    interval = metrics.t_interval(gains.values())
    if len(gains) == 1 and metric.series:
        trial, other = pairs[next(iter(gains))]
        interval = within_one_seed(metrics.paired(metric.by_round(trial), metric.by_round(other)), trial, other)
    reason = "" if pairs else next((f"not comparable: {reason}" for reason in reasons.values()), "")
    return Difference(row.label, reference.label, tuple(gains), tuple(gains.values()), interval, reason)


def _mismatch(trial: TrialResult, other: TrialResult, metric: Metric) -> str:
    """Say in what two trials differ so that no method can be told from it; empty where they are comparable."""
    if trial.info.get("dataset") != other.info.get("dataset"):
        return "other data"
    digests = [one.info.get("dependencies", {}).get("data set") for one in (trial, other)]
    if all(digests) and digests[0] != digests[1]:
        return "other data"
    if trial.info.get("test_total") != other.info.get("test_total"):
        return "other test examples"
    ours, theirs = trial.partition, other.partition
    same = ours.get("hash") and ours.get("hash") == theirs.get("hash")  # whatever versions call its settings
    if not same and any(ours.get(key) != theirs.get(key) for key in ("scheme", "settings")):
        return "other partition"
    if isinstance(metric, LoggedMetric) and (without := [one for one in (trial, other) if not metric.by_round(one)]):
        return f"{' and '.join(one.label for one in without)} recorded no {metric.title} in the window"
    if metric.covers_window and trial.window_rounds != other.window_rounds:
        return "windows differ"
    # The best of more evaluations is higher, and what is lost since then is more.
    rounds = [metric.by_round(one).keys() for one in (trial, other)]
    if (metric.of_history and trial.evaluated.tolist() != other.evaluated.tolist()) or rounds[0] != rounds[1]:
        return "evaluated in other rounds"
    return ""


def difference_or_reason(row: Row, reference: Row, metric: str | Metric) -> Difference:
    """Return the `difference` of two rows, or why there is none, such as ``at chance``."""
    if not (trouble := row.trouble or (reference.trouble and f"reference {reference.trouble}")):
        return difference(row, reference, metric)
    return Difference(row.label, reference.label, (), (), metrics.t_interval(()), trouble)


def differences(rows: Sequence[Row], reference: str, metric: str | Metric = "window_mean") -> list[Difference]:
    """Return each other finished method's difference to the reference, as `difference_or_reason` has it."""
    metric = metric_of(metric)
    table = {row.label: row for row in rows if row.finished}
    named = {label.lower(): label for label in table}
    reference = named.get(reference.lower(), reference)
    variants = [label for label in table if label.lower().startswith(f"{reference.lower()} (")]
    if reference not in table and variants:
        raise RunError(f"{reference} was run with different settings. Name one: {'; '.join(variants)}.")
    if reference not in table:
        raise RunError(f"There is no finished method {reference!r} to compare with.{did_you_mean(reference, table)}")
    return [difference_or_reason(row, table[reference], metric) for label, row in table.items() if label != reference]


def leaders(rows: Sequence[Row], metric: str | Metric) -> set[int]:
    """Return the index of the finished row that is better than each other one by an interval that leaves out 0.

    A method that has not learned is no other one: it forgets nothing, and costs nobody a lead. Nor is one of whose
    window rounds were rolled back.

    Returns: Empty where there is no such row, or nothing to rank: the best mean alone does not lead.
    """
    metric = metric_of(metric)
    known = {i: row for i, row in enumerate(rows) if row.finished and not row.trouble}
    means = {i: metric.better * row.value(metric).mean for i, row in known.items()}
    means = {i: mean for i, mean in means.items() if not math.isnan(mean)}
    if not metric.better or len(means) < 2:
        return set()
    first = max(means, key=lambda i: means[i])
    gains = [difference(rows[first], rows[i], metric).interval for i in means if i != first]
    return {first} if all(gain.separated and metric.better * gain.mean > 0 for gain in gains) else set()


def show_difference(found: Difference, *, percent: bool = True) -> str:
    """Return a difference with its interval in few characters, and whether it separates the two methods.

    Such as ``"+1.94 [+0.51, +3.37]"``, ``"-0.20 [-1.70, +1.30], not separated"`` or, within one seed,
    ``"+0.40 [+0.10, +0.70]*"``.
    """
    interval, scale = found.interval, 100 if percent else 1
    if found.reason:
        return found.reason
    if math.isnan(interval.mean):
        return "–"
    text = f"{scale * interval.mean:+.2f}"
    if not interval.known:
        return f"{text}, no interval"
    text += f" [{scale * interval.low:+.2f}, {scale * interval.high:+.2f}]" + "*" * interval.blocks
    return text if interval.separated else f"{text}, not separated"


def show_interval(interval: metrics.Interval, *, percent: bool = True) -> str:
    """Return an interval in few characters, such as ``"[83.10, 85.20]"``, with * within one seed; empty without one."""
    scale = 100 if percent else 1
    if not interval.known:
        return ""
    return f"[{scale * interval.low:.2f}, {scale * interval.high:.2f}]" + "*" * interval.blocks
