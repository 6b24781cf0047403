"""Heatmaps of the report: what is forgotten when, who teaches whom, what is taken for what, and what clients hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedkeep.metrics import kold
from fedkeep.reporting.metric import rounds_covered
from fedkeep.reporting.record import Floats
from fedkeep.reporting.report_charts import Heatmap, heatmap
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import Row
from fedkeep.reporting.trial import TrialResult

MOST_CLIENTS = 1000  # of a heatmap of clients: beyond this evenly spaced ones are shown


def class_names(trial: TrialResult) -> list[str]:
    """Return the names of a trial's classes, or their numbers."""
    names = [str(name) for name in trial.info.get("label_names") or []]
    return names if len(names) == len(trial.test_total) else [str(number) for number in range(len(trial.test_total))]


def class_heatmaps(rows: Sequence[Row]) -> list[Heatmap]:
    """Return the accuracy of each class over rounds for each method, with its first seed."""
    maps = []
    for row in rows:
        trial = row.trials[0]
        if len(trial.evaluated) > 1:
            last = ", ".join(
                f"{name} {100 * value:.0f}"
                for name, value in zip(class_names(trial), trial.class_history[-1], strict=True)
                if not np.isnan(value)
            )
            alt = f"Map of {row.name}: accuracy of each class over rounds. In percent at the end: {last}."
            maps.append(
                heatmap(
                    trial.class_history.T, class_names(trial), [str(number) for number in trial.evaluated], row.name,
                    alt, ("class", "round"), " %",
                )
            )  # fmt: skip
    return maps


def teacher_heatmaps(rows: Sequence[Row]) -> list[Heatmap]:
    """Return the weight of each teacher over rounds, of methods that record who teaches; with the first seed."""
    maps = []
    seen = set()
    for row in rows:
        trial = row.trials[0]
        rounds = [(entry["round"], entry["log"]) for entry in trial.rounds if (entry.get("log") or {}).get("teachers")]
        if not rounds or trial.path in seen:
            continue  # an average of a method's models has the method's teachers
        seen.add(trial.path)
        clients = sorted({str(name) for _, log in rounds for name in log["teachers"]}, key=_natural)
        for name, words in (("target_weights", "target part"), ("nontarget_weights", "non-target part"), ("", "")):
            if (name and not all(name in log for _, log in rounds)) or (not name and "target_weights" in rounds[0][1]):
                continue
            weights = np.zeros((len(clients), len(rounds)))
            for place, (_, log) in enumerate(rounds):
                for client, weight in zip(log["teachers"], log.get(name) or [1.0] * len(log["teachers"]), strict=True):
                    weights[clients.index(str(client)), place] = weight
            top = float(weights.max()) or 1.0
            title = f"{row.label}, weight of the {words}" if words else f"{row.label}, teachers"
            most = clients[int(weights.sum(axis=1).argmax())]
            alt = f"Map of {title} over rounds, one row for each client that taught. The most: client {most}."
            maps.append(
                heatmap(
                    weights / top, clients, [str(number) for number, _ in rounds], title, alt,
                    ("client", "round"), "", top=round(top, 3),
                )
            )  # fmt: skip
    return maps


def confusion_heatmaps(rows: Sequence[Row]) -> list[Heatmap]:
    """Return how often each class was taken for each at the end, in shares of the true class; with the first seed."""
    maps = []
    for row in rows:
        trial = row.trials[0]
        counts = np.asarray(trial.confusions, dtype=np.float64)
        if len(counts):
            total = counts.sum(axis=1, keepdims=True)
            shares = np.divide(counts, total, out=np.full_like(counts, np.nan), where=total > 0)
            wrong = np.nan_to_num(shares * (1 - np.eye(len(shares))))
            true, taken = divmod(int(wrong.argmax()), len(shares))
            names = class_names(trial)
            alt = (
                f"Confusion matrix of {row.name}, true classes in rows, predicted ones in columns. Most often "
                f"{names[true]} is taken for {names[taken]}, {100 * wrong[true, taken]:.0f} %."
            )
            maps.append(heatmap(shares, names, names, row.name, alt, ("true class", "predicted as"), " %"))
    return maps


def partition_heatmap(run: Run) -> dict[str, Any]:
    """Return the heatmap of the first partition, its seed, and how many different partitions there are besides."""
    drawn = next((trial for trial in run.trials if trial.partition.get("counts")), None)
    if drawn is None:
        return {"map": None, "others": 0, "seed": None}
    counts = np.asarray(drawn.partition["counts"], dtype=np.float64)
    names = list(map(str, drawn.info.get("label_names") or range(counts.shape[1])))
    alt = (
        f"Map of the examples per client and class: {len(counts)} clients, {len(names)} classes; a client holds "
        f"{(counts > 0).sum(axis=1).mean():.1f} classes and {counts.sum(axis=1).mean():.0f} examples on average."
    )
    shown = np.unique(np.linspace(0, len(counts) - 1, min(len(counts), MOST_CLIENTS)).round().astype(int))
    top = float(counts.max()) or 1.0
    share = np.log1p(counts[shown].T) / np.log1p(top)
    picture = heatmap(
        share, names, [str(client) for client in shown], "", alt,
        ("class", "client"), " examples", top=top, log=True,
    )  # fmt: skip
    hashes = {str(trial.partition.get("hash", trial.seed)) for trial in run.trials if trial.partition}
    return {"map": picture, "others": len(hashes) - 1, "seed": drawn.seed, "top": f"{top:,.0f}"}


def client_accuracies(rows: Sequence[Row]) -> dict[str, Any]:
    """Return for each client the model's accuracy on classes in the client's proportions.

    It is the mean over the window (unfinished: of the last evaluation) of the class-wise test accuracies, weighted by
    the client's label distribution; nothing more is measured for it.

    Returns: ``lines`` of a ``row``, the ``texts`` of its columns, and its ``box``: the quantiles 0, 0.1, 0.5, 0.9 and
        1.
    """
    lines: list[dict[str, Any]] = []
    for row in rows:
        values = np.concatenate([_of_clients(trial) for trial in row.trials])
        if len(values):
            worst = np.sort(values)[: max(1, len(values) // 10)]
            columns = (values.mean(), worst.mean(), values.min(), values.std(ddof=1) if len(values) > 1 else 0.0)
            box = [100 * float(value) for value in np.quantile(values, [0, 0.1, 0.5, 0.9, 1])]
            lines.append({"row": row, "texts": [f"{100 * value:.1f}" for value in columns], "box": box})
    return {"lines": lines, "covered": _window([line["row"] for line in lines])}


def _of_clients(trial: TrialResult) -> Floats:
    """Return the accuracy of a trial's model for each client, float64 [clients]; empty where it is not known."""
    counts = trial.partition.get("counts") or []
    if not len(trial.evaluated) or trial.task_sizes or any(len(held) != len(trial.test_total) for held in counts):
        return np.zeros(0)
    window = trial.windows[-1] if trial.windows else range(0)
    inside = [number in window for number in trial.evaluated]
    history = trial.class_history[inside] if any(inside) else trial.class_history[-1:]
    accuracy = history.mean(axis=0)
    values = [kold(held, accuracy)[0] for held in np.asarray(counts, dtype=np.float64) if sum(held)]
    return np.asarray([value for value in values if not np.isnan(value)])


def _window(rows: Sequence[Row]) -> str:
    """Return the rounds that are covered, if they are the same of all rows."""
    covered: Mapping[str, None] = dict.fromkeys(rounds_covered(row.trials[0]) for row in rows if row.finished)
    return next(iter(covered)) if len(covered) == 1 else "the window"


def _natural(name: str) -> tuple[int, int, str]:
    """Sort numbers as numbers, before words."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)
