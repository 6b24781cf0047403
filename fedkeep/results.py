"""A run as `fedkeep.run` returns it: its table, its curves, its models, and what one method gained on another."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedkeep.errors import RunError, require_optional
from fedkeep.experiment.python_recipe import architecture_of
from fedkeep.export.trained_model import trained_model
from fedkeep.models import Architecture
from fedkeep.reporting import run_folder
from fedkeep.reporting.figures import CurveMetric, curves, theme
from fedkeep.reporting.metric import METRICS, columns_for, headline, metric_of
from fedkeep.reporting.run_folder import Run
from fedkeep.reporting.summary import Difference, deduplicate, difference, label_of, summary, trials_of
from fedkeep.reporting.table import show_value
from fedkeep.reporting.trial import TrialResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class TrainedTrial(TrialResult):
    """One method with one seed, with its trained model."""

    run: RunResult | None = field(default=None, compare=False)

    def model(self, network: Any = None) -> nn.Module:
        """Return the trained model.

        Parameters
        ----------
        network : nn.Module or type or Callable, optional
            A network of your own that was given in Python, if this is a run that was read again and the network cannot
            be imported.

        Returns
        -------
        nn.Module
            Maps inputs as they are stored, such as uint8 images ``[n, channels, height, width]``, to a score for each
            class ``[n, classes]``: the normalisation is part of it.

        Raises
        ------
        FedKeepError
            If the trial is not finished, its folder holds no model, or the model alone does not predict.
        """
        assert self.run is not None  # set by `RunResult`
        architecture = self.run.architecture if network is None else architecture_of(network)
        return trained_model(
            self.run, method=self.method, seed=self.seed, evaluation_model=self.evaluation_model, model=architecture
        ).predictor


@dataclass(frozen=True, repr=False)
class RunResult(Run):
    """A run, finished or not.

    Attributes
    ----------
    architecture : Architecture or None
        The network, if it was given in Python.
    """

    architecture: Architecture | None = None

    def __repr__(self) -> str:
        """Return what was run, in one line."""
        seeds = len({trial.seed for trial in self.trials})
        unfinished = sum(not trial.finished for trial in deduplicate(self.trials))
        methods = ", ".join(dict.fromkeys(trial.method for trial in self.trials))  # averages stand beside their method
        words = f"{methods or 'no trial yet'}; {seeds} seed{'s' * (seeds != 1)}"
        words += f"; {unfinished} trial{'s' * (unfinished != 1)} unfinished" if unfinished else ""
        return f"<Run {str(self.path)!r}: {words}>"

    def _repr_html_(self) -> str:
        """Return the table and the curves, for a notebook."""
        rows = summary(self)
        columns = columns_for(trials_of(rows))
        head = "".join(f"<th>{escape(metric.heading(trials_of(rows)))}</th>" for metric in columns)
        lines = "".join(
            f"<tr><th>{escape(row.name)}</th>"
            + "".join(f"<td>{escape(show_value(row, metric, rows))}</td>" for metric in columns)
            + "</tr>"
            for row in rows
        )
        table = f"<table><thead><tr><th>method</th>{head}</tr></thead><tbody>{lines}</tbody></table>"
        figures = "".join(_svg(self.plot(metric)) for metric in ("accuracy", "forgetting"))
        return f"<p><b>{escape(self.title)}</b><br>{escape(str(self.path))}</p>{table}{figures}"

    def __getitem__(self, key: str | tuple[str, int]) -> TrainedTrial:
        """Return one trial.

        Parameters
        ----------
        key : str or tuple[str, int]
            The method's label or name, and the seed, which may be left out if there is only one.

        Returns
        -------
        TrainedTrial
            The trial.

        Raises
        ------
        RunError
            If there is none, or several.
        """
        method, seed = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        if not isinstance(method, str):
            raise RunError(f"a trial is named by its method and its seed, as in run['FedSeq', 0], not {key!r}.")
        by_label: dict[str, list[TrialResult]] = {}
        for trial in self.trials:
            by_label.setdefault(trial.label, []).append(trial)
        named = by_label[label_of(method, by_label, self)]
        found = [trial for trial in named if seed in (None, trial.seed)]
        if len(found) != 1:
            seeds = ", ".join(str(trial.seed) for trial in named)
            example = f"run[{named[0].label!r}, {named[0].seed}]"
            raise RunError(f"{named[0].label} was run with the seeds {seeds}. Name one of them, as in {example}.")
        values = {name: getattr(found[0], name) for name in TrialResult.__dataclass_fields__}
        return TrainedTrial(**values, run=self)

    def table(self) -> DataFrame:
        """Return the results as a table, one row a method.

        Returns
        -------
        DataFrame
            Means and standard deviations over seeds, by method. Accuracies and forgetting are fractions, times seconds,
            and traffic bytes per client and round. `fedkeep.reporting.metric` has the names of the columns.

        Raises
        ------
        MissingExtra
            If pandas is not installed.
        """
        pandas = require_optional("pandas", "run.table()", "pandas")
        rows = summary(self)
        columns = columns_for(trials_of(rows))
        table: dict[str, list[Any]] = {"seeds": [len(row.seeds) for row in rows]}
        for metric in columns:
            spreads = [row.value(metric) for row in rows]
            table[metric.name] = [spread.mean for spread in spreads]
            table[f"{metric.name}_std"] = [spread.std for spread in spreads]
        frame: DataFrame = pandas.DataFrame(table, index=pandas.Index([row.name for row in rows], name="method"))
        return frame

    def plot(self, metric: CurveMetric = "accuracy") -> Figure:
        """Draw a metric over rounds: per method the mean over seeds, and a band from lowest to highest.

        Parameters
        ----------
        metric : str
            What is drawn: ``"accuracy"``, ``"forgetting"``, ``"balanced"`` (the mean of the classes' accuracies),
            ``"loss"``, or a metric by its name in CSV files.

        Returns
        -------
        Figure
            A Matplotlib figure, which a notebook shows; ``figure.savefig("accuracy.pdf", bbox_inches="tight")`` writes
            it.

        Raises
        ------
        RunError
            For another metric.
        """
        figure = curves(trials_of(summary(self)), metric)
        # Without pyplot, which chooses a backend for the whole process, a notebook would show its address.
        figure._repr_svg_ = partial(_svg, figure)  # type: ignore[attr-defined]
        return figure

    def compare(self, method: str, reference: str, metric: str | None = None) -> Difference:
        """Return what a method gained on another, paired by seed, with the 95 % interval.

        Parameters
        ----------
        method, reference : str
            Labels of two methods, or their names where one label has that name.
        metric : str, optional
            ``"accuracy"`` or ``"forgetting"``, each over the last rounds as in the table, or another metric by its name
            in CSV files. Default: the recipe's ``run.metric``, or else accuracy.

        Returns
        -------
        Difference
            ``values`` by seed, and ``interval`` with ``mean``, ``low`` and ``high``.

        Raises
        ------
        RunError
            For an unknown method or metric, a method of which no trial is finished, or a name that several rows have.
        """
        rows = summary(self)
        main, forgetting = headline(trials_of(rows))
        accuracy = METRICS["window_incremental" if forgetting.shown == "with tasks" else "window_mean"]
        chosen = {"": main, "accuracy": accuracy, "forgetting": forgetting}.get(metric or "", metric or main)
        finished = {row.label: row for row in rows if row.finished}
        trials = {label: row.trials for label, row in finished.items()}
        row, other = (finished[label_of(str(name), trials, self, "finished ")] for name in (method, reference))
        found = difference(row, other, chosen)
        if found.seeds or found.reason or not {trial.seed for trial in row.trials} & {t.seed for t in other.trials}:
            return found
        wanted = metric_of(chosen)
        scored = wanted.shown == "scored"
        name = wanted.name if scored else metric or wanted.name
        hint = f'; evaluations measure it with metric="{name}" (run.metric)' if scored and wanted != main else ""
        return replace(found, reason=f"{name} was not measured of both{hint}")


def read_run(path: str | Path) -> RunResult:
    """Read a run, finished or not.

    Parameters
    ----------
    path : str or Path
        A run folder, an archive of one, or a folder in an archive.

    Returns
    -------
    RunResult
        The run with all of its trials.

    Raises
    ------
    RunError
        If there is no run at `path`, or one of its files is damaged.
    """
    return result_of(run_folder.read_run(Path(path).absolute()))


def result_of(run: Run, architecture: Architecture | None = None) -> RunResult:
    """Return a run with what a user does with it.

    ``architecture``: The network, if it was given in Python.
    """
    return RunResult(run.path, run.info, run.recipe, run.trials, architecture)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    with theme():
        figure.savefig(buffer, format="svg", bbox_inches="tight")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
