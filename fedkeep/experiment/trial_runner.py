"""Run the trials of experiments, one after another or in worker processes, which may share a trial's cohorts."""

import copy
import errno
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fedkeep._utils import progress
from fedkeep._utils.digests import ForeignFile, Identity, read_json, write_json
from fedkeep._utils.process import raising_terminated
from fedkeep._utils.torch_state import plain_torch, set_plain_torch
from fedkeep._utils.type_hints import annotations_of
from fedkeep.errors import FedKeepError, RunError
from fedkeep.executors.process_executor import ProcessExecutor, step_handlers
from fedkeep.executors.workers import (
    DONE,
    PROGRESS,
    REFUSED,
    Message,
    Worker,
    WorkerDied,
    kill_workers,
    run_worker,
    send_message,
    start_workers,
    stop_workers,
    wait_for_any,
)
from fedkeep.experiment.experiment import Experiment, Trial, initial_model_evaluated
from fedkeep.experiment.plugins import import_user_code, instances_of
from fedkeep.experiment.provenance import TRIAL_FILE, check_code
from fedkeep.experiment.ray_cluster import RayWorkers, cluster_workers
from fedkeep.experiment.run import check_own_steps, open_run
from fedkeep.experiment.runtime import Machine, OnProgress, Progress, describe_version, usable_cores
from fedkeep.interface import Algorithm
from fedkeep.interface.algorithm import client_steps, is_annotated
from fedkeep.metrics import is_at_chance
from fedkeep.options import as_table
from fedkeep.rounds.messages import FaultKind
from fedkeep.rounds.reply_step import ReplyStep
from fedkeep.rounds.state import RoundResult, SimulationState
from fedkeep.tracking import LoggedTrial, Tracker
from fedkeep.training.evaluation import count_confusions
from fedkeep.trials.autotune import choose_stack_size
from fedkeep.trials.callbacks import Callback, class_scores
from fedkeep.trials.checkpoint import manifests
from fedkeep.trials.simulation import Simulation
from fedkeep.trials.trial import CallbackFailed, TrialBusy, run_trial

TRIAL, JOIN = "trial", "join"
"""Requests to a worker: run a trial; prepare to run client steps of a trial."""


@raising_terminated()
def run_trials(
    trials: Sequence[Trial],
    *,
    retry: str,
    on_progress: OnProgress | None = None,
    callbacks: Sequence[Callback] | None = None,
    steps: Sequence[ReplyStep] | None = None,
) -> None:
    """Run trials, each from its last checkpoint, and return when all are finished.

    ``trials``: The trials, all with the same number of workers.
    ``retry``: The command that continues after a failure, for error messages.
    ``on_progress``: Called after every round, and every few seconds within a long one.
    ``callbacks``: Called around the rounds of every trial, in this process: with callbacks, workers share only cohorts.
    ``steps``: Reply steps of the user; each trial has copies of its own, in this process. None, as for callbacks: one
        of each class that ``--use`` brought.
    """
    if not trials:
        return
    for folder in {trial.run for trial in trials}:
        check_own_steps(folder, steps or ())
    machine, cores = trials[0].experiment.machine, usable_cores()
    if machine.executor == "ray":
        workers = cluster_workers(machine)
        processes = min(workers, len(trials), cores)  # for the trials' server halves
    else:
        workers = machine.workers or (cores if machine.device == "cpu" else 1)
        processes = min(workers, len(trials))
    report = on_progress or (lambda progress: None)
    if processes > 1 and not callbacks and not steps:
        spare = workers // (processes if machine.executor == "ray" else len(trials))
        _raise_failures(_run_in_workers(trials, processes, spare, report, retry, from_use=steps is None), retry)
        for trial in trials:
            if not trial.is_finished:
                raise TrialBusy(f"{trial.folder} is being run by another process. Wait for it or end it, then: {retry}")
        return
    again = f" Finished rounds are saved. Continue with: {retry}"
    cause: BaseException | None = None
    failures: dict[str, list[Trial]] = {}
    for number, trial in enumerate(trials):
        with plain_torch(trial.experiment.machine.threads), _disk_errors_explained(trial.folder, again):
            try:
                simulation, trial_callbacks, identity = _prepare(trial, report, workers, steps)
                own = instances_of(Callback, trial.experiment.machine.use) if callbacks is None else callbacks
                run_trial(simulation, trial.folder, trial_callbacks, own=own, identity=identity)
            except CallbackFailed as failure:  # which ends this trial, and not the others
                cause = cause or failure.__cause__
                failures.setdefault(str(failure), []).append(trial)
            except WorkerDied as death:
                raise RunError(f"{death}{again}") from None
            except FedKeepError as error:  # it says itself what to do
                error.add_note(f"It is of the trial of {trial.method.label} with seed {trial.seed}.")
                raise
            except Exception as error:
                error.add_note(f"It is of the trial of {trial.method.label} with seed {trial.seed}.{again}")
                raise
        if not any(other.experiment is trial.experiment and other.seed == trial.seed for other in trials[number + 1 :]):
            trial.experiment.release(trial.seed)
    _raise_failures(failures, retry, cause)


def _raise_failures(failures: Mapping[str, Sequence[Trial]], retry: str, cause: BaseException | None = None) -> None:
    """Raise `RunError` if callbacks raised exceptions: what each said, and the trials that it ended."""
    said = [
        f"{what}. It ended {', '.join(f'{trial.method.label} with seed {trial.seed}' for trial in ended)}."
        for what, ended in failures.items()
    ]
    if said:
        raise RunError(f"{' '.join(said)} Finished rounds are saved. Continue with: {retry}") from cause


@contextmanager
def _disk_errors_explained(folder: Path, again: str = "") -> Iterator[None]:
    """Turn an error of the disk, such as a full one, into one that names the path and says how to continue."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES):
            raise
        raise RunError(f"{error.strerror}: {error.filename or folder}.{again}") from error


def _prepare(
    trial: Trial, report: OnProgress, spare: int, steps: Sequence[ReplyStep] | None
) -> tuple[Simulation, list[Callback], Identity]:
    """Return a trial's simulation, its callbacks, and to what its files belong.

    Up to ``spare`` processes may share its cohorts.
    """
    experiment = trial.experiment
    with progress.subscribe(partial(_report_preparation, trial, report)):  # drawing a partition may take long
        simulation = experiment.simulation(trial.method, trial.seed)
    used = instances_of(ReplyStep, experiment.machine.use) if steps is None else copy.deepcopy(steps)
    simulation.take_steps(used)
    algorithm, machine, cohort = trial.method.algorithm, experiment.machine, experiment.recipe.run.cohort_size
    if machine.executor == "ray":
        count = min(spare, most_workers(algorithm, cohort))
        workers: Callback = RayWorkers(trial, count)
    else:
        count = useful_workers(algorithm, cohort, spare if machine.device == "cpu" else 0)
        request = JOIN, [str(trial.run), trial.method.label, trial.seed]
        start = partial(start_workers, count, worker_main, machine, 0, steps is None)
        workers = CohortWorkers(count, start, request, all_steps=not steps)
    description = {**experiment.describe(trial.method, trial.seed), "identity": trial.identity.to_table()}
    callbacks = [
        TrialDescription(trial, description, max(count, 1)),
        ProgressReport(trial, description["test_total"], report),
        ConfusionMatrix(trial.folder),
        workers,
        *trackers(trial, description),
    ]
    return simulation, callbacks, described_identity(description)


def _report_preparation(trial: Trial, report: OnProgress, activity: str, _: float) -> None:
    """Report what is done before the first round of a trial; a resumed trial reports after its next round."""
    if not (trial.folder / TRIAL_FILE).exists():
        report(Progress(trial.name, 0, trial.rounds, None, activity=activity))


def trackers(trial: Trial, description: Mapping[str, Any]) -> list[Callback]:
    """Return the callbacks that log metrics as the recipe asks."""
    recipe = trial.experiment.recipe
    sections = {"training": recipe.training, "run": recipe.run, "partition": recipe.partition, "model": recipe.model}
    settings = {f"{section}.{name}": v for section, part in sections.items() for name, v in as_table(part).items()}
    settings["run.evaluation_models"] = description["evaluation_models"]  # those of this method
    options, total = {"data": recipe.data, **description["options"], **settings}, description["test_total"]
    logged = LoggedTrial(trial.run, trial.folder, recipe.title, trial.method.label, trial.seed, options, total)
    return [Tracker(name, logged) for name in recipe.log]


OF_ALL_SEEDS = ("data set", "extractor", "generator")
"""What inputs are called, or begin with, that are the same for all trials of a run."""


def write_description(folder: Path, description: Mapping[str, Any]) -> None:
    """Write a trial's description, and which versions of FedKeep ran it.

    ``description``: The description (see `fedkeep.experiment.experiment.describe_trial`).
    """
    versions = [describe_version()]
    for other in sorted({*folder.parent.glob(f"*/{TRIAL_FILE}")} - {folder / TRIAL_FILE}):
        _check_same_inputs(other, description.get("dependencies", {}))
    if before := begun_description(folder):
        described_identity(before).check(
            folder / TRIAL_FILE,
            described_identity(description),
            "Its rounds would not belong together. Restore what it was, or begin a new run.",
        )
        versions = list(dict.fromkeys([*before.get("versions", ["an unknown version"]), *versions]))
    write_json(folder / TRIAL_FILE, {**description, "versions": versions})


def _check_same_inputs(other: Path, now: Mapping[str, str]) -> None:
    """Raise `ForeignFile` if another trial of the run, of whatever seed, was run with other data or networks."""
    before: Mapping[str, str] = {}
    with suppress(RunError):  # a damaged file is told where it is read
        before = begun_description(other.parent).get("dependencies", before)
    changed = [name for name in now if name.startswith(OF_ALL_SEEDS) and before.get(name, now[name]) != now[name]]
    if changed:
        raise ForeignFile(
            f"{other.parent} was run with another {changed[0]} than there is now, so that this run's trials would not "
            "belong together. Restore what it was, or begin a new run; without that folder this trial can be run."
        )


def described_identity(description: Mapping[str, Any]) -> Identity:
    """Return to what a trial belongs, as trial.json says it; older versions told its inputs alone."""
    identity = Identity.from_table(TRIAL_FILE, description.get("identity"))
    return replace(identity, inputs=description.get("dependencies", {}))


def begun_description(folder: Path) -> dict[str, Any]:
    """Return the recorded description of a trial that has a checkpoint; empty if it has none."""
    if not manifests(folder / "checkpoint"):
        return {}
    try:
        return read_json(folder / TRIAL_FILE)
    except RunError as error:
        raise RunError(f"{error} Restore it, or remove the folder {folder} to run its trial again.") from None


class TrialDescription(Callback):
    """Writes ``trial.json`` and ``partition.json`` before the first round, and sets how clients are trained.

    ``description``: The trial's description, without ``stack``.
    ``workers``: The number of processes that will share its cohorts.
    """

    def __init__(self, trial: Trial, description: Mapping[str, Any], workers: int) -> None:
        self.trial = trial
        self.description = description
        self.workers = workers

    def on_trial_begin(self, state: SimulationState) -> None:
        folder = self.trial.folder
        state.settings.stack = self._stack_size(state)
        initial = initial_model_evaluated(self.description, state, begun_description(folder))
        write_description(folder, {**self.description, **initial, "stack": state.settings.stack})
        write_json(folder / "partition.json", self.trial.experiment.describe_partition(self.trial.seed))

    def _stack_size(self, state: SimulationState) -> int:
        """Return how many clients train as one: the recorded number, the user's, or the quickest on this machine."""
        try:
            return int(begun_description(self.trial.folder)["stack"])
        except (KeyError, TypeError):
            if state.algorithm.sequential:
                return 1  # clients train one after another, and stacks would keep workers from preparing the next ones
            return self.trial.experiment.machine.stack or choose_stack_size(state, self.workers)


class ConfusionMatrix(Callback):
    """Writes ``confusion.json`` when a trial is finished: how often each class was taken for each by its model."""

    MAX_CLASSES = 100
    """With more nobody would read it, and records shall stay small."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "confusion.json"

    def on_trial_end(self, state: SimulationState) -> None:
        classes = state.context.num_classes
        ended = state.ended or state.finished == state.rounds
        all_classes = state.federation.for_task(state.federation.num_tasks).cumulative_classes[-1]
        if not ended or not all_classes == classes <= self.MAX_CLASSES:
            return  # where the file is there already, it may be damaged: it is written again, with the same content
        model = state.evaluation_model(state.evaluation_models[0])
        predict = partial(class_scores, state, model)
        write_json(self.path, {"counts": count_confusions(predict, state.federation.dataset.test, classes)})


class ProgressReport(Callback):
    """Reports a trial's progress after every round, and every few seconds within a long one.

    ``test_total``: The number of test images of each class.
    """

    def __init__(self, trial: Trial, test_total: Sequence[int], report: OnProgress) -> None:
        self.trial = trial
        self.test_total = test_total
        self.report = report
        self._record: dict[str, Any] | None = None
        self._not_finite = 0
        self._share = 0.0
        self._subscription = ExitStack()

    def on_trial_begin(self, state: SimulationState) -> None:
        def listener(activity: str, share: float) -> None:
            self._share = max(self._share, share)  # a method may ask its clients twice in a round
            self._report(state.finished, activity)

        self._subscription.enter_context(progress.subscribe(listener))

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        self._not_finite += list(result.record.get("faults", {}).values()).count(FaultKind.NOT_FINITE)
        self._record = result.record if "correct" in result.record else self._record
        self._share = 0.0
        self._report(result.record["round"])

    def on_trial_end(self, state: SimulationState) -> None:
        self._subscription.close()

    def _report(self, done: int, activity: str = "") -> None:
        name, whole, record, total = self.trial.name, self.trial.rounds, self._record, self.test_total
        if record:  # of the classes that have arrived so far
            total = record.get("total", total[: len(record["correct"])])
        images = sum(total)
        guesses = bool(record and images) and is_at_chance((record or {})["correct"], total)
        self.report(Progress(name, done, whole, record, images, activity, guesses, self._not_finite, self._share))


# Worker processes


def _run_in_workers(
    trials: Sequence[Trial], count: int, spare: int, report: OnProgress, retry: str, *, from_use: bool
) -> dict[str, list[Trial]]:
    """Run trials in worker processes, each of which may start ``spare`` processes for its cohorts.

    Returns: What callbacks raised, and the trials that each ended.
    """
    workers = start_workers(count, worker_main, trials[0].experiment.machine, spare, from_use)
    waiting, running, last = list(trials), dict[Worker, Trial](), dict[Worker, Trial]()
    failures: dict[str, list[Trial]] = {}
    try:
        while waiting or running:
            for worker in workers:
                if waiting and worker not in running:
                    trial = running[worker] = last[worker] = _next_trial(waiting, last.get(worker))
                    waiting.remove(trial)
                    worker.send(TRIAL, [str(trial.run), trial.method.label, trial.seed])
            for worker in wait_for_any(running):
                kind, content, _ = worker.receive()
                if kind == PROGRESS:
                    report(Progress(**{**content, "trial": running[worker].name}))
                elif kind == DONE:
                    trial = running.pop(worker)
                    if content is not None:
                        failures.setdefault(content, []).append(trial)
                else:
                    error = content if kind == REFUSED else f"a trial failed in a worker process:\n{content}"
                    raise RunError(error)
    except RunError as error:
        raise RunError(f"{error} Finished rounds are saved. Continue with: {retry}") from None
    finally:
        stop_workers(workers)  # after a failure, the other trials save their last round and end
    return failures


def _next_trial(waiting: Sequence[Trial], last: Trial | None) -> Trial:
    """Return the trial that a worker runs next: if possible, one with the same data as its last."""
    same_data = [t for t in waiting if last and t.experiment is last.experiment and t.seed == last.seed]
    return (same_data or waiting)[0]


def worker_main(connection: Connection, machine: Machine, spare: int, from_use: bool = False) -> None:
    """Run trials, or client steps of a trial, as the parent process requests: the main function of every worker.

    ``spare``: The number of processes that may share a trial's cohorts.
    ``from_use``: Whether a trial has the reply steps of ``--use``, and, if it is run here, the callbacks.
    """
    torch.set_num_threads(machine.threads)
    import_user_code(machine.use)
    experiments: dict[str, Experiment] = {}

    def open_trial(run: str, label: str, seed: int) -> Trial:
        if run not in experiments:
            check_code(Path(run), machine.use)  # it may have been edited since the run began
            experiments.clear()  # only one run's data fit in memory
            experiments[run] = open_run(Path(run), machine)
        return Trial(experiments[run], Path(run), experiments[run].recipe.method(label), seed, label)

    def report(progress: Progress) -> None:
        send_message(connection, [PROGRESS, asdict(progress)], {})

    def run(content: Any, tensors: Any) -> Message:
        trial = open_trial(*content)
        try:
            # If another process runs the trial, the parent notices if it does not finish.
            with (
                suppress(TrialBusy),
                plain_torch(trial.experiment.machine.threads),
                _disk_errors_explained(trial.folder),
            ):
                simulation, callbacks, identity = _prepare(trial, report, spare, None if from_use else ())
                own = instances_of(Callback, machine.use) if from_use else ()
                run_trial(simulation, trial.folder, callbacks, own=own, identity=identity)
        except CallbackFailed as failure:
            traceback.print_exception(failure.__cause__)
            return str(failure), {}
        return None, {}

    def join(content: Any, tensors: Any) -> Message:
        trial = open_trial(*content)
        set_plain_torch()  # the user's code was imported
        simulation = trial.experiment.simulation(trial.method, trial.seed)
        simulation.take_steps(instances_of(ReplyStep, machine.use) if from_use else ())
        handlers.update(step_handlers(simulation))
        return None, {}

    handlers = {TRIAL: run, JOIN: join}
    run_worker(connection, handlers)


log = logging.getLogger(__name__)
MIN_SECONDS_LEFT = 20.0
"""Seconds of remaining work from which worker processes pay off, since starting them takes some seconds."""


def most_workers(algorithm: Algorithm[Any, Any], cohort: int) -> int:
    """Return how many workers a method can keep busy.

    A sequential method trains one client at a time. A second process then only runs the steps that prepare the next
    clients, and methods such as FedSeq have no such steps.

    Returns: The number of workers; 0 if values without a type annotation would have to be sent.
    """
    steps = client_steps(type(algorithm)).values()
    if not all(map(is_annotated, steps)):
        return 0
    if not algorithm.sequential:
        return cohort
    return 2 if any(annotations_of(step)["return"] is type(None) for step in steps) else 1


def useful_workers(algorithm: Algorithm[Any, Any], cohort: int, spare: int) -> int:
    """Return how many worker processes of this machine a method can use.

    It is 0 in place of 1: a single worker gains nothing over this process.

    ``cohort``: The number of clients in a round.
    """
    count = min(spare, most_workers(algorithm, cohort))
    return count if count > 1 else 0


@dataclass(eq=False, repr=False)
class CohortWorkers(Callback):
    """Starts workers after a round, and uses them once all are ready. Results do not depend on whether or when.

    ``count``: The number of workers; fewer than two: none are started.
    ``request``: Kind and content of the request that prepares a worker for the trial's client steps.
    ``all_steps``: As of `ProcessExecutor`.
    """

    count: int
    start: Callable[[], list[Worker]]
    request: tuple[str, Any]
    all_steps: bool = True
    workers: list[Worker] = field(init=False, default_factory=list)
    starting: list[Worker] = field(init=False, default_factory=list)

    def on_round_end(self, state: SimulationState, result: RoundResult) -> None:
        if self.starting:
            self._use_workers(state)
            return
        left = (state.rounds - state.finished) * (result.timings["train"] + result.timings["teachers"])
        if not self.workers and self.count > 1 and left > MIN_SECONDS_LEFT:
            try:
                self.workers = self.start()
                self.starting = list(self.workers)
                for worker in self.workers:
                    worker.send(*self.request)
            except RunError as error:
                self._go_without(error)

    def on_trial_end(self, state: SimulationState) -> None:
        kill_workers(self.workers)

    def _use_workers(self, state: SimulationState) -> None:
        """Switch to the workers if all are ready; continue without them if one could not start."""
        try:
            for worker in [worker for worker in self.starting if worker.connection.poll()]:
                kind, content, _ = worker.receive()
                if kind != DONE:
                    raise RunError(content)
                self.starting.remove(worker)
        except RunError as error:
            self._go_without(error)
            return
        if not self.starting:
            state.executor = ProcessExecutor(self.workers, state, all_steps=self.all_steps)

    def _go_without(self, error: RunError) -> None:
        self.count, self.starting = 0, []
        kill_workers(self.workers)
        log.warning("A worker process could not start, and the run continues without workers: %s", error)
