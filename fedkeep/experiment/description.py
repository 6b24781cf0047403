"""Descriptions of trials and partitions, for reports and for checks when a trial is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedkeep.data import Federation
from fedkeep.data.columns import columns_to_json
from fedkeep.data.partition import ByColumn
from fedkeep.data.schema import CLIENT
from fedkeep.experiment.build import class_names, data_digest, generator_hash
from fedkeep.experiment.initial_model import InitialModel
from fedkeep.experiment.recipe import Method, Recipe, describe_extractor, pretrained_models
from fedkeep.models.weights import tensor_hash
from fedkeep.options import as_table
from fedkeep.rounds.run_settings import distinct_models
from fedkeep.rounds.state import SimulationState

MAX_LISTED_CLIENTS = 100_000
"""The most clients whose examples by class are recorded; for a million it would be 30 MB in every trial."""


def describe_trial(
    recipe: Recipe,
    method: Method,
    seed: int,
    federation: Federation,
    data_dir: str | Path | None = None,
    initial: InitialModel | None = None,
) -> dict[str, Any]:
    """Describe a trial, for reports and for a later check that a resumed trial still has the same inputs.

    ``federation``: Which client holds which examples.
    ``data_dir``: The folder of local generators and extractors.
    ``initial``: The model from which it begins, if the recipe gives one.
    Returns: The description, which JSON can represent.
    """
    dataset, final = federation.dataset, federation.for_task(federation.num_tasks)
    classes = final.cumulative_classes[-1]  # over all tasks
    # The labels change if the generator's images are left out or not.
    dependencies = {"training data": tensor_hash(dataset.train["label"])}
    if federation.holds_client_data:
        dependencies["partition"] = " ".join(partition.hash for partition in federation.partitions)
        if digest := data_digest(recipe, data_dir):
            dependencies["data set"] = digest
    description = {
        "label": method.label,
        "algorithm": method.algorithm.name(),
        "options": as_table(method.algorithm),
        "training": {**method.algorithm.training_options, **method.training},
        "seed": seed,
        "rounds": recipe.rounds,
        "evaluation_models": list(distinct_models(recipe.run.evaluation_models, method.algorithm)),
        "sequential": method.algorithm.sequential,
        "paper": method.algorithm.paper,
        "cohort_size": recipe.run.cohort_size,
        "num_classes": classes,
        "dependencies": dependencies,
        **describe_data(federation),
    }
    found = {"idle_part": method.algorithm.idle_part(classes, federation.num_tasks), "metric": recipe.run.metric}
    description |= {name: value for name, value in found.items() if value}
    if recipe.has_tasks:
        tasks = final.stream.tasks if final.stream else ()
        description["tasks"] = [task.num_classes - task.num_old_classes for task in tasks]
        description["sharing"] = recipe.tasks.sharing
    extractors = []
    for whose, extractor in pretrained_models(recipe.model, recipe.client_models, data_dir).items():
        extractors.append((f"{whose}: " if whose else "") + describe_extractor(extractor, class_names(federation)))
        dependencies[f"extractor of {whose}" if whose else "extractor"] = extractor.hash()
    if extractors:
        description["extractor"] = "; ".join(extractors)
    if initial is not None:
        dependencies["initial model"] = initial.digest
        description["initial_model"] = {"made_by": initial.made_by, "weights": initial.given}
    if "generator" in method.algorithm.needs:
        description["generator"] = recipe.generator.describe(data_dir)
        dependencies["generator"] = generator_hash(recipe, data_dir)
    return description


def describe_data(federation: Federation) -> dict[str, Any]:
    """Describe the data of a federation, over all tasks: names, inputs, test examples of each class."""
    dataset, final = federation.dataset, federation.for_task(federation.num_tasks)
    tested = final.dataset.test["label"] if federation.holds_test_data else torch.zeros(0, dtype=torch.int64)
    named, scheme = dataset.values.get(CLIENT, ()) if federation.stream is None else (), federation.partition.scheme
    unused = f" The data name {len(named)} clients, and {scheme} makes others: partition.scheme=column takes them."
    return {
        "num_clients": len(federation.clients),
        "label_names": list(class_names(federation)),
        "input": {
            "shape": list(dataset.shape),
            "type": str(dataset.train["input"].dtype).removeprefix("torch."),
            "mean": list(dataset.mean),
            "std": list(dataset.std),
            "features": list(dataset.features),
            "columns": columns_to_json(dataset.columns),
        },
        "dataset": dataset.name,
        "dataset_note": (dataset.note + (unused if named and scheme != ByColumn.name else "")).strip(),
        "test_total": torch.bincount(tested, minlength=final.cumulative_classes[-1]).tolist(),
    }


def initial_model_evaluated(
    description: Mapping[str, Any], state: SimulationState, begun: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a description says of a given initial model, with its evaluation as that of round 0.

    ``begun`` is the description that a resumed trial has on record; empty before the first round.
    """
    if "initial_model" not in description:
        return {}
    if recorded := begun.get("initial_model"):
        return {"initial_model": recorded}
    if not state.federation.holds_test_data:
        return {}
    counts = state.evaluate(state.server.model)
    evaluated = {"round": 0, "correct": counts.correct, "total": counts.total, "test_loss": counts.loss}
    return {"initial_model": description["initial_model"] | evaluated}


def describe_partition(federation: Federation, local_models: bool = False) -> dict[str, Any]:
    """Describe a partition: its manifest, the number of examples by client and class, and the tasks.

    For more than `MAX_LISTED_CLIENTS` clients the numbers are left out, and the report has no heat map.

    ``local_models``: Clients' own models are evaluated, for which the numbers are always needed.
    Returns: The description, which JSON can represent.
    """
    stream = federation.stream
    manifest = federation.partition.manifest() if stream is None else stream.tasks[0].partition.manifest()
    tasks = {} if stream is None else {"tasks": stream.manifest()}
    listed = local_models or len(federation.clients) <= MAX_LISTED_CLIENTS
    names = _client_names(federation) if listed else ()
    return manifest | (_counts(federation) if listed else {}) | tasks | ({"client_names": list(names)} if names else {})


def _client_names(federation: Federation) -> tuple[str, ...]:
    """Return what the data call the clients "0", "1", ...; empty if each stands for several, or the data name none."""
    settings = federation.partition.settings
    if federation.partition.scheme != ByColumn.name or settings["num_clients"]:
        return ()
    column, names = federation.dataset.train[settings["column"]], federation.dataset.values.get(settings["column"], ())
    firsts = federation.partition.rows[federation.partition.offsets[:-1]]
    return tuple(names[int(number)] for number in column.cpu()[firsts]) if names else ()


def _counts(federation: Federation) -> dict[str, Any]:
    if federation.stream is None:
        counts = federation.partition.counts(federation.dataset.train["label"], federation.dataset.num_classes)
        return {"counts": counts.tolist()}
    stream = federation.stream
    label, classes = stream.dataset.train["label"], stream.tasks[-1].num_classes
    counts_by_task = [task.partition.counts(label, stream.dataset.num_classes)[:, :classes] for task in stream.tasks]
    return {"counts": torch.stack(counts_by_task).sum(0).tolist()}  # each class belongs to one task
