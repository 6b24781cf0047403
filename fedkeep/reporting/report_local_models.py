"""What local training did to each class: clients' models before they are merged, beside the model they received.

FedCAD's figure 1 shows this of one client and three methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedkeep.reporting.summary import Row
from fedkeep.reporting.trial import TrialResult

CLIENTS = 3  # that are shown, the first of the cohort
WIDE = 20  # with more classes than this, nobody would read it


def local_training(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the class-wise accuracies, in percent, of clients' models in the last round that all methods have.

    Of parallel methods, whose clients began with one model, with the first seed; empty where no such model was
    evaluated.

    Returns: ``round``; ``names`` of the classes; ``clients``, each with its name ``client``, its ``examples`` of each
        class and ``lines`` of a ``label`` and ``values``; ``more``, how many clients are not shown.
    """
    trials = _comparable([trial for row in rows for trial in row.trials])
    rounds = [{model["round"] for model in trial.local_models} for trial in trials]
    common = set.intersection(*rounds) if rounds else set()
    if not common:
        return {}
    number = max(common)
    clients = [model["client"] for model in trials[0].local_models if model["round"] == number]
    counts = trials[0].partition.get("counts") or []
    shown = [
        {
            "client": client,
            "examples": counts[int(client)] if counts else [],
            "lines": _lines(trials, number, client),
        }
        for client in clients[:CLIENTS]
    ]
    names = list(map(str, trials[0].info.get("label_names") or range(trials[0].class_history.shape[1])))
    return {"round": number, "names": names, "clients": shown, "more": max(0, len(clients) - CLIENTS)}


def _comparable(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return one trial a method: parallel, without tasks, of few classes and one seed.

    Of several evaluation models it is the first.
    """
    found = [
        trial
        for trial in trials
        if trial.local_models and not trial.sequential and not trial.task_sizes and trial.class_history.shape[1] <= WIDE
    ]
    once = {trial.path: trial for trial in reversed(found) if trial.seed == found[0].seed}
    return list(reversed(once.values()))


def _lines(trials: Sequence[TrialResult], number: int, client: str) -> list[dict[str, Any]]:
    """Return the model that a client received and those that it left, one line each; what was not evaluated is not."""
    received = [_received(trial, number) for trial in trials]
    lines: list[dict[str, Any]] = []
    same = len({tuple(values or ()) for values in received}) == 1
    for trial, before in zip(trials, received, strict=True):
        if before and not (same and lines):
            lines.append({"label": "model received" if same else f"{trial.label}, received", "values": before})
        left = [model for model in trial.local_models if (model["round"], model["client"]) == (number, client)]
        lines += [{"label": trial.label, "values": (100 * trial.accuracy_by_class(model)).tolist()} for model in left]
    return lines


def _received(trial: TrialResult, number: int) -> list[float] | None:
    """Return what the model knew that travelled in a round, which the round before left; None if it is not known."""
    travels = (trial.info.get("evaluation_models") or ["last"])[0] == "last"
    before = [values for round, values in zip(trial.evaluated, trial.class_history, strict=True) if round == number - 1]
    return (100 * before[0]).tolist() if before and travels else None
