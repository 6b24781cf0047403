"""Write a trained model as files that need no FedKeep: safetensors, a PyTorch program, ONNX, and a model card."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined
from safetensors.torch import save

from fedkeep._utils.escaping import markdown
from fedkeep._utils.files import atomic_write
from fedkeep.data.columns import columns_from_json
from fedkeep.errors import ConfigError, MissingExtra, RunError
from fedkeep.experiment.python_recipe import architecture_of
from fedkeep.experiment.recipe import model_to_table
from fedkeep.export.trained_model import TrainedModel, exported, trained_model
from fedkeep.interface import get_algorithm
from fedkeep.interface.algorithm import describe_replies
from fedkeep.models.custom import Custom
from fedkeep.options import Options, as_table
from fedkeep.reporting.run_folder import Run, method_of, read_run
from fedkeep.reporting.table import human_bytes, initial_models
from fedkeep.reporting.trial import NOT_KNOWN, TrialResult
from fedkeep.rounds.run_settings import EvaluationModel


def model_card(model: TrainedModel, *, onnx: bool) -> str:
    """Return the card of a model, in Markdown.

    ``onnx``: Whether the model was written for ONNX too.
    """
    trial, recipe, read = model.trial, model.recipe, model.trial.data_read()
    values = trial.class_history[-1]
    shown = ("no test examples" if math.isnan(value) else f"{100 * value:.1f} %" for value in values)
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["escaped"] = markdown
    template = files("fedkeep.export").joinpath("card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        model=model,
        trial=trial,
        recipe=recipe,
        privacy=recipe.privacy,
        onnx=onnx,
        dataset=str(trial.info.get("dataset", recipe.data)),
        kind=model.input["type"],
        shape=model.input["shape"],
        has_columns=bool(columns_from_json(model.input)),
        is_custom=isinstance(recipe.model, Custom),
        training=_training(model),
        facts=[(what, text) for what, text in read.facts() if text and what in ("inputs", "examples", "noted")],
        classes=[
            (name, NOT_KNOWN if train is None else train, test, value)
            for (name, train, test), value in zip(read.classes, shown, strict=True)
        ],
        replies=describe_replies(get_algorithm(trial.algorithm)),
        up=human_bytes(trial.up),
        down=human_bytes(trial.down),
        epsilon=partial(_epsilon, trial),
    )


def _epsilon(trial: TrialResult, metric: str, neighbours: str) -> str:
    """Return an epsilon of the trial in words."""
    try:
        value = float(getattr(trial, metric))
    except MissingExtra:
        return "epsilon is not known here: its accountant needs the extra privacy"
    return "this method sends nothing of the kind" if math.isnan(value) else f"epsilon {value:.4g} {neighbours}"


def _training(model: TrainedModel) -> dict[str, str]:
    """Return how the model was trained, by what each is called; what is empty is not shown."""
    trial, recipe = model.trial, model.recipe

    def listed(options: Options) -> str:
        return ", ".join(f"{name} {value}" for name, value in as_table(options).items())

    options = ", ".join(f"{name} {value}" for name, value in trial.options.items())
    return {
        "method": trial.label + (f" ({options})" if options else ""),
        "model": model.choice,
        "paper": str(trial.info.get("paper", "")),
        "data": str(trial.info.get("dataset", recipe.data)),
        "partition": f"{recipe.partition.name} ({listed(recipe.partition)}), {trial.info.get('num_clients')} clients",
        "initial model": initial_models([trial]),
        "classes in tasks": ", ".join(map(str, trial.task_sizes)),
        "rounds": f"{trial.rounds_planned}, {trial.info.get('cohort_size')} clients in each",
        "local training": listed(recipe.training),
        "seed": str(trial.seed),
        "FedKeep": ", ".join(trial.versions),
    }


log = logging.getLogger(__name__)

WEIGHTS, PROGRAM, ONNX, CONFIG, CARD = "model.safetensors", "model.pt2", "model.onnx", "config.json", "README.md"
"""The files of an exported model."""
INPUT, OUTPUT = "inputs", "scores"
"""The names of input and output in the ONNX file."""


def export_model(
    run: str | Path | Run,
    out: str | Path | None = None,
    *,
    method: str | None = None,
    seed: int | None = None,
    evaluation_model: EvaluationModel | None = None,
    onnx: bool | None = None,
    allow_code: bool = False,
    network: Any = None,
) -> Path:
    """Write a trained model into a folder, for use without FedKeep.

    The folder holds ``model.safetensors`` (the weights by name; a network of your own loads them with
    ``load_state_dict``), ``model.pt2`` (a program for `torch.export.load`, which takes inputs as they are stored),
    ``model.onnx`` (the same for ONNX), ``config.json`` (network, input shape, normalisation, how images are resized,
    class names) and ``README.md`` (the model card).

    Parameters
    ----------
    run : str, Path or Run
        The run folder.
    out : str or Path, optional
        The folder to write; default: one in the run folder, under ``export/``.
    method : str, optional
        The method's label or name; may be left out if the run has one method.
    seed : int, optional
        The trial's seed; default: the first.
    evaluation_model : {"last", "round", "moving"}, optional
        Which model of the trial; default: the moving average if the run kept it, otherwise the mean of the round, or
        the only one (``run.evaluation_models``). Where there are several, the log says how each scores.
    onnx : bool, optional
        Whether to write ``model.onnx``; default: if the packages for it are installed.
    allow_code : bool
        Let the recipe import its network.
    network : nn.Module or type or Callable, optional
        A network of your own that was given in Python, if this is a run that was read again and the network cannot be
        imported.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    FedKeepError
        If there is no such model, the model alone does not predict, or PyTorch cannot export its network.
    """
    run = run if isinstance(run, Run) else read_run(run)
    given = getattr(run, "architecture", None)  # of a run that was begun in Python
    model = trained_model(
        run,
        method=method,
        seed=seed,
        evaluation_model=evaluation_model,
        allow_code=allow_code,
        model=given if network is None else architecture_of(network),
    )
    if evaluation_model is None and len(model.kept) > 1:
        log.warning(
            "%s: exported is %s. An average is taken, since it changes least from round to round, unless "
            "evaluation_model (--model) says otherwise: test examples must not choose.",
            method_of(model.trial.label),
            model.choice,
        )
    with_onnx = onnx_available() if onnx is None else onnx
    if with_onnx and not onnx_available():
        raise ConfigError("ONNX needs packages that are not installed. Install the extra export: onnx, onnxscript.")
    folder = Path(out) if out is not None else _default_folder(model)
    if folder.is_file():
        raise RunError(f"{folder} is a file. Choose another --out.")
    weights = exported(model.predictor.network, model.weights)
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    content = save(contiguous, {"format": "pt"})
    atomic_write(folder / WEIGHTS, content)
    program = _program(model, folder / WEIGHTS)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    atomic_write(folder / PROGRAM, buffer.getvalue())
    if with_onnx:
        atomic_write(folder / ONNX, _onnx(program))
    config = _config(model) | {"weights_sha256": hashlib.sha256(content).hexdigest()}
    atomic_write(folder / CONFIG, json.dumps(config, indent=2))
    atomic_write(folder / CARD, model_card(model, onnx=with_onnx))
    return folder


def onnx_available() -> bool:
    """Return whether the packages that write ONNX are installed."""
    return all(find_spec(name) is not None for name in ("onnx", "onnxscript"))


def _default_folder(model: TrainedModel) -> Path:
    path = model.trial.path
    assert path is not None  # it was read from there
    return model.run.path / "export" / (path.name if model.which == "last" else f"{path.name}-{model.which}")


def _config(model: TrainedModel) -> dict[str, Any]:
    return {
        "method": model.trial.label,
        "algorithm": model.trial.algorithm,
        "seed": model.trial.seed,
        "evaluation_model": model.which,
        "accuracies": model.kept,
        "network": model_to_table(model.recipe.model),
        "first_classes": model.first_classes,
        "rows_per_class": model.predictor.rows_per_class,
        "input": model.input,
        "resizing": model.resizing,
        "data": as_table(model.recipe.data_options),
        "label_names": model.label_names,
    }


def _program(model: TrainedModel, weights: Path) -> torch.export.ExportedProgram:
    """Return the network as a PyTorch program, for any number of inputs at once."""
    example = torch.zeros(2, *model.input["shape"], dtype=getattr(torch, model.input["type"]))
    try:
        with _quiet():
            program = torch.export.export(
                model.predictor, (example,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)
            )
    except Exception as error:  # whatever a user's network does that cannot be captured
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"PyTorch cannot export the network {model.recipe.model.name}: {reason} Its weights are in "
            f"{weights}, and load into the same class with load_state_dict."
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names the paths of this machine
    return program


def _onnx(program: torch.export.ExportedProgram) -> bytes:
    with _quiet():
        converted = torch.onnx.export(program, input_names=[INPUT], output_names=[OUTPUT], verbose=False)
    assert converted is not None
    content: bytes = converted.model_proto.SerializeToString()
    return content


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep PyTorch's remarks about packages that are not needed here out of the output."""
    of_torch = logging.getLogger("torch.onnx")
    level = of_torch.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_torch.setLevel(logging.ERROR)
        try:
            yield
        finally:
            of_torch.setLevel(level)
