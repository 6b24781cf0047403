"""FedKeep's Python functions: run a recipe or what is given in Python, and resume a run."""

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from fedkeep._utils.torch_state import one_thread_at_a_time, plain_torch
from fedkeep.data.partition import Scheme
from fedkeep.display import Display
from fedkeep.errors import ConfigError, RunError
from fedkeep.experiment.experiment import Experiment, Trial
from fedkeep.experiment.initial_model import keep_weights
from fedkeep.experiment.plugins import import_user_code, keep_loss, why_not_importable
from fedkeep.experiment.provenance import check_code
from fedkeep.experiment.python_recipe import architecture_of, examples_of, for_workers, make_recipe, own_classes
from fedkeep.experiment.recipe import Recipe
from fedkeep.experiment.run import open_run, prepare_run, resume_command
from fedkeep.experiment.runtime import Machine, OnProgress, Progress, check_run_arguments
from fedkeep.experiment.trial_runner import run_trials
from fedkeep.interface import Algorithm, Training
from fedkeep.losses.classification import OWN_LOSSES
from fedkeep.models import Architecture
from fedkeep.models.custom import Custom, Factory
from fedkeep.reporting.html import write_all
from fedkeep.reporting.metric import check_main
from fedkeep.results import RunResult, result_of
from fedkeep.rounds.reply_step import ReplyStep
from fedkeep.training.pooled import PooledTraining
from fedkeep.trials.callbacks import Callback

MethodLike = str | Algorithm[Any, Any] | type[Algorithm[Any, Any]]
Examples = Any  # names, paths, arrays, data frames, data sets of FedKeep, Hugging Face and PyTorch
Rows = Mapping[str, Any] | Sequence[Any]
OF_RUNNING = ("out", "on_progress", "callbacks", "steps")
"""The arguments of `run` that belong to no recipe."""


@one_thread_at_a_time()
@plain_torch()
def run(
    recipe: str | Path | Recipe | None = None,
    *,
    data: Examples | None = None,
    partition: str | Scheme | Rows | None = None,
    label: str | None = None,
    client: str | None = None,
    group: str | None = None,
    split: str | None = None,
    columns: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    text: str | None = None,
    size: tuple[int, int] | None = None,
    model: str | Architecture | nn.Module | Factory | type[nn.Module] | None = None,
    weights: str | Path | Mapping[str, Tensor] | None = None,
    pretraining: Mapping[str, Any] | PooledTraining | None = None,
    training: Training | None = None,
    loss: str | Callable[..., Tensor] | nn.Module | type[nn.Module] | None = None,
    metric: str | None = None,
    client_test: float | str | None = None,
    methods: MethodLike | Iterable[MethodLike] | None = None,
    rounds: int | None = None,
    cohort_size: int | None = None,
    seeds: int | Sequence[int] | None = None,
    title: str | None = None,
    settings: Sequence[str] = (),
    out: str | Path | None = None,
    log: str | Sequence[str] | None = None,
    machine: Machine | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Sequence[Callback] = (),
    steps: Sequence[ReplyStep] = (),
) -> RunResult:
    """Run a recipe, or what is given here, and write its report beside its records.

    What is given takes the place of the recipe's. With ``data`` and no recipe, ``model`` and ``partition`` are needed
    too, and everything else has default values.

    Parameters
    ----------
    recipe : str or Path or Recipe, optional
        A recipe's name, a path to a .toml file, or a `Recipe`; default: ``demo``, if there are no ``data``.
    data : str or Path or DataSet or tuple or data frame, optional
        The name of a data set or the path of files; ``(x, y, x_test, y_test)`` as tensors or arrays, or ``(x, y)``, of
        which a fifth is held out for the test; a `DataSet`; a data frame (pandas, polars, pyarrow); a data set of
        Hugging Face or PyTorch, also a stream of at most a million examples; or two of these as (train, test). x are
        uint8 images ``[n, channels, height, width]``, floating-point numbers ``[n, ...]`` or token ids, int64
        ``[n, length]``; y are integers or names ``[n]``.
    partition : Scheme or Mapping[str, Sequence[int]] or Sequence[Sequence[int]] or str, optional
        A scheme, such as ``Dirichlet(0.1, num_clients=20)``; the training rows of each client, by its name or in the
        clients' order; or a column of the data, of which each value is a client.
    label : str, optional
        The column of the classes, of a file or a table.
    client : str, optional
        The column that says whose an example is.
    group : str, optional
        The column of what belongs together, such as a patient: only whole groups are held out for the test.
    split : str, optional
        The column that marks rows as train or test.
    columns : str or Sequence[str], optional
        The columns that are the input; default: all others.
    exclude : str or Sequence[str], optional
        Columns that are not used, such as ids.
    text : str, optional
        The column of text that is the input, of which each word becomes a token id.
    size : tuple of two int, optional
        Height and width to which photos are resized.
    model : str or Architecture or nn.Module or type or Callable, optional
        A name such as ``"lenet5"``; a class or function without arguments or of (shape, classes), which is called for
        each network; or a network, whose weights every seed begins with.
    weights : str or Path or Mapping[str, Tensor], optional
        The model from which the rounds begin: a safetensors file, the folder of an exported model or of a model of
        Hugging Face, or a state dict.
    pretraining : Mapping[str, object], optional
        Pooled training on all clients' examples before the first round, such as ``{"passes": 6, "lr": 0.02}``.
    training : Training, optional
        The settings of local training; what a recipe sets for one method alone takes precedence.
    loss : Callable or nn.Module or str, optional
        A function of logits and labels that takes the place of the cross-entropy in clients' training. It should keep
        nothing between batches: no checkpoint has it, and clients, seeds and methods share it.
    metric : str, optional
        What methods are first compared by, such as ``"auroc"``; default: accuracy.
    client_test : float or str, optional
        The share of each client's examples that it holds back to test models on, or ``"own"`` for the test examples
        that the data name as its own; default: there is one test set for all.
    methods : Iterable[Algorithm or str], optional
        The methods, such as ``[FedSeq(), SFedKD(teachers=3)]``, or their names, such as ``["fedseq"]``.
    rounds : int, optional
        Communication rounds.
    cohort_size : int, optional
        Clients in a round.
    seeds : int or Sequence[int], optional
        How many seeds, of 0, 1, 2, ..., or which.
    title : str, optional
        The title of tables and report.
    settings : Sequence[str]
        Changes to a recipe given by name, or to the defaults beside ``data``: ``"training.lr=0.05"``,
        ``"data.validation=0.1"``.
    out : str or Path, optional
        The run folder, which must not exist or be empty; default: a new one under ``runs/``.
    log : str or Sequence[str], optional
        Where metrics are logged too, instead of the recipe's ``log``: ``"tensorboard"`` or ``"wandb"``
        (offline).
    machine : Machine, optional
        Device, threads and workers; default: this process, one thread, on the CPU.
    on_progress : Callable[[Progress], None], optional
        Called after every round; default: progress is shown on the standard error stream, as bars in a terminal and
        as a line now and then elsewhere, or under the cell of a notebook.
    callbacks : Sequence[Callback]
        Called around the rounds of every trial, in this process (see `fedkeep.trials.callbacks`). Workers then
        share cohorts instead of trials.
    steps : Sequence[ReplyStep]
        Your own reply steps: checks, defences or measurements of what clients answer. Each trial has copies of its own.

    Returns
    -------
    RunResult
        The finished run.

    Raises
    ------
    FedKeepError
        For anything that cannot be run, before any training starts; the message says what to do.
    Terminated
        If SIGTERM or SIGHUP arrives and the program does not handle it itself: a `SystemExit` with the exit code 128
        plus the signal's number, after the last finished rounds were saved.
    """
    given = dict(locals())
    _refuse_workers("run")
    _check_objects(callbacks, steps)
    check_run_arguments(machine, on_progress)
    machine = machine or Machine()
    import_user_code(machine.use)
    made = make_recipe(**{name: value for name, value in given.items() if name not in OF_RUNNING})
    check_main(made.run.metric)
    experiment = Experiment(made, for_workers(made, machine))
    folder = prepare_run(
        experiment, out, ["fedkeep.run", made.name], steps
    ).absolute()  # the program may go to another folder
    trials, retry = experiment.trials(folder), _retry_command(experiment.recipe, folder, machine, callbacks, steps)
    with _shown(trials, on_progress, retry) as report:
        run_trials(trials, retry=retry, on_progress=report, callbacks=callbacks, steps=steps)
    return _result_of(folder, experiment.recipe)


@one_thread_at_a_time()
@plain_torch()
def resume(
    folder: str | Path,
    *,
    data: Examples | None = None,
    partition: Rows | None = None,
    model: nn.Module | Factory | type[nn.Module] | None = None,
    weights: Mapping[str, Tensor] | None = None,
    loss: Callable[..., Tensor] | nn.Module | None = None,
    machine: Machine | None = None,
    on_progress: OnProgress | None = None,
    callbacks: Sequence[Callback] = (),
    steps: Sequence[ReplyStep] = (),
) -> RunResult:
    """Continue a run that was stopped. The results are the same as without the stop.

    Parameters
    ----------
    folder : str or Path
        The run folder.
    data : DataSet or tuple, optional
        The examples, if they were given in Python and are no longer in the cache folder.
    partition : Mapping or Sequence, optional
        The clients' rows, or the column that names the client, if these were given in Python too.
    model : nn.Module or type or Callable, optional
        The network, if it was given in Python and cannot be imported: that of a notebook, for one.
    weights : Mapping[str, Tensor], optional
        The state dict from which the run began, if it was given in Python and is no longer in the cache folder.
    loss : Callable or nn.Module, optional
        The loss, if it was given in Python and cannot be imported.
    machine : Machine, optional
        Workers and folders; device, threads and stack are those with which the run began.
    on_progress : Callable[[Progress], None], optional
        Called after every round; default: progress is shown on the standard error stream, as bars in a terminal and
        as a line now and then elsewhere, or under the cell of a notebook.
    callbacks : Sequence[Callback]
        Called around the rounds of every trial, in this process.
    steps : Sequence[ReplyStep]
        The reply steps with which the run began.

    Returns
    -------
    RunResult
        The finished run.

    Raises
    ------
    FedKeepError
        If the folder is not a run folder, or the run cannot be continued, such as with other data, another network or
        another loss.
    """
    _refuse_workers("resume")
    if loss is not None:
        keep_loss(loss)
    _check_objects(callbacks, steps)
    check_run_arguments(machine, on_progress)
    folder, machine = Path(folder).absolute(), machine or Machine()
    import_user_code(machine.use)
    experiment = open_run(folder, machine, None if model is None else architecture_of(model))
    if weights is not None and keep_weights(weights) != experiment.recipe.weights:
        raise RunError(f"{folder} was begun with other weights than these. Give the former.")
    if data is not None:
        rows = None if isinstance(partition, str) else partition
        columns = {experiment.recipe.data_options.client, getattr(experiment.recipe.partition, "column", "")}
        if isinstance(partition, str) and partition not in columns:
            raise RunError(f"{folder} was not begun with partition={partition!r}. Give the former, or leave it out.")
        found = examples_of(data, rows, machine.data_dir, experiment.recipe.data_options)
        if found != experiment.recipe.data:
            raise RunError(
                f"{folder} was begun with {experiment.recipe.data}, and these data are {found}. Give the former"
                f"{', with partition= again if the clients were named there' * (partition is None)}."
            )
    experiment = Experiment(experiment.recipe, for_workers(experiment.recipe, experiment.machine))
    check_code(folder, experiment.machine.use)
    trials, retry = experiment.trials(folder), _retry_command(experiment.recipe, folder, machine, callbacks, steps)
    with _shown(trials, on_progress, retry) as report:
        run_trials(trials, retry=retry, on_progress=report, callbacks=callbacks, steps=steps)
    return _result_of(folder, experiment.recipe)


def _retry_command(
    recipe: Recipe, folder: Path, machine: Machine, callbacks: Sequence[Callback], steps: Sequence[ReplyStep]
) -> str:
    """Return what continues a run, as a command or as Python."""
    loss = OWN_LOSSES.get(recipe.training.loss)
    objects = {  # which no folder holds
        "model": isinstance(recipe.model, Custom) and not machine.allow_code,
        "loss": loss is not None and why_not_importable(loss),
        "callbacks": callbacks,
        "steps": steps,
    }
    arguments = "".join(f", {name}=..." for name, given in objects.items() if given)
    in_python = f"fedkeep.resume({str(folder)!r}{arguments}) in Python"
    return in_python if arguments or own_classes(recipe) else resume_command(folder, machine)


def _result_of(folder: Path, recipe: Recipe) -> RunResult:
    """Write the report of a run, and return the run."""
    return result_of(write_all(folder), recipe.model if isinstance(recipe.model, Custom) else None)


def _refuse_workers(name: str) -> None:
    """End a worker process that runs its parent's program from the top, and say what the program lacks."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(
            f"worker processes import this program, which must not call fedkeep.{name} then: put the call under "
            'if __name__ == "__main__":'
        )


@contextmanager
def _shown(trials: Sequence[Trial], on_progress: OnProgress | None, retry: str) -> Iterator[OnProgress]:
    """Give what takes reports: a display, or the user's function, which is called once for each round.

    An interrupt says how to go on.
    """

    def report(progress: Progress) -> None:
        if on_progress is not None and not progress.activity:
            on_progress(progress)

    try:
        if on_progress is None:
            with Display(Console(stderr=True), {trial.name: trial.rounds for trial in trials}) as display:
                yield display
        else:
            yield report
    except KeyboardInterrupt as error:
        error.add_note(f"Finished rounds are saved. Continue with: {retry}")
        raise


def _check_objects(callbacks: object, steps: object) -> None:
    wrong = []
    for name, given, base in (("callbacks", callbacks, Callback), ("steps", steps, ReplyStep)):
        if not isinstance(given, Sequence):
            wrong.append(f"{name} is a list, not {given!r:.80}.")
            continue
        for one in given:
            if isinstance(one, type) and issubclass(one, base):
                wrong.append(f"{name} holds the class {one.__name__}: give an object, {one.__name__}().")
            elif not isinstance(one, base):
                wrong.append(f"{name} holds {one!r:.80}, which is no fedkeep.{base.__name__}.")
    if wrong:
        raise ConfigError(" ".join(wrong))
