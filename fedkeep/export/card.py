"""The model card: what a model is, on what and how it was trained, how good it is, and what left the clients."""

from __future__ import annotations

import math
from functools import partial
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from fedkeep._utils.escaping import markdown
from fedkeep.data.columns import columns_from_json
from fedkeep.errors import MissingExtra
from fedkeep.export.trained_model import TrainedModel
from fedkeep.interface import get_algorithm
from fedkeep.interface.algorithm import describe_replies
from fedkeep.models.custom import Custom
from fedkeep.options import Options, as_table
from fedkeep.reporting.record import NOT_KNOWN
from fedkeep.reporting.table import human_bytes, initial_models
from fedkeep.reporting.trial import TrialResult


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
