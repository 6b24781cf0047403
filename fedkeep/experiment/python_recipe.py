"""A recipe from what a user gives in Python: arrays, a module, clients' rows, names of methods."""

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedkeep.data import array_store
from fedkeep.data.partition import ByColumn, Scheme, get_scheme, schemes
from fedkeep.data.python_data import dataset_of, has_columns
from fedkeep.data.schema import CLIENT, DataOptions
from fedkeep.errors import ConfigError, DataError, PartitionError, did_you_mean
from fedkeep.experiment.build import load_data
from fedkeep.experiment.initial_model import keep_weights
from fedkeep.experiment.plugins import keep_loss, modules_of, why_not_importable
from fedkeep.experiment.recipe import SECTIONS, Recipe, select_methods
from fedkeep.experiment.recipe_files import titled
from fedkeep.experiment.recipe_loader import load_recipe, parse_recipe
from fedkeep.experiment.runtime import Machine
from fedkeep.losses.classification import OWN_LOSSES
from fedkeep.models import Architecture, architectures, get_architecture
from fedkeep.models.custom import Custom, custom
from fedkeep.options import options_of
from fedkeep.rounds.run_settings import RunSettings

log = logging.getLogger(__name__)
FROM_PYTHON = "python"
"""The name of a recipe that was made in Python alone."""
DEFAULTS = '[data]\nname = ""\n[model]\nname = "mlp"\n[[methods]]\nalgorithm = "fedavg"\n'
"""The recipe of a run whose data are given; they, the model, the partition and the methods are replaced."""
SET_BESIDE = tuple(f"{section}." for section in SECTIONS if section not in ("model", "partition"))
"""How settings begin that change such a recipe."""
DEFAULT_METHODS = ("fedavg", "fedseq", "sfedkd")
"""The methods of a run whose data are given, and no methods."""


def make_recipe(
    recipe: str | Path | Recipe | None,
    *,
    data: Any = None,
    partition: Any = None,
    methods: Any = None,
    loss: Any = None,
    settings: Sequence[str] = (),
    machine: Machine | None = None,
    **given: Any,
) -> Recipe:
    """Return a recipe with what was given in Python in the place of its own; see `fedkeep.run`.

    ``recipe``: The recipe; default: ``demo``, or none if ``data`` is given.
    ``machine``: The folder of local data sets, and whether a recipe may import its model.
    ``**given``: Fields of the recipe, and options of its ``run`` and ``data``; None for those that it has.
    """
    machine, only_data, settings = machine or Machine(), recipe is None and data is not None, as_list(settings)
    if only_data:
        base = _defaults(given.get("model"), partition, settings)
        methods = DEFAULT_METHODS if methods is None else methods
    else:
        size = given.get("cohort_size") if data is None and partition is None else None
        if settings and type(size) is int:  # the changed recipe is checked with it
            settings = [*settings, f"run.cohort_size={size}"]
        base, methods = _named(recipe, settings, methods, machine.allow_code)
    given = {name: value for name, value in given.items() if value is not None}
    columns, of_run = ({n: v for n, v in given.items() if n in options_of(part)} for part in (DataOptions, RunSettings))
    if data is not None and not any(setting.strip().startswith("data.") for setting in settings):
        base = replace(base, data_options=DataOptions())  # they were of other data
    changes = _data_and_partition(base, data, partition, machine.data_dir, columns)
    fields = {name: value for name, value in given.items() if name not in {*columns, *of_run}}
    changes |= {name: READ[name](value) if name in READ else value for name, value in fields.items()}
    if only_data:
        network, source = changes["model"].name.rpartition(":")[2], changes["data"].partition(":")[0]
        changes = {"title": titled(f"{network} on {source}", base.validation)} | changes
        clients = changes["partition"].num_clients or base.run.cohort_size
        of_run = {"cohort_size": min(base.run.cohort_size, clients)} | of_run
    if methods is not None:
        changes["methods"] = select_methods(base, as_list(methods))
    if loss is not None:
        changes["training"] = replace(changes.get("training", base.training), loss=keep_loss(loss))
    made = replace(base, run=replace(base.run, **of_run), **changes)
    return fit_cohort(made, machine.data_dir) if "cohort_size" not in given and "partition" in changes else made


def fit_cohort(recipe: Recipe, data_dir: str | Path | None = None) -> Recipe:
    """Return a recipe whose cohort is at most all clients, if only a column of the data says how many there are."""
    split = recipe.partition
    if not isinstance(split, ByColumn) or split.num_clients:
        return recipe
    column: Tensor | None = load_data(recipe.data, data_dir, options=recipe.data_options).train.get(split.column)
    clients = split.num_groups or (0 if column is None else len(np.unique(column.numpy())))
    return replace(recipe, run=replace(recipe.run, cohort_size=min(recipe.run.cohort_size, clients or 1)))


def _defaults(model: Any, partition: Any, settings: Sequence[str]) -> Recipe:
    """Return a recipe of default values; its data, model and partition are replaced."""
    others = [one for one in settings if not one.strip().startswith(SET_BESIDE) or one.strip().startswith("data.name")]
    if others:
        raise ConfigError(
            f"with data=, these are no settings: {', '.join(others)}. Give arguments: model=, partition= such as "
            "fedkeep.IID(num_clients=3), weights=, pretraining=, methods=[fedkeep.SFedKD(tau=1)]."
        )
    for name, value, examples in (
        ("model", model, f"a torch.nn.Module, its class, or one of {', '.join(architectures())}"),
        ("partition", partition, "a scheme such as Dirichlet(0.1, num_clients=20), {'a': [0, 4], ...}, or a column"),
    ):
        if value is None:
            raise ConfigError(f"data are given without a {name}. Give {name}= too: {examples}.")
    return parse_recipe(DEFAULTS, FROM_PYTHON, settings=settings)


def _named(recipe: Any, settings: Sequence[str], methods: Any, allow_code: bool) -> tuple[Recipe, Any]:
    """Return a recipe by name, or as it is; and the methods that remain to be chosen."""
    if isinstance(recipe, Recipe):
        if settings:
            raise ConfigError("settings change a recipe given by name; change a Recipe with dataclasses.replace.")
        return recipe, methods
    if recipe is not None and not isinstance(recipe, str | Path):
        raise ConfigError(
            f"a recipe is a name such as 'demo', a path to a .toml file or a Recipe, not a {type(recipe).__name__}. "
            "Tensors, models and partitions have arguments of their own: "
            "fedkeep.run(data=..., model=..., partition=...)."
        )
    name = "demo" if recipe is None else str(recipe)
    if methods is not None and all(isinstance(method, str) for method in as_list(methods)):
        return load_recipe(name, settings=settings, methods=as_list(methods), allow_code=allow_code), None
    method_settings = [setting for setting in settings if setting.partition(".")[0].strip() not in SECTIONS]
    if methods is not None and method_settings:
        raise ConfigError(f"settings {method_settings} change methods, and methods are given. Set their options there.")
    return load_recipe(name, settings=settings, allow_code=allow_code), methods


def seeds_of(seeds: Any) -> tuple[int, ...]:
    """Return seeds: a number of seeds stands for 0, 1, ..."""
    try:
        if isinstance(seeds, bool | str):
            raise TypeError
        found = tuple(map(operator.index, seeds if isinstance(seeds, Iterable) else range(operator.index(seeds))))
    except TypeError:
        found = ()
    if not found:
        raise ConfigError(
            f"seeds must be a number of seeds or a list of integers, not {seeds!r:.80}: seeds=3 runs the seeds 0, 1 "
            "and 2, and seeds=[0] only the seed 0."
        )
    return found


def _named_or_made(value: Any, base: type, named: Callable[[str], type]) -> Any:
    """Return what a name, a class or an object stands for; None if it is none of these."""
    if isinstance(value, str):
        value = named(value)
    if isinstance(value, type) and issubclass(value, base):
        value = value()
    return value if isinstance(value, base) else None


def architecture_of(model: Any) -> Architecture:
    """Return the architecture of a model that was given in Python.

    ``model``: A name such as ``"lenet5"``, an architecture with options, or what `fedkeep.custom` takes.
    """
    known: Architecture | None = _named_or_made(model, Architecture, get_architecture)
    if known is not None:
        return known
    if callable(model):
        return custom(model)
    raise ConfigError(
        f"model must be a torch.nn.Module, its class, a function (shape, classes) -> module, or one of "
        f"{', '.join(architectures())}, not {model!r:.80}."
    )


READ: Mapping[str, Callable[[Any], Any]] = {"model": architecture_of, "weights": keep_weights, "seeds": seeds_of}
"""How the fields of a recipe are read that Python gives in forms of its own."""


def as_list(given: Any) -> list[Any]:
    """Return what was given as a list; a name or an object alone stands for a list of it."""
    if isinstance(given, Iterable) and not isinstance(given, str | Mapping):
        return list(given)
    return [given]


def _data_and_partition(
    base: Recipe, data: Any, partition: Any, data_dir: str | Path | None, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the recipe's data and partition, as far as they were given."""
    by_rows = isinstance(partition, Mapping) or (isinstance(partition, Sequence) and not isinstance(partition, str))
    column = partition if isinstance(partition, str) and partition not in schemes() else ""
    options = replace(base.data_options, **columns)
    if column and not options.client and has_columns(base.data if data is None else data):
        options = replace(options, client=column)
    if data is None and by_rows:
        data = load_data(base.data, data_dir, options=options)
    client = options.client
    changes: dict[str, Any] = {"data_options": options}
    if data is not None:
        changes["data"] = examples_of(data, partition if by_rows else None, data_dir, options)
    if by_rows:
        changes["partition"] = ByColumn(num_clients=0, column=CLIENT)
    elif column:
        loaded = load_data(changes.get("data", base.data), data_dir, options=options)
        names = {name: name for name in loaded.train if name not in ("input", "label")}
        names |= {client: CLIENT} if client else {}
        if column not in names:
            raise PartitionError(
                f"partition={column!r} is neither a column of the data, which have "
                f"{', '.join(sorted(names)) or 'none'}, nor a scheme.{did_you_mean(column, schemes())}"
            )
        changes["partition"] = ByColumn(num_clients=0, column=names[column])
    elif partition is not None:
        changes["partition"] = _named_or_made(partition, Scheme, get_scheme)
        if changes["partition"] is None:
            raise PartitionError(
                "partition must be a scheme such as Dirichlet(0.1, num_clients=20), the rows of each client, "
                f"{{'a': [0, 4], 'b': [1]}}, or the name of a column, not {partition!r:.80}."
            )
    return changes


def examples_of(
    data: Any, rows: Any = None, data_dir: str | Path | None = None, options: DataOptions | None = None
) -> str:
    """Keep examples that were given in Python, and return the name by which they are found.

    ``data``: The examples (see `fedkeep.run`).
    ``data_dir``: The folder of local data sets.
    ``options``: How the columns of a table are read.
    """
    is_name = isinstance(data, str | Path)
    if rows is None and is_name:
        return str(data)
    dataset = load_data(str(data), data_dir, options=options) if is_name else dataset_of(data, options)
    if rows is not None and dataset.test_held_out:
        raise DataError(
            f"the clients' rows count the training examples, and of {dataset.name} some were held out for the test, so "
            "that the numbers would be those of other examples. Give test examples too, such as (x, y, x_test, y_test) "
            "or a file test.csv; or name a column of the data that says whose each example is, partition='site'."
        )
    return array_store.keep(dataset if rows is None else array_store.assign_clients(dataset, rows))


def own_classes(recipe: Recipe) -> list[Any]:
    """Return the classes and functions in a recipe that are not FedKeep's: methods, the scheme and the models."""
    models = [model.origin if isinstance(model, Custom) else type(model) for model in recipe.models]
    classes = [*(type(method.algorithm) for method in recipe.methods), type(recipe.partition), *models]
    classes += [loss for name, loss in OWN_LOSSES.items() if name == recipe.training.loss]
    return [value for value in classes if not str(getattr(value, "__module__", "")).startswith("fedkeep.")]


def for_workers(recipe: Recipe, machine: Machine) -> Machine:
    """Return a machine whose worker processes find the user's classes; with one process if they cannot.

    Returns: The machine. If it has fewer processes, or no Ray cluster any more, a warning says why.
    """
    classes = own_classes(recipe)
    on_ray = machine.executor == "ray"
    reason = next(filter(None, (why_not_importable(value, elsewhere=on_ray) for value in classes)), None)
    if reason is None:
        use = tuple(dict.fromkeys([*machine.use, *modules_of(classes)]))
        has_code = any(isinstance(model, Custom) for model in recipe.models)
        return replace(machine, use=use, allow_code=machine.allow_code or has_code)
    if machine.workers != 1 or on_ray:
        log.warning("One process runs everything, since %s; worker processes import code from files.", reason)
    return replace(machine, workers=1, executor="processes", address=None)
