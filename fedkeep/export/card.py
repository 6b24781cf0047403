"""The model card: what a model is, on what and how it was trained, how good it is, and what left the clients."""

from __future__ import annotations

import math

from fedkeep._utils.escaping import markdown
from fedkeep.data.columns import columns_from_json
from fedkeep.errors import MissingExtra
from fedkeep.export.trained_model import TrainedModel
from fedkeep.interface import get_algorithm
from fedkeep.interface.algorithm import describe_replies
from fedkeep.models.custom import Custom
from fedkeep.options import as_table
from fedkeep.reporting.record import NOT_KNOWN, DataRead
from fedkeep.reporting.table import human_bytes, initial_models


def model_card(model: TrainedModel, *, onnx: bool) -> str:
    """Return the card of a model, in Markdown.

    ``onnx``: Whether the model was written for ONNX too.
    """
    trial, recipe = model.trial, model.recipe
    pooled = recipe.pretraining.passes > 0
    cls = get_algorithm(trial.algorithm)
    read = trial.data_read()
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
        "model": model.choice,
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
