"""Write a trained model as files that need no FedKeep: safetensors, a PyTorch program, ONNX, and a model card."""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fedkeep._utils.escaping import markdown
from fedkeep._utils.files import atomic_write
from fedkeep.data.columns import columns_from_json
from fedkeep.errors import ConfigError, MissingExtra, RunError
from fedkeep.experiment.model_config import model_to_table
from fedkeep.experiment.python_recipe import architecture_of
from fedkeep.export.trained_model import TrainedModel, trained_model
from fedkeep.interface import get_algorithm
from fedkeep.interface.algorithm import describe_replies
from fedkeep.models.custom import Custom
from fedkeep.models.predictor import exported
from fedkeep.options import as_table
from fedkeep.reporting.data_read import NOT_KNOWN, DataRead, data_read
from fedkeep.reporting.run_folder import Run, read_run
from fedkeep.reporting.table import human_bytes, initial_models
from fedkeep.rounds.evaluation_models import EvaluationModel


def model_card(model: TrainedModel, *, onnx: bool) -> str:
    """Return the card of a model, in Markdown.

    ``onnx``: Whether the model was written for ONNX too.
    """
    trial, recipe = model.trial, model.recipe
    pooled = recipe.pretraining.passes > 0
    cls = get_algorithm(trial.algorithm)
    read = data_read(trial.info, trial.partition)
    kind, shape = model.input["type"], model.input["shape"]
    lines = [
        "---",
        "tags: [federated-learning, pytorch]",
        "---",
        "",
        f"# {markdown(trial.label)} on {markdown(str(trial.info.get('dataset', recipe.data)))}",
        "",
        f"A network ({markdown(recipe.model.name)}) with {len(model.label_names)} classes, trained by federated "
        f"learning with [FedKeep](https://github.com/fedkeep/fedkeep). Accuracy on the test examples after the last "
        f"round: {100 * trial.last:.2f} %.",
        "",
        "## Use it",
        "",
        f"It takes {kind} {_shape(shape)}. {_scaling(model)}{_image_files(model)}",
        "Column i of the scores belongs to the i-th class of `config.json`'s `label_names`. In plain PyTorch:",
        "",
        "```python",
        *torch_lines(shape, kind),
        "```",
        "",
    ]
    if onnx:
        lines += ["With ONNX Runtime:", "", "```python", *onnx_lines(shape, kind), "```", ""]
    lines += [
        f"`model.safetensors` holds the weights by name, for `load_state_dict` of a module {_module(model)}",
        "",
        "## How it was trained",
        "",
        *_table(_training(model)),
        "",
        "## What was read",
        "",
        *_table({what: text for what, text in read.facts() if text and what in ("inputs", "examples", "noted")}),
        "",
        "## Accuracy by class",
        "",
        *_accuracies(model, read),
        "",
        "## What left the clients",
        "",
        *(["- their training examples, all of them, for the pooled training of the initial model"] if pooled else []),
        *[f"- {markdown(line)}" for line in describe_replies(cls)],
        f"- measured: {human_bytes(trial.up)} sent and {human_bytes(trial.down)} received by a client in a round in "
        "which it took part",
        "",
        "No example left a client except as this list says.",
        "",
        *_privacy(model),
        "",
    ]
    return "\n".join(lines)


def torch_lines(shape: list[int], kind: str) -> list[str]:
    """Return the lines of Python that load and call the model in plain PyTorch."""
    return [
        "import torch",
        'model = torch.export.load("model.pt2").module()',
        f"inputs = torch.zeros(1, {', '.join(map(str, shape))}, dtype=torch.{kind})  # put your inputs here",
        "print(model(inputs).argmax(-1))",
    ]


def onnx_lines(shape: list[int], kind: str) -> list[str]:
    """Return the lines of Python that load and call the model in ONNX Runtime."""
    return [
        "import numpy, onnxruntime",
        'session = onnxruntime.InferenceSession("model.onnx")',
        f"inputs = numpy.zeros((1, {', '.join(map(str, shape))}), numpy.{kind})  # put your inputs here",
        'print(session.run(None, {"inputs": inputs})[0].argmax(-1))',
    ]


def _shape(shape: list[int]) -> str:
    return f"[n, {', '.join(map(str, shape))}]"


def _scaling(model: TrainedModel) -> str:
    if model.input["type"] == "uint8":
        return "Give it pixels from 0 to 255, as images store them: the normalisation is part of the model."
    if columns_from_json(model.input):
        return (
            "`fedkeep predict` gives it the rows of a table. `columns` in `config.json` says how: numbers (of a date, "
            "days since 1970) get `fill` where a cell is empty, less `mean` (0), divided by `scale` (1); a category is "
            "a feature for each of its `values`, and one for all `other` ones. They are means, deviations and frequent "
            "values over all training rows; no value of a single row is among them."
        )
    return "Give it inputs as they were in training."


def _module(model: TrainedModel) -> str:
    """Return which module takes the weights, and how FedKeep predicts with them."""
    if isinstance(model.recipe.model, Custom):
        return (
            f"like `{model.recipe.model.name}`. With FedKeep: `fedkeep predict FOLDER FILES --allow-code` where Python "
            "can import that, otherwise `fedkeep.predict(FOLDER, FILES, network=NETWORK)` with it."
        )
    return "of your own. With FedKeep: `fedkeep predict FOLDER FILES`."


def _image_files(model: TrainedModel) -> str:
    """Return how a file becomes the pixels that the network takes; empty for what is no image."""
    shape = model.input["shape"]
    if model.input["type"] != "uint8" or len(shape) != 3 or shape[0] not in (1, 3):
        return ""
    channels, height, width = shape
    size = f"{width} x {height} pixels (width x height)"
    resized = {
        "whole": f"resizes all of it to {size} with Pillow's LANCZOS, as was done for training",
        "middle": f"resizes its middle square to {size} with Pillow's LANCZOS, unless it has this size",
        "none": f"takes {size} alone, since no image was resized for training",
    }[model.resizing]
    return (
        f" `fedkeep predict` turns an image file upright as its EXIF data say, converts it to "
        f"{'RGB' if channels == 3 else 'greyscale'}, and {resized}; a program of your own has to do the same."
    )


def _privacy(model: TrainedModel) -> list[str]:
    """Return what was noised and the epsilons of the trial, or that nothing was."""
    privacy = model.recipe.privacy
    at_delta = f"for delta {privacy.delta:g}"
    noises = {  # of the options that are on: what is done, and the epsilon that the trial's record gives for it
        "noise_multiplier": (
            f"DP-SGD in local training: noise multiplier {privacy.noise_multiplier:g}, the gradient of each example "
            f"clipped to norm {privacy.max_grad_norm:g}",
            f"{{}} for an example more or less {at_delta}, noised label counts included",
            "epsilon",
        ),
        "counts_epsilon": (
            f"noise on label counts and what follows from them: epsilon {privacy.counts_epsilon:g} for each telling",
            "{} for an example more or less, in all",
            "counts_epsilon",
        ),
        "client_noise_multiplier": (
            f"central differential privacy: noise multiplier {privacy.client_noise_multiplier:g} on the mean update, "
            f"the update of each client clipped to norm {privacy.max_update_norm:g}",
            f"{{}} for a client more or less {at_delta}",
            "client_epsilon",
        ),
        "confidences_epsilon": (
            f"noise on the confidences that clients are sent: epsilon {privacy.confidences_epsilon:g} in each round",
            "{} for an example of the server more or less, in all",
            "confidences_epsilon",
        ),
        "prototypes_noise_multiplier": (
            f"noise on prototypes: noise multiplier {privacy.prototypes_noise_multiplier:g}, a client's change of all "
            f"of them clipped to norm {privacy.max_prototype_change:g}",
            f"{{}} for a client more or less {at_delta}",
            "prototypes_epsilon",
        ),
    }
    lines = [
        f"- {done} ({_epsilon(model, metric, of_what)})"
        for option, (done, of_what, metric) in noises.items()
        if getattr(privacy, option)
    ]
    noised = bool(lines)
    if privacy.secure_aggregation:
        lines.append("- secure aggregation: the server saw sums of models, and no client's own")
    if not noised:
        lines += [""] * bool(lines)
        return [*lines, "What models and statistics reveal about examples is not bounded: nothing was noised."]
    return [
        "What was done for privacy:",
        "",
        *lines,
        "",
        "Every epsilon is for neighbours with and without one example, or one client (add or remove), over all rounds "
        "of this trial, and where clients differ the largest; other trials on the same examples add theirs. It bounds "
        "nothing that has no noise in this list. The noise of a simulation follows from its seed and protects nobody; "
        "at real sites it is secret.",
    ]


def _epsilon(model: TrainedModel, metric: str, of_what: str) -> str:
    """Return an epsilon of the trial in words."""
    try:
        value = float(getattr(model.trial, metric))
    except MissingExtra:
        return "epsilon is not known here: its accountant needs the extra privacy"
    return "this method sends nothing of the kind" if math.isnan(value) else of_what.format(f"epsilon {value:.4g}")


def _training(model: TrainedModel) -> dict[str, str]:
    trial, recipe = model.trial, model.recipe
    options = ", ".join(f"{name} {value}" for name, value in trial.options.items())
    partition = ", ".join(f"{name} {value}" for name, value in as_table(recipe.partition).items())
    training = ", ".join(f"{name} {value}" for name, value in as_table(recipe.training).items())
    rows = {
        "method": trial.label + (f" ({options})" if options else ""),
        "paper": str(trial.info.get("paper", "")),
        "data": str(trial.info.get("dataset", recipe.data)),
        "partition": f"{recipe.partition.name} ({partition}), {trial.info.get('num_clients')} clients",
        "initial model": initial_models([trial]),
        "classes in tasks": ", ".join(map(str, trial.task_sizes)),
        "rounds": f"{trial.rounds_planned}, {trial.info.get('cohort_size')} clients in each",
        "local training": training,
        "seed": str(trial.seed),
        "FedKeep": ", ".join(trial.versions),
    }
    return {name: value for name, value in rows.items() if value}


def _table(rows: dict[str, str]) -> list[str]:
    return ["| | |", "|:--|:--|", *(f"| {name} | {markdown(value)} |" for name, value in rows.items())]


def _accuracies(model: TrainedModel, read: DataRead) -> list[str]:
    values = model.trial.class_history[-1]
    shown = ("no test examples" if math.isnan(value) else f"{100 * value:.1f} %" for value in values)
    lines = [
        f"| {markdown(name)} | {NOT_KNOWN if train is None else train} | {test} | {value} |"
        for (name, train, test), value in zip(read.classes, shown, strict=True)
    ]
    return ["| class | examples in training | in testing | accuracy |", "|:--|--:|--:|--:|", *lines]


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
        the only one (``run.evaluation_models``).
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
    with_onnx = onnx_available() if onnx is None else onnx
    if with_onnx and not onnx_available():
        raise ConfigError("ONNX needs packages that are not installed. Install the extra export: onnx, onnxscript.")
    folder = Path(out) if out is not None else _default_folder(model)
    if folder.is_file():
        raise RunError(f"{folder} is a file. Choose another --out.")
    weights = exported(model.predictor.network, model.weights)
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    atomic_write(folder / WEIGHTS, save(contiguous, {"format": "pt"}))
    program = _program(model, folder / WEIGHTS)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    atomic_write(folder / PROGRAM, buffer.getvalue())
    if with_onnx:
        atomic_write(folder / ONNX, _onnx(program))
    atomic_write(folder / CONFIG, json.dumps(_config(model), indent=2))
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
    log = logging.getLogger("torch.onnx")
    level = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)
