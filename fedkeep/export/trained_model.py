"""The trained model of a run: its weights, its network, what is known about both, and files that need no FedKeep.

A `Predictor` is the network as others use it: raw inputs in, a score for each class out. The files are safetensors, a
PyTorch program, ONNX, and a model card.
"""

import hashlib
import io
import json
import logging
import math
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedkeep._utils.digests import DamagedFile, check_file, read_manifest
from fedkeep._utils.files import atomic_write
from fedkeep._utils.templates import template
from fedkeep._utils.torch_state import one_thread_at_a_time, plain_torch
from fedkeep.data.catalog import is_known
from fedkeep.data.columns import columns_from_json
from fedkeep.errors import ConfigError, MissingExtra, RunError, first_line
from fedkeep.experiment.provenance import used
from fedkeep.experiment.python_recipe import architecture_of
from fedkeep.experiment.recipe import Recipe, model_to_table
from fedkeep.experiment.recipe_loader import parse_recipe
from fedkeep.interface import Algorithm, get_algorithm
from fedkeep.interface.algorithm import describe_replies, describe_reply, send_label_counts
from fedkeep.models.base import Architecture
from fedkeep.models.custom import Custom, SplitNetwork, describe_code, warn_of_other_network
from fedkeep.models.heads import resize_classifier
from fedkeep.models.pretrained import FrozenNetwork
from fedkeep.models.trial_step import constants_of
from fedkeep.models.weights import Weights, load_weights
from fedkeep.options import Options, as_table
from fedkeep.reporting.run_folder import Run, read_run
from fedkeep.reporting.summary import deduplicate, label_of
from fedkeep.reporting.table import human_bytes, initial_models
from fedkeep.reporting.trial import NOT_KNOWN, TrialResult
from fedkeep.rounds.run_settings import EvaluationModel
from fedkeep.training.client_test import client_test
from fedkeep.trials.trial import MANIFEST

log = logging.getLogger(__name__)


class Predictor(nn.Module):
    """A network with the normalisation of its inputs: maps stored examples to scores.

    ``network``: Maps normalised inputs, float32 [b, ...], to logits, [b, classes * rows_per_class].
    ``mean``, ``std``: Mean and standard deviation of each channel, for pixels scaled to 0..1; not used for other
        inputs.
    ``rows_per_class``: Adjacent classifier rows for each class, of which the first is its score.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, network: nn.Module, mean: Sequence[float], std: Sequence[float], rows_per_class: int = 1
    ) -> None:
        super().__init__()
        self.network = network
        self.rows_per_class = rows_per_class
        self.register_buffer("mean", torch.tensor(list(mean), dtype=torch.float32).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std), dtype=torch.float32).view(-1, 1, 1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the scores.

        ``inputs``: uint8 pixels [b, channels, height, width]; token ids and numbers go to the network as they are.
        Returns: Scores (logits), float32 [b, classes].
        """
        if inputs.dtype == torch.uint8:
            inputs = inputs.to(torch.float32).div(255).sub(self.mean).div(self.std)
        scores: Tensor = self.network(inputs)
        return scores[:, :: self.rows_per_class] if self.rows_per_class > 1 else scores


def build_predictor(
    architecture: Architecture, weights: Weights, about: Mapping[str, Any], classes: int, rows_per_class: int = 1
) -> Predictor:
    """Build a network, fill it with trained weights, and give it the normalisation of its inputs.

    ``weights``: The trained weights, or those that were exported; their classifier may have grown since the network was
        first built.
    ``about``: ``"shape"``, ``"mean"`` and ``"std"`` of the inputs in training.
    ``classes``: Number of classes with which the network is first built: all classes, or those of the first task.
    """
    # The initial weights are replaced, and leave the random generator alone.
    with one_thread_at_a_time(run=False), torch.random.fork_rng(devices=[]), plain_torch():
        network = architecture.build(tuple(about["shape"]), classes)
    if isinstance(network, FrozenNetwork):
        raise ConfigError(
            "this network computes its features with a frozen extractor, which is not part of the trained weights. "
            "model.safetensors in the trial's folder holds the classifier; use it behind that extractor."
        )
    weights = _imported(network, weights)
    resize_classifier(network, weights)
    load_weights(network, weights)
    return Predictor(network, about["mean"], about["std"], rows_per_class).eval()


def exported(network: nn.Module, weights: Weights) -> Weights:
    """Return weights by the names that they have in a user's own network, as its ``load_state_dict`` takes them.

    ``network``: The network that was trained, which may be the user's network in two parts.
    """
    if isinstance(network, SplitNetwork):
        named = {name: network.own_names(name) for name in weights}
        weights = {own: tensor.clone() for name, tensor in weights.items() for own in named[name]}
    return {**weights, **constants_of(network)}


def _imported(network: nn.Module, weights: Weights) -> Weights:
    """Return weights by a network's names, also if they have the names that `exported` gave them."""
    if constants := constants_of(network):
        weights = {name: tensor for name, tensor in weights.items() if name not in constants}
    if not isinstance(network, SplitNetwork) or weights.keys() == network.state_dict().keys():
        return weights
    names = {own: name for name in network.state_dict() for own in network.own_names(name)}
    return {names.get(name, name): tensor for name, tensor in weights.items()}


MODELS: dict[EvaluationModel, str] = {
    "last": "the last model",
    "round": "the mean of the last round's models",
    "moving": "the moving average of the rounds' models",
}
Resizing: TypeAlias = Literal["whole", "middle", "none"]
"""How an image file of another size becomes an input: all of it is resized, or its middle square, or it is refused."""


@dataclass(frozen=True)
class TrainedModel:
    """A finished trial's evaluation model.

    ``recipe``: The run's recipe.
    ``trial``: The trial, whose accuracies are those of this model.
    ``weights``: The weights, as the trial wrote them.
    ``predictor``: The network with these weights and the normalisation of its inputs.
    ``which``: Which model of the trial it is (see `EvaluationModel`).
    """

    recipe: Recipe
    trial: TrialResult
    weights: Weights
    predictor: Predictor
    which: EvaluationModel
    kept: dict[EvaluationModel, float]
    """The accuracies after the last round of this model and the others that the trial kept."""

    @property
    def choice(self) -> str:
        """Say which model of the trial it is, and how the trial's models score."""
        scores = [f"{MODELS[which]} {100 * score:.1f} %" for which, score in self.kept.items()]
        return f"{MODELS[self.which]} (accuracy after the last round: {', '.join(scores)})"

    @property
    def label_names(self) -> list[str]:
        """The names of the classes, in the order of the scores."""
        return [str(name) for name in self.trial.info["label_names"]]

    @property
    def input(self) -> dict[str, Any]:
        """Shape and type of an input, and its normalisation."""
        described: dict[str, Any] = self.trial.info["input"]
        return described

    @property
    def resizing(self) -> Resizing:
        """How image files become inputs: as in training, and for known data sets, whose sizes are fixed, by a cut."""
        if self.recipe.data_options.size:
            return "whole"
        return "middle" if is_known(self.recipe.data) else "none"


def trained_model(
    run: Run,
    *,
    method: str | None = None,
    seed: int | None = None,
    evaluation_model: EvaluationModel | None = None,
    allow_code: bool = False,
    model: Architecture | None = None,
) -> TrainedModel:
    """Read a trained model from a run folder.

    ``method``: The method's label or name; may be left out if the run has one method.
    ``seed``: The trial's seed; default: the first.
    ``evaluation_model``: Which model of the trial; default: the moving average if the run kept it, otherwise the mean
        of the round, or the only one (``run.evaluation_models``).
    ``allow_code``: Let the recipe import its network.
    ``model``: The network, if it was given in Python and cannot be imported.
    """
    trials = _trials_of(run, method)
    label = trials[0].label
    seeds = [trial.seed for trial in trials]
    if seed is not None and seed not in seeds:
        raise RunError(f"{label} has no trial with seed {seed} in {run.path}. Its seeds: {', '.join(map(str, seeds))}.")
    trial = next(trial for trial in trials if seed in (None, trial.seed))
    if not trial.finished:
        raise RunError(
            f"{label} with seed {trial.seed} stopped after {trial.rounds_done} of {trial.rounds_planned} rounds. "
            f"Finish it first: fedkeep resume {shlex.quote(str(run.path))}"
        )
    _check_predicts(trial)
    kept: list[EvaluationModel] = trial.info.get("evaluation_models") or ["last"]
    which = _choose(evaluation_model, kept, run)
    evaluated = {other.evaluation_model: other for other in run.trials if other.path == trial.path}
    of_model = {name: evaluated[name] for name in kept}
    trial = of_model[which]
    where = f"{run.path / 'recipe.toml'}"  # the clients' own networks, whose code may not be here, are not needed
    try:
        recipe = parse_recipe(run.recipe, where, allow_code=allow_code, model=model, without=("client_models",))
    except ConfigError as error:
        if not (own := " ".join(f"--use {shlex.quote(name)}" for name in used(run.path))):
            raise
        raise ConfigError(f"the run has code of its own, all of which is needed: {own}", *error.problems) from error
    weights = _read_weights(trial, "model.safetensors" if which == kept[0] else f"model-{which}.safetensors")
    if "input" not in trial.info:
        raise RunError(
            f"{trial.path} does not say how its inputs were normalised: it was written by an older version of FedKeep. "
            "Run the recipe again."
        )
    rows = recipe.method(trial.method).algorithm.rows_per_class
    # Older runs tell the same of what is no object, whose weights they described too.
    is_object = str(run.settings.get("model", {}).get("name", "")).endswith("()")
    told = run.info.get("trained") or (None if is_object else run.info.get("network"))
    warn_of_other_network(recipe.model, told, str(trial.path))
    predictor = build_predictor(recipe.model, weights, trial.info["input"], _first_classes(trial), rows)
    scores = {name: other.last for name, other in of_model.items()}
    return TrainedModel(recipe, trial, weights, predictor, which, scores)


def _trials_of(run: Run, method: str | None) -> list[TrialResult]:
    """Return the trials of one method, by seed, without those of its averages."""
    by_method: dict[str, list[TrialResult]] = {}
    for trial in deduplicate(run.trials):
        by_method.setdefault(trial.method, []).append(trial)
    if not by_method:
        raise RunError(f"{run.path} has no trial yet, so there is no model.")
    if method is None:
        if len(by_method) > 1:
            raise RunError(f"{run.path} has several methods. Choose one, method (--method): {', '.join(by_method)}.")
        method = next(iter(by_method))
    if not isinstance(method, str):
        raise RunError(f"method is a label or the name of a method, not {method!r:.80}.")
    return by_method[label_of(method, by_method, run)]


def _choose(which: EvaluationModel | None, kept: Sequence[EvaluationModel], run: Run) -> EvaluationModel:
    if which is None:
        return max(kept, key=get_args(EvaluationModel).index)  # the last of them averages most
    if which not in kept:
        raise RunError(
            f"{run.path} did not keep the model {which!r} of this method, but {', '.join(kept)}. Run its recipe again "
            f"""with: --set 'run.evaluation_models=["last", "{which if which != "last" else "moving"}"]'"""
        )
    return which


def _check_predicts(trial: TrialResult) -> None:
    """Raise `ConfigError` if a method's predictions are not those of its model alone."""
    if get_algorithm(trial.algorithm).predict is not Algorithm.predict:
        raise ConfigError(
            f"{trial.label} predicts with what its server keeps beside the model, so the model alone would predict "
            "something else. Its weights are in model.safetensors in the trial's folder."
        )


def _read_weights(trial: TrialResult, name: str) -> Weights:
    path = (trial.path or Path()) / name
    try:
        if (path.parent / MANIFEST).is_file():
            check_file(path, read_manifest(path.parent / MANIFEST)[0][name])
        return load_file(path)
    except KeyError:
        raise RunError(f"{path} is no file that its trial wrote. Remove {path.parent} and resume the run.") from None
    except DamagedFile as damage:
        raise RunError(f"{damage} Repeat its last rounds: fedkeep resume RUN.") from None
    except FileNotFoundError:
        hint = "An archive holds no models. " if any(place.is_file() for place in path.parents) else ""
        raise RunError(f"there is no model {path}. {hint}Give a run folder whose trial is finished.") from None
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot read {path}: {error}. Remove {path.parent} and resume the run.") from None


def _first_classes(trial: TrialResult) -> int:
    """Return the number of classes with which the network is built; later tasks add rows."""
    return (trial.task_sizes or [len(trial.info["label_names"])])[0]


def model_card(model: TrainedModel, *, onnx: bool) -> str:
    """Return the card of a model, in Markdown.

    ``onnx``: Whether the model was written for ONNX too.
    """
    trial, read = model.trial, model.trial.data_read()
    values = trial.class_history[-1]
    shown = ("no test examples" if math.isnan(value) else f"{100 * value:.1f} %" for value in values)
    return template("export", "card.md.jinja").render(
        model=model,
        onnx=onnx,
        has_columns=bool(columns_from_json(model.input)),
        is_custom=isinstance(model.recipe.model, Custom),
        training=_training(model),
        facts=[(what, text) for what, text in read.facts() if text and what in ("inputs", "examples", "noted")],
        classes=[
            (name, NOT_KNOWN if train is None else train, test, value)
            for (name, train, test), value in zip(read.classes, shown, strict=True)
        ],
        replies=_replies(trial, model.recipe),
        up=human_bytes(trial.up),
        down=human_bytes(trial.down),
        epsilon=partial(_epsilon, trial),
    )


def _replies(trial: TrialResult, recipe: Recipe) -> list[str]:
    """Return what left the clients in this run, a line for each client step."""
    found = describe_replies(get_algorithm(trial.algorithm), summed=recipe.privacy.secure_aggregation)
    if recipe.defense.loss_check != "off":
        found.append(describe_reply(send_label_counts))
    if recipe.run.client_test:
        found.append(describe_reply(client_test))
    return list(dict.fromkeys(found))


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


WEIGHTS, PROGRAM, ONNX, CONFIG, CARD = "model.safetensors", "model.pt2", "model.onnx", "config.json", "README.md"
"""The files of an exported model."""
INPUT, OUTPUT = "inputs", "scores"
"""The names of input and output in the ONNX file."""


@plain_torch()
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
    # A run that was begun in Python has its network.
    own = getattr(run, "architecture", None) if network is None else architecture_of(network)
    model = trained_model(
        run, method=method, seed=seed, evaluation_model=evaluation_model, allow_code=allow_code, model=own
    )
    if evaluation_model is None and len(model.kept) > 1:
        log.warning(
            f"{model.trial.method}: exported is {model.choice}. An average is taken, since it changes least from round "
            "to round, unless evaluation_model (--model) says otherwise: test examples must not choose."
        )
    with_onnx = onnx_available() if onnx is None else onnx
    if with_onnx and not onnx_available():
        raise ConfigError("ONNX needs packages that are not installed. Install the extra export: onnx, onnxscript.")
    name = f"{model.trial.path and model.trial.path.name}{'' if model.which == 'last' else f'-{model.which}'}"
    folder = Path(out) if out is not None else run.path / "export" / name
    if folder.is_file():
        raise RunError(f"{folder} is a file. Choose another --out.")
    weights = exported(model.predictor.network, model.weights)
    content = save({name: tensor.contiguous() for name, tensor in weights.items()}, {"format": "pt"})
    atomic_write(folder / WEIGHTS, content)
    program = _program(model, folder / WEIGHTS)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    atomic_write(folder / PROGRAM, buffer.getvalue())
    try:
        of_onnx = _onnx(program) if with_onnx else b""
    except Exception as error:  # whatever an operation is that ONNX has not
        if onnx:
            raise ConfigError(f"{model.recipe.model.name} cannot be written as ONNX: {first_line(error)}") from error
        log.warning("no %s: PyTorch cannot write this network as ONNX: %s", ONNX, first_line(error))
        of_onnx = b""
    if of_onnx:
        atomic_write(folder / ONNX, of_onnx)
    config = _config(model) | {"weights_sha256": hashlib.sha256(content).hexdigest()}
    atomic_write(folder / CONFIG, json.dumps(config, indent=2))
    atomic_write(folder / CARD, model_card(model, onnx=bool(of_onnx)))
    return folder


def onnx_available() -> bool:
    """Return whether the packages that write ONNX are installed."""
    return all(find_spec(name) is not None for name in ("onnx", "onnxscript"))


def _config(model: TrainedModel) -> dict[str, Any]:
    own = describe_code(model.recipe.model, tuple(model.input["shape"]), _first_classes(model.trial))
    return ({"trained": own} if own else {}) | {
        "method": model.trial.label,
        "algorithm": model.trial.algorithm,
        "seed": model.trial.seed,
        "evaluation_model": model.which,
        "accuracies": model.kept,
        "network": model_to_table(model.recipe.model),
        "first_classes": _first_classes(model.trial),
        "rows_per_class": model.predictor.rows_per_class,
        "input": model.input,
        "resizing": model.resizing,
        "data": as_table(model.recipe.data_options),
        "label_names": model.label_names,
    }


def _program(model: TrainedModel, weights: Path) -> torch.export.ExportedProgram:
    """Return the network as a PyTorch program, for any number of inputs at once."""
    example = torch.zeros(2, *model.input["shape"], dtype=getattr(torch, model.input["type"]))
    sizes = ({0: torch.export.Dim("batch", min=1)},)
    try:
        with _quiet():
            program = torch.export.export(model.predictor, (example,), dynamic_shapes=sizes)
    except Exception as error:  # whatever a user's network does that cannot be captured
        try:
            with _quiet():  # which follows len(x) too
                program = torch.export.export(model.predictor, (example,), dynamic_shapes=sizes, strict=True)
        except Exception:
            raise ConfigError(
                f"PyTorch cannot export the network {model.recipe.model.name}: {first_line(error)} Its weights are in "
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
