"""What a newcomer should take from a table, in sentences: methods against methods, and the averages of models apart."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedkeep.reporting.metric import Metric, headline, rounds_covered, show_number
from fedkeep.reporting.summary import Difference, Row, deduplicate, difference, trials_of
from fedkeep.reporting.trial import TrialResult
from fedkeep.rounds.run_settings import AVERAGE_SUFFIX

TELLING = 0.2
"""Loss of a class from which it is told."""
ENOUGH_EXAMPLES = 30
"""Test examples from which the accuracy of a class says something."""
NAMED = 3
"""Methods that a sentence names; of more it says how many."""


def findings(rows: Sequence[Row]) -> list[str]:
    """Say how methods compare in accuracy, what one round took from a class, and what averaging models gains.

    Returns: A sentence each, of what there is to compare, the most telling first.
    """
    metrics = headline(trials_of(rows))
    accuracy, forgetting = (_methods_apart(last_models(rows), metric) for metric in metrics)
    said = (accuracy, _worst_losses(rows), forgetting, _averages(rows, metrics[0]))
    return [sentence for sentence in said if sentence]


def last_models(rows: Iterable[Row]) -> list[Row]:
    """Return the finished rows of methods, without those of averages of their models or of what did not learn."""
    return [row for row in rows if _compares(row) and row.evaluation_model == "last"]


def is_undecided(rows: Iterable[Row]) -> bool:
    """Tell whether some method is not separated from the most accurate one."""
    methods = last_models(rows)
    metric = headline(trials_of(methods))[0]
    if not methods:
        return False
    best, found = _from_the_best(methods, metric)
    without_seeds = (math.isnan(one.interval.mean) and not one.reason for one in _differences(best, methods, metric))
    return any(without_seeds) or any(not one.interval.separated for one in found)


def _differences(best: Row, rows: Sequence[Row], metric: Metric) -> list[Difference]:
    return [difference(best, row, metric) for row in rows if row is not best]


def _compares(row: Row) -> bool:
    return row.finished and not row.trouble


def _from_the_best(rows: Sequence[Row], metric: Metric) -> tuple[Row, list[Difference]]:
    """Return the best row, and its differences to the others with which it can be compared, the smallest first.

    It is the row of the best mean, but none that is worse than another on the seeds of both, or without such seeds.
    """
    ranked = sorted(rows, key=lambda row: -np.nan_to_num(metric.better * row.value(metric).mean, nan=-math.inf))
    compared = []
    for best in ranked:
        known = [one for one in _differences(best, rows, metric) if not math.isnan(one.interval.mean)]
        lost = any(one.interval.separated and metric.better * one.interval.mean < 0 for one in known)
        compared.append((not known, lost, best, sorted(known, key=lambda one: abs(one.interval.mean))))
    return min(compared, key=lambda each: each[:2])[2:]


def _methods_apart(rows: Sequence[Row], metric: Metric) -> str:
    """Say which methods the best one can be told apart from, and by how much from the nearest of them."""
    if not rows:
        return ""
    best, found = _from_the_best(rows, metric)
    if not found:
        return ""
    values = {row.label: f"{row.label} ({_in_unit(row.value(metric).mean, metric.unit)})" for row in rows}
    alike = [values[one.reference] for one in found if not one.interval.separated]
    apart = [one for one in found if one.interval.separated]
    heading, count = metric.heading(trials_of(rows)), min(len(one.seeds) for one in found)
    seeds = f"{count} seeds" if count > 1 else "one seed"
    heading = heading[:1].upper() + heading[1:]
    if not apart:
        return f"{heading}: {_listed([values[best.label], *alike])} are not separated with {seeds}."
    nearest = apart[0]
    second = values[nearest.reference].removesuffix(")")
    shared = "" if all(len(row.trials) == count for row in rows) else " on the seeds of both"
    said = f"{heading}: {values[best.label]} is {_points(nearest)} {second}; {_interval(nearest)}{shared})"
    if len(apart) > 1:
        others = f"{len(apart) - 1} others" if len(apart) > 2 else values[apart[1].reference]
        said += f", further {_direction(nearest)} {others}"
    return f"{said}, and not separated from {_listed(alike)} with {seeds}." if alike else f"{said}."


def _worst_losses(rows: Sequence[Row]) -> str:
    """Say of each method from where to where a class fell at worst between two evaluations of the window."""
    worst = {row.label: _worst_loss(row) for row in rows if _compares(row)}
    losses = sorted(((*worst[row.label], row.label) for row in last_models(rows)), reverse=True)
    said = [
        f"{label}{' fell' * (not place)} from {100 * before:.0f} to {100 * after:.0f} % on class {name}"
        for place, (lost, before, after, name, label) in enumerate(losses)
        if lost >= TELLING
    ]
    if not said:
        return ""
    averages = [worst[row.label][0] for row in rows if row.label in worst and row.evaluation_model == "moving"]
    kept = f"; moving averages lost {100 * max(averages):.0f} points at most" if averages else ""
    every = all((trial.evaluated[1:] - trial.evaluated[:-1] == 1).all() for trial in trials_of(rows))
    span = "in a single round" if every else "between two evaluations"
    windows = {rounds_covered(trial) for row in last_models(rows) for trial in row.trials}
    where = windows.pop() if len(windows) == 1 else "of the window"
    return f"Forgotten {span}, {where}, at worst: {_listed(said)}{kept}."


def _worst_loss(row: Row) -> tuple[float, float, float, str]:
    """Return the largest loss of a class, its accuracy before and after, and its name."""
    found = [(0.0, 0.0, 0.0, "")]
    for trial in row.trials:
        if trial.task_sizes:
            continue
        history = trial.class_history[trial.evaluated >= trial.window_rounds[0]]
        names = trial.info.get("label_names", [])
        for label, count in enumerate(trial.test_total):
            if count >= ENOUGH_EXAMPLES and len(history) > 1 and label < len(names):
                falls = history[:-1, label] - history[1:, label]
                place = int(falls.argmax())
                before, after = float(history[place, label]), float(history[place + 1, label])
                found.append((before - after, before, after, str(names[label])))
    return max(found)


def _averages(rows: Sequence[Row], metric: Metric) -> str:
    """Say of which methods an average of the models is more accurate than the last model."""
    averaged, gains = False, []
    for row in last_models(rows):
        found = [
            (AVERAGE_SUFFIX[other.evaluation_model].removeprefix(", "), difference(other, row, metric))
            for other in rows
            if _compares(other) and other.evaluation_model != "last" and other.method == row.label
        ]
        averaged |= bool(found)
        better = [
            (words, one) for words, one in found if one.interval.separated and metric.better * one.interval.mean > 0
        ]
        if better:
            words, most = max(better, key=lambda pair: metric.better * pair[1].interval.mean)
            gains.append(f"{row.label}'s {words} is {_points(most)} its last model ({_interval(most)})")
    if not averaged:
        return ""
    return f"Averages: {_listed(gains)}." if gains else "Averages: no method's is told apart from its last model."


def _points(found: Difference) -> str:
    gain = abs(found.interval.mean)
    said = f"{show_number(gain, '%', 1)} points" if found.unit == "%" else _in_unit(gain, found.unit)
    return f"{said} {_direction(found)}"


def _in_unit(value: float, unit: str) -> str:
    return f"{show_number(value, unit, 1)} {unit}".rstrip()


def _direction(found: Difference) -> str:
    return "above" if found.interval.mean > 0 else "below"


def _interval(found: Difference) -> str:
    """Return the interval of a difference, whatever its sign."""
    low, high = sorted(abs(end) for end in (found.interval.low, found.interval.high))
    ends = f"{show_number(low, found.unit, 1)} to {show_number(high, found.unit, 1)}"
    return f"95 % interval {ends}{' within one seed' * found.interval.blocks}"


def _listed(names: Sequence[str]) -> str:
    """Return names as a person lists them."""
    shown = list(names)
    if len(shown) > NAMED + 1:
        shown = [*shown[:NAMED], f"{len(shown) - NAMED} others"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def warnings(trials: Sequence[TrialResult], settings: Mapping[str, Any]) -> list[str]:
    """Say which methods have not learned, or lost local trainings that were not finite, and what to change.

    ``trials``: Finished or not; one that is in its first quarter is left out, as any may still be at chance there.
    ``settings``: The recipe; its learning rate and its clipping are named.
    Returns: A sentence or two for each kind of trouble.
    """
    begun = [trial for trial in trials if 4 * trial.rounds_done >= trial.rounds_planned]
    stuck = [trial for trial in begun if trial.at_chance]
    infinite = [trial for trial in begun if not (trial.learned or trial.at_chance)]
    unstable = deduplicate(trial for trial in trials if trial.not_finite)
    too_far = deduplicate(trial for trial in (*stuck, *infinite) if trial.too_large)
    said = []
    if stuck:
        first = stuck[0]
        guess = f"{100 * first.recent_accuracy:.1f} % where guessing gives {100 * first.chance:.1f} %"
        said.append(
            f"{_with_seeds(stuck)} did not learn: accuracy is at chance ({guess}), and so is its mean over classes. "
            "What such a method forgets says nothing, and it is compared with no other."
        )
    if infinite:
        said.append(f"The test loss of {_with_seeds(infinite)} is not finite: it is compared with no other.")
    for found, ended in (
        (unstable, "ended in numbers that are not finite"),
        (too_far, "ended too far from where they began, and were refused"),
    ):
        if found:
            lost = sum(trial.not_finite if found is unstable else trial.too_large for trial in found)
            asked = sum(len(row.get("cohort", ())) for trial in found for row in trial.rounds)
            said.append(f"{lost:,} of {asked:,} local trainings of {_with_seeds(found)} {ended}.")
    if unstable or too_far or infinite:
        first = (unstable or too_far or infinite)[0]
        rate, clip = _change(settings, first, "lr", 0.1), _change(settings, first, "max_grad_norm", 0.1)
        said.append(f"Local training diverges. Lower the learning rate, {rate}, or clip gradients, {clip}.")
    elif stuck:
        rates = _change(settings, stuck[0], "lr", 10, 0.1)
        said.append(f"Give it more rounds (--rounds), or change the learning rate, {rates}.")
    return said


def _with_seeds(trials: Sequence[TrialResult]) -> str:
    """Return the labels of trials, each with its seeds."""
    seeds: dict[str, list[int]] = {}
    for trial in trials:
        seeds.setdefault(trial.label, []).append(trial.seed)
    return ", ".join(
        f"{label} (seed{'s' * (len(numbers) > 1)} {', '.join(map(str, dict.fromkeys(numbers)))})"
        for label, numbers in seeds.items()
    )


def _change(settings: Mapping[str, Any], trial: TrialResult, option: str, *factors: float) -> str:
    """Say how to change an option of a trial's local training: to multiples of what it is, if that is known."""
    own = trial.info.get("training", {})
    name = f"{trial.method}.training.{option}" if option in own else f"training.{option}"
    value = {**settings.get("training", {}), **own}.get(option)
    if not isinstance(value, int | float):
        return f"--set {name}=1" if option == "max_grad_norm" else f"--set {name}"
    setting = f"{name}={' or '.join(f'{value * factor:g}' for factor in factors)}"
    return f"--set {shlex.quote(setting) if ' ' in name else setting} (it is {value:g})"
