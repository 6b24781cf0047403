"""Run the trials of experiments: one after another, or spread over worker processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedkeep._utils import progress
from fedkeep._utils.files import atomic_write
from fedkeep.errors import RunError
from fedkeep.experiment.cohort_workers import CohortWorkers, useful_workers
from fedkeep.experiment.experiment import Experiment, Trial
from fedkeep.experiment.paths import is_finished
from fedkeep.experiment.provenance import describe_version
from fedkeep.experiment.run import open_run
from fedkeep.experiment.runtime import Machine, OnProgress, Progress
from fedkeep.simulation import ipc
from fedkeep.simulation.autotune import choose_stack_size
from fedkeep.simulation.callbacks import Callback
from fedkeep.simulation.process_executor import step_handlers
from fedkeep.simulation.simulation import Simulation
from fedkeep.simulation.state import RoundResult, SimulationState
from fedkeep.simulation.trial import TrialBusy, run_trial
from fedkeep.simulation.workers import (
    DONE,
    PROGRESS,
    REFUSED,
    Message,
    Worker,
    run_worker,
    start_workers,
    stop_workers,
    wait_for_any,
)
from fedkeep.training.context import pinned_threads

TRIAL, JOIN = "trial", "join"
"""Requests to a worker: run a trial; prepare to carry out client steps of one."""


def run_trials(
    trials: Sequence[Trial],
    *,
    again: str,
    on_progress: OnProgress | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Run trials, each from its checkpoint, and return when all are finished. Safe to call again after a kill.

    Parameters
    ----------
    trials : Sequence[Trial]
        All on machines with the same workers.
    again : str
        The command that continues, for the error after a failure.
    on_progress : Callable[[Progress], None], optional
        Called after every round, and now and then within a long one.
    callbacks : Sequence[Callback]
        Called around the rounds of every trial, in this process: with callbacks, workers share only cohorts.
    """
    if not trials:
        return
    machine = trials[0].experiment.machine
    workers = machine.workers or (os.cpu_count() or 1 if machine.device == "cpu" else 1)
    report = on_progress or (lambda progress: None)
    if min(workers, len(trials)) > 1 and not callbacks:
        _run_in_workers(trials, min(workers, len(trials)), workers // len(trials), report, again)
        for trial in trials:
            if not is_finished(trial.folder):
                raise TrialBusy(
                    f"{trial.folder} is being run by another process. Wait for it, or end it, then: {again}"
                )
        return
    for number, trial in enumerate(trials):
        with pinned_threads(trial.experiment.machine.threads):
            simulation, own = _open(trial, report, workers)
            run_trial(simulation, trial.folder, [*own, *callbacks])
        if not any(other.experiment is trial.experiment and other.seed == trial.seed for other in trials[number + 1 :]):
            trial.experiment.forget(trial.seed)


def _open(trial: Trial, report: OnProgress, spare: int) -> tuple[Simulation, list[Callback]]:
    """Return a trial's simulation and its callbacks; ``spare`` processes may share its cohorts."""
    experiment = trial.experiment
    simulation = experiment.simulation(trial.method, trial.seed)
    cohort, on_cpu = experiment.recipe.run.cohort, experiment.machine.device == "cpu"
    count = useful_workers(trial.method.algorithm, cohort, spare if on_cpu else 0)
    description = experiment.describe(trial.method, trial.seed)
    return simulation, [
        TrialDescription(trial, description, max(count, 1)),
        ProgressReport(trial, description["test_total"], report),
        cohort_workers(trial, count),
    ]


def cohort_workers(trial: Trial, count: int) -> CohortWorkers:
    """Return the callback that lets so many processes share a trial's cohorts."""
    request = JOIN, [str(trial.run), trial.method.label, trial.seed]
    return CohortWorkers(count, lambda: start_workers(count, work, trial.experiment.machine, 0), request)


def write_description(folder: Path, description: Mapping[str, Any]) -> None:
    """Write what a trial is, and which versions ran it; raise `RunError` if its results depend on another thing now.

    Trials of versions that did not name a thing are not asked about it.
    """
    path, players = folder / "trial.json", [describe_version()]
    if (folder / "checkpoint" / "manifest.json").is_file():
        before = _read_description(path)
        begun, earlier = before.get("dependencies", {}), before.get("versions", ["a version that did not say"])
        players = list(dict.fromkeys([*earlier, *players]))
        others = [name for name, now in description["dependencies"].items() if begun.get(name, now) != now]
        if others:
            raise RunError(
                f"{folder} was begun with another {' and '.join(others)} than there is now, so that its rounds would "
                "not belong together. Put back what was there, in a generator's or an extractor's folder too, or begin "
                "a new run."
            )
    atomic_write(path, json.dumps({**description, "versions": players}))


def _read_description(path: Path) -> dict[str, Any]:
    """Return what a trial that was begun is; empty if nobody said; raise `RunError` if it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise RunError(
            f"cannot read {path}: {error}. Remove the folder {path.parent} to run its trial again."
        ) from error
    return found if isinstance(found, dict) else {}


class TrialDescription(Callback):
    """Writes ``trial.json`` and ``partition.json`` before the first round, and decides how clients are stacked.

    Parameters
    ----------
    trial : Trial
        What is described.
    description : Mapping[str, Any]
        Its description, without stacks.
    workers : int
        Processes that will share its cohorts.
    """

    def __init__(self, trial: Trial, description: Mapping[str, Any], workers: int) -> None:
        self.trial = trial
        self.description = description
        self.workers = workers

    def on_trial_begin(self, state: SimulationState) -> None:
        folder = self.trial.folder
        state.stack = self._stack(state)
        write_description(folder, {**self.description, "stack": state.stack})
        held = self.trial.experiment.describe_partition(self.trial.seed)
        atomic_write(folder / "partition.json", json.dumps(held))

    def _stack(self, state: SimulationState) -> int:
        """Return how many clients train as one: as the trial was begun, as the user says, or as is quickest here."""
        try:
            return int(_read_description(self.trial.folder / "trial.json")["stack"])
        except (KeyError, TypeError):
            if state.algorithm.schedule != "parallel":
                return 1  # nobody trains beside another, and workers look ahead only where there are no stacks
            return self.trial.experiment.machine.stack or choose_stack_size(state, self.workers)


class ProgressReport(Callback):
    """Reports how far a trial is, after every round and now and then within one.

    Parameters
    ----------
    trial : Trial
        What is reported on.
    test_total : Sequence[int]
        Test images by class.
    report : Callable[[Progress], None]
        Receives the reports.
    """

    def __init__(self, trial: Trial, test_total: Sequence[int], report: OnProgress) -> None:
        self.trial = trial
        self.test_total = test_total
        self.report = report
        self._record: dict[str, Any] | None = None
        self._subscription = ExitStack()

    def on_trial_begin(self, state: SimulationState) -> None:
        listener: Callable[[str], None] = lambda activity: self._report(state.finished, activity)  # noqa: E731
        self._subscription.enter_context(progress.subscribe(listener))

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        self._record = result.record if "correct" in result.record else self._record
        self._report(result.record["round"])

    def on_trial_end(self, state: SimulationState) -> None:
        self._subscription.close()

    def _report(self, done: int, activity: str = "") -> None:
        seen = len(self._record["correct"]) if self._record else None  # classes seen by then
        images = sum(self.test_total[:seen])
        self.report(Progress(self.trial.name, done, self.trial.rounds, self._record, images, activity))


# Worker processes


def _run_in_workers(trials: Sequence[Trial], count: int, spare: int, report: OnProgress, again: str) -> None:
    """Run trials in worker processes, each of which may have ``spare`` more for its cohorts."""
    machine = trials[0].experiment.machine
    workers = start_workers(count, work, machine, spare)
    waiting, under_way, last = list(trials), dict[Worker, Trial](), dict[Worker, Trial]()
    try:
        while waiting or under_way:
            for worker in workers:
                if waiting and worker not in under_way:
                    trial = under_way[worker] = last[worker] = _next(waiting, last.get(worker))
                    waiting.remove(trial)
                    worker.send(TRIAL, [str(trial.run), trial.method.label, trial.seed])
            for worker in wait_for_any(under_way):
                kind, content, _ = worker.receive()
                if kind == PROGRESS:
                    report(Progress(**{**content, "trial": under_way[worker].name}))
                elif kind == DONE:
                    del under_way[worker]
                else:
                    error = content if kind == REFUSED else f"a trial failed in a worker process:\n{content}"
                    raise RunError(error)
    except RunError as error:
        raise RunError(f"{error} What is finished is kept: {again}") from None
    finally:
        stop_workers(workers)  # after a failure the other trials save their last round and end


def _next(waiting: Sequence[Trial], last: Trial | None) -> Trial:
    """Return the trial that a worker takes next: one with the data of its last, if there is one."""
    same = [t for t in waiting if last and t.experiment is last.experiment and t.seed == last.seed]
    return (same or waiting)[0]


def work(connection: Connection, machine: Machine, spare: int) -> None:
    """Carry out trials, or client steps of one, as the parent process asks: the main function of every worker.

    Parameters
    ----------
    connection : Connection
        Leads to the parent.
    machine : Machine
        As the parent's.
    spare : int
        Processes that may share a trial's cohorts.
    """
    from fedkeep.experiment.plugins import import_user_code

    torch.set_num_threads(machine.threads)
    import_user_code(machine.use)
    experiments: dict[str, Experiment] = {}

    def find(run: str, label: str, seed: int) -> Trial:
        if run not in experiments:
            experiments.clear()  # one run's data at a time
            experiments[run] = open_run(Path(run), machine)
        return Trial(experiments[run], Path(run), experiments[run].recipe.method(label), seed, label)

    def report(progress: Progress) -> None:
        ipc.send(connection, [PROGRESS, asdict(progress)], {})

    def trial(content: Any, tensors: Any) -> Message:
        found = find(*content)
        try:
            with pinned_threads(found.experiment.machine.threads):
                simulation, callbacks = _open(found, report, spare)
                run_trial(simulation, found.folder, callbacks)
        except TrialBusy:
            pass  # another process is at it; the parent notices if it does not finish
        return None, {}

    def join(content: Any, tensors: Any) -> Message:
        found = find(*content)
        handlers.update(step_handlers(found.experiment.simulation(found.method, found.seed)))
        return None, {}

    handlers = {TRIAL: trial, JOIN: join}
    run_worker(connection, handlers)
